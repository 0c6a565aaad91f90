"""The GPU side of a search: weights and buffers of a problem, made once; checks and timing.

Runs in a child process (`child.Child`), so that a kernel that hangs or breaks the CUDA context
costs one candidate and not the search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tl_megamoe import metrics, reference
from tl_megamoe.device.walk import first_blocks
from tl_megamoe.kernel import CompiledKernel, KernelSpec, compile_kernel
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .farm import quiet_tilelang
from .protocol import NUM_SETS, Block, CudaBench, Rules

if TYPE_CHECKING:
    import torch

    from tl_megamoe.virtual import VirtualGroup
    from tl_megamoe.weights import MoEWeights, PlainWeights

logger = logging.getLogger(__name__)

STAGES = ("dispatch", "linear1", "linear2", "combine")
"""The stand-alone phases in the order in which they make a layer."""
KERNEL_TIMEOUT_S = 5.0
"""Bound of a wait inside a kernel; the child's own deadline is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is built for; travels to the child.

    Attributes:
        problem: the layer as it runs.
        capacity: tokens of a rank's buffer.
        rank_mode: `one`, or `virtual`: the ranks of `problem` share the GPU.
        phase: `fused` or one stand-alone phase.
        seed: of weights and inputs.
    """

    problem: Problem
    capacity: int
    recipe: Recipe
    rank_mode: str = "one"
    phase: str = "fused"
    seed: int = 0
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        if self.rank_mode not in ("one", "virtual"):
            raise ValueError(
                f"rank_mode={self.rank_mode!r} of a worker must be 'one' or 'virtual': it has one "
                "GPU"
            )
        if self.rank_mode == "one" and self.problem.num_ranks != 1:
            raise ValueError(
                f"num_ranks={self.problem.num_ranks} of problem {self.problem.name!r} with "
                "rank_mode='one': pass problem.one_rank(), or rank_mode='virtual'"
            )


@dataclass(frozen=True, slots=True)
class CellInfo:
    """The routing of a cell, over all ranks of the GPU.

    Attributes:
        touched: experts that receive a row.
        pairs: routes.
        max_remote_pairs: routes that the busiest rank receives from other ranks.
    """

    touched: int
    pairs: int
    max_remote_pairs: int = 0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check before timing found; `observation` says how far off the result was."""

    status: str
    observation: str = ""
    reason: str = ""
    context_lost: bool = False


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


class Worker:
    """Weights and buffers on the GPU, and the candidates of the current cell.

    The three sets share one routing, so that the touched experts are those of every launch, and
    differ in tokens, weights and memory. A set holds a buffer and weights for each rank; a launch
    of several ranks is one fork and join of their streams.

    Attributes:
        buffers, weights: by set, then rank.
        outputs: by set, (ranks x tokens, hidden) bf16, the tokens of rank 0 first.
        plain: weights of all experts of set 0, for the reference.
        received: rows that each local expert of each rank receives in this cell.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        device: str = "cuda",
        compile_spec: Callable[[KernelSpec], CompiledKernel] = compile_kernel,
        bench: CudaBench | None = None,
        make_group: Callable[[int], VirtualGroup] | None = None,
    ):
        import torch

        from tl_megamoe.buffer import SymmBuffer
        from tl_megamoe.synthetic import random_weights
        from tl_megamoe.virtual import VirtualGroup

        self._torch = torch
        self._device = device
        self._compile = compile_spec
        self.config = config
        problem = config.problem
        self.num_ranks = problem.num_ranks
        self.group = None
        if config.rank_mode == "virtual":
            self.group = (make_group or partial(VirtualGroup, device=device))(self.num_ranks)
        seed = NUM_SETS * config.seed
        self.plain = random_weights(replace(problem, num_ranks=1), device, seed)
        self.weights = [
            [self._rank_weights(index, rank, seed + index) for rank in range(self.num_ranks)]
            for index in range(NUM_SETS)
        ]
        options: dict[str, Any] = {"timeout_s": KERNEL_TIMEOUT_S, "recipe": config.recipe}
        self.buffers: list[tuple[SymmBuffer, ...]] = [
            (SymmBuffer(problem, config.capacity, device, **options),)
            if self.group is None
            else self.group.buffers(problem, config.capacity, **options)
            for _ in range(NUM_SETS)
        ]
        self.bench = bench or CudaBench({}, rules=config.rules)
        self.bench.prepare = self._prepare
        self.schedules: dict[str, Schedule] = {}
        self.kernels: dict[str, dict[str, CompiledKernel]] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.num_tokens = 0
        self.received: list[list[int]] = []
        self.outputs: list[torch.Tensor] = []
        self.expected: torch.Tensor | None = None

    def describe(self) -> dict[str, str]:
        """Names and versions for the table."""
        torch = self._torch
        return {"device": str(torch.cuda.get_device_name()), "torch": str(torch.__version__)}

    def cell(self, num_tokens: int, routing: str) -> CellInfo:
        """Start a cell: inputs into the three buffers, the reference of the first."""
        from tl_megamoe.synthetic import random_inputs

        torch, config, device = self._torch, self.config, self._device
        for name in list(self.schedules):
            self.drop(name)
        self.num_tokens = num_tokens
        self.expected, self.outputs = None, []
        # One draw for all ranks: they differ in their tokens and share the popular experts.
        whole = replace(config.problem, num_ranks=1)
        total = self.num_ranks * num_tokens
        routed = random_inputs(whole, total, routing, 0.0, config.seed, device)
        for index, buffers in enumerate(self.buffers):
            seed = config.seed + 1 + index
            inputs = random_inputs(whole, total, routing, 0.0, seed, device)
            for rank, buffer in enumerate(buffers):
                mine = self._tokens_of(rank)
                buffer.fill(
                    inputs.x[mine],
                    inputs.x_sf[mine],
                    routed.topk_idx[mine],
                    routed.topk_weights[mine],
                )
            shape = (total, config.problem.hidden)
            self.outputs.append(torch.empty(shape, dtype=torch.bfloat16, device=device))
            if index == 0:
                self.expected = reference.moe(
                    config.problem,
                    inputs.x,
                    inputs.x_sf,
                    routed.topk_idx,
                    routed.topk_weights,
                    self.plain,
                    config.recipe,
                )
        self._synchronize()
        by_rank = [routed.topk_idx[self._tokens_of(rank)] for rank in range(self.num_ranks)]
        counts = routed.topk_idx.flatten().bincount(minlength=whole.num_experts)
        self.received = counts.view(self.num_ranks, -1).tolist()
        return CellInfo(
            metrics.touched_experts(routed.topk_idx, config.problem),
            metrics.num_pairs(routed.topk_idx, config.problem),
            max(metrics.remote_pairs(by_rank, config.problem)),
        )

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        """Run a candidate twice on poisoned pools and compare with the reference and itself."""
        torch = self._torch
        reason = self._no_room(schedule)
        if reason:
            return CheckResult("invalid", reason=reason)
        try:
            specs = kernel_specs(self.config, schedule)
            self.kernels[name] = {phase: self._compile(spec) for phase, spec in specs.items()}
        except Exception as error:  # TVM raises many kinds
            return CheckResult("compile_error", reason=str(error)[-1000:])
        self.schedules[name] = schedule
        try:
            for buffer in self.buffers[0]:
                buffer.workspace.zero_()  # whatever a candidate before left is not this one's
                buffer.poison()
            self.outputs[0].fill_(torch.nan)
            first = self._run_once(name)
            second = self._run_once(name)
        except torch.cuda.OutOfMemoryError as error:
            return self._failed(name, CheckResult("oom", reason=str(error)[:300]))
        except Exception as error:
            return self._failed(name, self._launch_failure(error))
        assert self.expected is not None
        same = reference.compare(
            first, self.expected, intermediate=self.config.problem.intermediate
        )
        seen = f"rel_error={same.rel_error:.2e} worst_token={same.worst_token_error:.2e}"
        if not same:
            return self._failed(name, CheckResult("incorrect", seen, same.reason))
        if not torch.equal(first, second):
            differing = int((first != second).sum())
            reason = f"{differing} values differ between two launches"
            return self._failed(name, CheckResult("nondeterministic", seen, reason))
        self.results[name] = first
        self.bench.cell[name] = partial(self._launch, name, self.config.phase)
        return CheckResult("ok", seen)

    def recheck(self, name: str) -> CheckResult:
        """After timing: every set's result must still be what it was, to the bit.

        Set 0 is compared with the result before timing, the others with what timed launches left
        there: a schedule never changes a result.
        """
        timed = [self.results[name], *(y.clone() for y in self.outputs[1:])]
        for index, expected in enumerate(timed):
            try:
                again = self._run_once(name, index)
            except Exception as error:
                return self._failed(name, self._launch_failure(error))
            if not self._torch.equal(again, expected):
                differing = int((again != expected).sum())
                reason = f"{differing} values of set {index} differ after timing"
                return self._failed(name, CheckResult("nondeterministic", "", reason))
        return CheckResult("ok")

    def drop(self, name: str) -> None:
        """Forget a candidate."""
        self.bench.forget(name)
        for store in (self.schedules, self.kernels, self.results):
            store.pop(name, None)

    def warm_up(self, name: str) -> None:
        """See `protocol.Bench`."""
        self._prepare(name)
        self.bench.warm_up(name)

    def block(self, name: str) -> Block:
        """See `protocol.Bench`."""
        return self.bench.block(name)

    def yardstick(self) -> float:
        """See `protocol.Bench`."""
        return self.bench.yardstick()

    def _rank_weights(self, index: int, rank: int, seed: int) -> MoEWeights:
        """The weights of a rank in a set; those of set 0 are part of `plain`."""
        from tl_megamoe.synthetic import random_weights
        from tl_megamoe.weights import transform_weights

        problem = self.config.problem
        if index == 0:
            first = rank * problem.num_local_experts
            plain = _experts_of(self.plain, slice(first, first + problem.num_local_experts))
        else:
            plain = random_weights(problem, self._device, seed, rank)
        return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)

    def _no_room(self, schedule: Schedule) -> str:
        """Why the GPU or the buffers have no room for a candidate; empty when they do."""
        first = self.buffers[0][0]
        if first.num_sms is not None and schedule.num_sms > first.num_sms:
            return (
                f"num_sms={schedule.num_sms} exceeds the {first.num_sms} SMs that a rank has here"
            )
        if self.config.phase == "fused":
            return ""
        block_m, ring = schedule.block_m, first.layout.ring_blocks(schedule.block_m)
        blocks = max(first_blocks(counts, block_m)[-1] for counts in self.received)
        if blocks <= ring:
            return ""
        # The fused kernel reuses rows while it runs; phases one after the other cannot.
        return (
            f"block_m={block_m} makes {blocks} pool blocks of a rank, and a phase alone has memory "
            f"for {ring}: search with a larger --capacity than {self.config.capacity}"
        )

    def _tokens_of(self, rank: int) -> slice:
        """A rank's rows of the tensors that hold all tokens."""
        return slice(rank * self.num_tokens, (rank + 1) * self.num_tokens)

    def _launch(self, name: str, phase: str, index: int) -> None:
        kernel, schedule = self.kernels[name][phase], self.schedules[name]
        outputs = [self.outputs[index][self._tokens_of(r)] for r in range(self.num_ranks)]

        def launch(rank: int) -> None:
            kernel.launch(
                self.buffers[index][rank],
                self.weights[index][rank],
                outputs[rank],
                self.num_tokens,
                schedule,
            )

        if self.group is None:
            launch(0)
        else:
            self.group.run(launch)

    def _run_once(self, name: str, index: int = 0) -> torch.Tensor:
        """The layer on one set: one fused launch, or all phases one after the other."""
        for phase in self.kernels[name]:
            self._launch(name, phase, index)
        self._synchronize()
        return self.outputs[index].clone()

    def _synchronize(self) -> None:
        """Wait for the GPU; raises what its kernels did wrong."""
        if self._device != "cpu":
            self._torch.cuda.synchronize()

    def _prepare(self, name: str) -> None:
        """Put into the buffers what a stand-alone phase reads; its layout follows block_m."""
        if self.config.phase != "fused":
            for index in range(NUM_SETS):
                for phase in STAGES:
                    self._launch(name, phase, index)

    def _failed(self, name: str, result: CheckResult) -> CheckResult:
        if not result.context_lost:
            self.drop(name)
        return result

    def _launch_failure(self, error: Exception) -> CheckResult:
        """What a launch that raised means; a CUDA error loses the context for good."""
        from tl_megamoe.buffer import check_reports

        reason = f"{type(error).__name__}: {error}"
        status = "launch_error"
        try:
            check_reports([buffer for buffers in self.buffers for buffer in buffers])
        except Exception as timeout:
            status, reason = "timeout", str(timeout)
        return CheckResult(status, "", reason[:1000], context_lost=self.context_lost())

    def context_lost(self) -> bool:
        """Whether a CUDA error has made this process useless."""
        try:
            self._synchronize()
            self._torch.zeros(1, device=self._device).item()
        except Exception:
            return True
        return False


def _experts_of(plain: PlainWeights, experts: slice) -> PlainWeights:
    return replace(
        plain,
        l1=plain.l1[experts],
        l1_sf=plain.l1_sf[experts],
        l2=plain.l2[experts],
        l2_sf=plain.l2_sf[experts],
    )


def make_worker(config: WorkerConfig) -> Any:
    """The factory that a child process imports."""
    if config.rank_mode == "virtual":
        from tl_megamoe.virtual import ensure_connections

        ensure_connections()  # before anything starts CUDA
    quiet_tilelang()
    return Worker(config)
