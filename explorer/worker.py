"""The GPU side of a search: weights and buffers of a problem, made once; checks and timing.

Runs in a child process (`child.Child`), so that a kernel that hangs or breaks the CUDA context
costs one candidate and not the search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tl_megamoe import metrics, reference
from tl_megamoe.kernel import CompiledKernel, KernelSpec, compile_kernel
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .farm import quiet_tilelang
from .protocol import NUM_SETS, Block, CudaBench, Rules

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STAGES = ("dispatch", "linear1", "linear2", "combine")
"""The stand-alone phases in the order in which they make a layer."""
KERNEL_TIMEOUT_S = 5.0
"""Bound of a wait inside a kernel; the child's own deadline is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is built for; travels to the child.

    Attributes:
        problem: the one-rank layer.
        capacity: tokens of its buffers.
        phase: `fused` or one stand-alone phase.
        seed: of weights and inputs.
    """

    problem: Problem
    capacity: int
    recipe: Recipe
    phase: str = "fused"
    seed: int = 0
    rules: Rules = Rules()


@dataclass(frozen=True, slots=True)
class CellInfo:
    """The routing of a cell: experts that receive a row, and routes."""

    touched: int
    pairs: int


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
    differ in tokens, weights and memory.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        device: str = "cuda",
        compile_spec: Callable[[KernelSpec], CompiledKernel] = compile_kernel,
        bench: CudaBench | None = None,
    ):
        import torch

        from tl_megamoe.buffer import SymmBuffer
        from tl_megamoe.synthetic import random_weights
        from tl_megamoe.weights import transform_weights

        self._torch = torch
        self._device = device
        self._compile = compile_spec
        self.config = config
        problem = config.problem
        self.weights = []
        self.plain = None
        for index in range(NUM_SETS):
            plain = random_weights(problem, device, NUM_SETS * config.seed + index)
            self.weights.append(
                transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)
            )
            if index == 0:
                self.plain = plain
        self.buffers = [
            SymmBuffer(problem, config.capacity, device, timeout_s=KERNEL_TIMEOUT_S)
            for _ in range(NUM_SETS)
        ]
        self.bench = bench or CudaBench({}, rules=config.rules)
        self.bench.prepare = self._prepare
        self.schedules: dict[str, Schedule] = {}
        self.kernels: dict[str, dict[str, CompiledKernel]] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.num_tokens = 0
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
        routed = random_inputs(config.problem, num_tokens, routing, 0.0, config.seed, device)
        for index, buffer in enumerate(self.buffers):
            seed = config.seed + 1 + index
            inputs = random_inputs(config.problem, num_tokens, routing, 0.0, seed, device)
            buffer.fill(inputs.x, inputs.x_sf, routed.topk_idx, routed.topk_weights)
            shape = (num_tokens, config.problem.hidden)
            self.outputs.append(torch.empty(shape, dtype=torch.bfloat16, device=device))
            if index == 0:
                assert self.plain is not None
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
        return CellInfo(
            metrics.touched_experts(routed.topk_idx, config.problem),
            metrics.num_pairs(routed.topk_idx, config.problem),
        )

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        """Run a candidate twice on poisoned pools and compare with the reference and itself."""
        torch = self._torch
        try:
            specs = kernel_specs(self.config, schedule)
            self.kernels[name] = {phase: self._compile(spec) for phase, spec in specs.items()}
        except Exception as error:  # TVM raises many kinds
            return CheckResult("compile_error", reason=str(error)[-1000:])
        self.schedules[name] = schedule
        try:
            buffer = self.buffers[0]
            buffer.workspace.zero_()  # whatever a candidate before left there is not this one's
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

    def _launch(self, name: str, phase: str, index: int) -> None:
        self.kernels[name][phase].launch(
            self.buffers[index],
            self.weights[index],
            self.outputs[index],
            self.num_tokens,
            self.schedules[name],
        )

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
        reason = f"{type(error).__name__}: {error}"
        status = "launch_error"
        try:
            self.buffers[0].check_report()
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


def make_worker(config: WorkerConfig) -> Any:
    """The factory that a child process imports."""
    quiet_tilelang()
    return Worker(config)
