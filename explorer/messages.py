"""What a search and its GPU workers tell each other: what to build, what a cell and a check are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tl_megamoe.frozen import RANK_MODES
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .protocol import Rules

STAGES = ("dispatch", "linear1", "linear2", "combine")
"""The stand-alone phases in the order in which they make a layer."""
SEVERITY = (
    "launch_error",
    "timeout",
    "oom",
    "compile_error",
    "invalid",
    "incorrect",
    "nondeterministic",
    "ok",
)
"""Statuses of a check, the worst first: where a rank fails, others may wait for it in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is built for; travels to the child.

    Attributes:
        problem: the layer as it runs.
        capacity: tokens of a rank's buffer.
        rank_mode: `one`; `virtual`: the ranks of `problem` share the GPU; `real`: each has its own.
        phase: `fused` or one stand-alone phase.
        seed: of the weights, and of routing and inputs unless a cell has its own.

    Raises:
        ValueError: rank_mode, number of ranks and phase do not go together.
    """

    problem: Problem
    capacity: int
    recipe: Recipe
    rank_mode: str = "one"
    phase: str = "fused"
    seed: int = 0
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        mode, problem = self.rank_mode, self.problem
        if mode not in RANK_MODES:
            raise ValueError(
                f"rank_mode={mode!r} of a worker must be one of {', '.join(RANK_MODES)}"
            )
        if mode == "one" and problem.num_ranks != 1:
            raise ValueError(
                f"num_ranks={problem.num_ranks} of problem {problem.name!r} with "
                "rank_mode='one': pass problem.one_rank(), or rank_mode='virtual' or 'real'"
            )
        if mode == "real" and problem.num_ranks == 1:
            raise ValueError(
                f"num_ranks=1 of problem {problem.name!r} with rank_mode='real': one rank on one "
                "GPU is rank_mode='one'"
            )
        if mode == "real" and self.phase != "fused":
            raise ValueError(
                f"phase={self.phase!r} with rank_mode='real': stand-alone phases of several GPUs "
                "meet on the host between their launches, so none can be timed back to back. Time "
                "'fused', or the phases with rank_mode='virtual'"
            )


@dataclass(frozen=True, slots=True)
class CellInfo:
    """The routing of a cell, over all ranks.

    Attributes:
        touched: experts that receive a row.
        pairs: routes.
        max_remote_pairs: routes that the busiest rank receives from other ranks.
        max_touched: experts of one rank that receive a row, the most of any rank.
        max_pairs: routes that the busiest rank receives.
    """

    touched: int
    pairs: int
    max_remote_pairs: int = 0
    max_touched: int = 0
    max_pairs: int = 0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        status: of the results table.
        observation: how far off the result was.
        reason: why it is not ok.
        context_lost: the process is of no more use.
        rel_error: norm of the difference from the reference over the norm of the reference.
    """

    status: str
    observation: str = ""
    reason: str = ""
    context_lost: bool = False
    rel_error: float = 0.0


def merge_checks(results: Sequence[CheckResult]) -> CheckResult:
    """One result of all ranks: the worst, then the farthest off; a reason says whose it is.

    Args:
        results: by rank. When all are the same, as ranks say that have merged already, that is it.
    """
    if len(set(results)) == 1:
        return results[0]

    def goodness(rank: int) -> tuple[int, float]:
        return SEVERITY.index(results[rank].status), -results[rank].rel_error

    rank = min(range(len(results)), key=goodness)
    worst = results[rank]
    reason = f"rank {rank}: {worst.reason}" if worst.reason else ""
    return replace(worst, reason=reason, context_lost=any(r.context_lost for r in results))


def phases_of(phase: str) -> tuple[str, ...]:
    """The kernels that a candidate needs: a stand-alone phase is fed by the phases before it."""
    return ("fused",) if phase == "fused" else STAGES


def kernel_specs(config: WorkerConfig, schedule: Schedule) -> dict[str, KernelSpec]:
    """The kernels of a candidate by phase."""
    return {
        phase: KernelSpec(
            problem=config.problem,
            schedule=schedule,
            capacity=config.capacity,
            phase=phase,
            recipe=config.recipe,
        )
        for phase in phases_of(config.phase)
    }
