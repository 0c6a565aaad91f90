"""The GPU side of a search: weights and buffers of a problem, made once; checks and timing.

Runs in a child process (`child.Child`), so that a kernel that hangs or breaks the CUDA context
costs one candidate and not the search. Where each rank has a GPU, each has a worker (real_ranks.py)
and all workers get the same calls: every step of a check ends where all ranks hear of a failure of
one, so that none waits for a launch that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from tl_megamoe import metrics, reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.kernel import CompiledKernel, KernelSpec, compile_kernel
from tl_megamoe.schedule import Schedule
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.timeouts import MegaMoeTimeout, check_reports
from tl_megamoe.virtual import ensure_connections
from tl_megamoe.weights import transform_weights

from . import gpu_state
from .farm import quiet_tilelang
from .messages import (
    STAGES,
    CellInfo,
    CheckResult,
    WorkerConfig,
    kernel_specs,
    merge_checks,
)
from .places import no_room_at_once
from .protocol import NUM_SETS, Block, CudaBench, Rules
from .ranks import RankFailed, Ranks, open_rank_sets

if TYPE_CHECKING:
    from tl_megamoe.reference import Comparison
    from tl_megamoe.weights import MoEWeights

T = TypeVar("T")

CHECKED_TOKENS = 1024
"""Tokens of a cell that are compared with the reference, drawn by the seed where there are more: in
float32, a K block at a time, all 8192 of a large layer would take seconds for every seed. 1024 put
many rows into each expert's pool blocks. The other tokens must be finite and equal to the bit from
launch to launch."""


class Worker:
    """Weights and buffers on the GPU, and the candidates of the current cell.

    The three sets share one routing, so that the touched experts are those of every launch, and
    differ in tokens, weights and memory. A set holds a buffer and weights for each rank of this
    process; a launch of virtual ranks is one fork and join of their streams.

    Attributes:
        sets: the ranks of each set; `ranks` are those of the first.
        buffers, weights: by set, those of the ranks here, the lowest rank first.
        outputs: by set, (ranks here x tokens, hidden) bf16, the tokens of the lowest rank first.
        plain: weights of all experts of set 0, for the reference.
        received: rows that each local expert of each rank, here or not, receives in this cell.
        checked: (up to CHECKED_TOKENS,) int64, rows of `outputs` that `expected` holds.

    Args:
        config: what to build.
        device: where; a CUDA device, or `cpu` in tests.
        compile_spec: makes a kernel; tests pass a fake.
        bench: times; a `CudaBench` when None.
        open_sets: makes the ranks of the sets.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        device: str = "cuda",
        compile_spec: Callable[[KernelSpec], CompiledKernel] = compile_kernel,
        bench: CudaBench | None = None,
        open_sets: Callable[[WorkerConfig, str], list[Ranks]] | None = None,
    ):
        self._device = device
        self._compile = compile_spec
        self.config = config
        problem = config.problem
        self.num_ranks = problem.num_ranks
        seed = NUM_SETS * config.seed
        self.plain = random_weights(replace(problem, num_ranks=1), device, seed)
        self.sets = (open_sets or open_rank_sets)(config, device)
        self.ranks = self.sets[0]
        self.buffers: list[tuple[SymmBuffer, ...]] = [
            tuple(ranks.buffers[rank] for rank in ranks.here) for ranks in self.sets
        ]
        self.weights = [
            [self._rank_weights(index, rank, seed + index) for rank in self.ranks.here]
            for index in range(NUM_SETS)
        ]
        self.bench = bench or CudaBench({}, rules=config.rules)
        self.bench.prepare = self._prepare
        self.bench.agree = self._agree
        self.bench.meet = self._meet
        self.schedules: dict[str, Schedule] = {}
        self.kernels: dict[str, dict[str, CompiledKernel]] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.num_tokens = 0
        self.received: list[list[int]] = []
        self.outputs: list[torch.Tensor] = []
        self.checked: torch.Tensor | None = None
        self.expected: torch.Tensor | None = None

    def describe(self) -> dict[str, str]:
        """Names and versions for the table; `card` is anonymous, empty where it is not known."""
        on_gpu = self._device != "cpu"
        uuid = gpu_state.device_uuid(self.ranks.device) if on_gpu else ""
        return {
            "device": str(torch.cuda.get_device_name(self.ranks.device)) if on_gpu else "cpu",
            "torch": str(torch.__version__),
            "card": gpu_state.card_id(uuid),
            "driver": gpu_state.driver_version() if on_gpu else "",
        }

    def cell(
        self,
        num_tokens: int,
        routing: str,
        seed: int | None = None,
        rules: Rules | None = None,
    ) -> CellInfo:
        """Start a cell: inputs into the three buffers, the reference of the first.

        Candidates are forgotten; their kernels stay loaded in this process.

        Args:
            num_tokens: of each rank.
            routing: as for `random_inputs`.
            seed: of routing and inputs; `config.seed` when None.
            rules: of the blocks of this cell; `config.rules` when None.
        """
        config, device = self.config, self._device
        for name in list(self.schedules):
            self.drop(name)
        seed = config.seed if seed is None else seed
        self.bench.rules = rules or config.rules
        self.num_tokens = num_tokens
        self.expected, self.checked, self.outputs = None, None, []
        # One draw for all ranks: they differ in their tokens and share the popular experts.
        whole = replace(config.problem, num_ranks=1)
        total = self.num_ranks * num_tokens
        routed = random_inputs(whole, total, routing, 0.0, seed, device)
        shape = (len(self.ranks.here) * num_tokens, config.problem.hidden)
        for index, buffers in enumerate(self.buffers):
            inputs = random_inputs(whole, total, routing, 0.0, seed + 1 + index, device)
            inputs = replace(inputs, topk_idx=routed.topk_idx, topk_weights=routed.topk_weights)
            for rank, buffer in zip(self.ranks.here, buffers, strict=True):
                mine = self._tokens_of(rank)
                buffer.fill(
                    inputs.x[mine],
                    inputs.x_sf[mine],
                    inputs.topk_idx[mine],
                    inputs.topk_weights[mine],
                )
            nothing = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
            self.outputs.append(nothing)
            if index == 0:
                self._set_expected(inputs, seed)
        self._meet()
        return self._cell_info(routed.topk_idx)

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        """Run a candidate twice on poisoned pools and compare with the reference and itself."""
        result = self._merged(self._guarded(partial(self._check_here, name, schedule)))
        if result.status == "ok":
            self.bench.cell[name] = partial(self._launch, name, self.config.phase)
            return result
        return self._failed(name, result)

    def recheck(self, name: str) -> CheckResult:
        """After timing: every set's result must still be what it was, to the bit.

        Set 0 is compared with the result before timing, the others with what timed launches left
        there: a schedule never changes a result. A set that no launch has written in this process
        is not compared.
        """
        result = self._merged(self._guarded(partial(self._recheck_here, name)))
        if result.status == "ok":
            return result
        if not result.context_lost:
            for y in self.outputs[1:]:  # what it left must not be held against another
                y.fill_(torch.nan)
        return self._failed(name, result)

    def drop(self, name: str) -> None:
        """Forget a candidate."""
        self.bench.forget(name)
        for store in (self.schedules, self.kernels, self.results):
            store.pop(name, None)

    def warm_up(self, name: str) -> None:
        """See `protocol.Bench`."""
        with self._reports():
            self._prepare(name)
            self.bench.warm_up(name)

    def block(self, name: str) -> Block:
        """See `protocol.Bench`."""
        with self._reports():
            return self.bench.block(name)

    def yardstick(self) -> float:
        """See `protocol.Bench`."""
        return self.bench.yardstick()

    # ---- a cell

    def _set_expected(self, inputs: Inputs, seed: int) -> None:
        """Choose the tokens to check among those of the ranks here, and compute what is right."""
        here = torch.cat(
            [
                torch.arange(self.num_ranks * self.num_tokens)[self._tokens_of(rank)]
                for rank in self.ranks.here
            ]
        )
        chosen = torch.randperm(len(here), generator=torch.Generator().manual_seed(seed))
        checked = chosen[:CHECKED_TOKENS].sort().values
        tokens = here[checked].to(self._device)
        self.checked = checked.to(self._device)
        self.expected = reference.moe(
            self.config.problem,
            inputs.x.view(torch.uint8)[tokens].view(inputs.x.dtype),
            inputs.x_sf[tokens],
            inputs.topk_idx[tokens],
            inputs.topk_weights[tokens],
            self.plain,
            self.config.recipe,
        )

    def _cell_info(self, topk_idx: torch.Tensor) -> CellInfo:
        problem, here = self.config.problem, self.ranks.here
        counts = topk_idx[topk_idx >= 0].bincount(minlength=problem.num_experts)
        self.received = counts.view(self.num_ranks, -1).tolist()
        remote = metrics.remote_pairs(
            [topk_idx[self._tokens_of(rank)] for rank in range(self.num_ranks)], problem
        )
        touched = [sum(count > 0 for count in self.received[rank]) for rank in here]
        pairs = [sum(self.received[rank]) for rank in here]
        return CellInfo(
            touched=sum(touched),
            pairs=sum(pairs),
            max_remote_pairs=max(remote[rank] for rank in here),
            max_touched=max(touched),
            max_pairs=max(pairs),
        )

    def _rank_weights(self, index: int, rank: int, seed: int) -> MoEWeights:
        """The weights of a rank in a set; those of set 0 are part of `plain`."""
        problem = self.config.problem
        if index == 0:
            first = rank * problem.num_local_experts
            plain = self.plain.of(slice(first, first + problem.num_local_experts))
        else:
            plain = random_weights(problem, self._device, seed, rank)
        return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)

    def _tokens_of(self, rank: int) -> slice:
        """A rank's rows of the tensors that hold the tokens of all ranks."""
        return slice(rank * self.num_tokens, (rank + 1) * self.num_tokens)

    # ---- checks

    def _check_here(self, name: str, schedule: Schedule) -> CheckResult:
        """What `check` finds on the ranks here."""
        reason = self._no_room(schedule, self.config.phase != "fused")
        if reason:
            return CheckResult("invalid", reason=reason)
        try:
            specs = kernel_specs(self.config, schedule)
            self.kernels[name] = self.ranks.in_turn(
                lambda: {phase: self._compile(spec) for phase, spec in specs.items()}
            )
        except RankFailed:
            return CheckResult("ok")  # the rank that failed says what it was
        except Exception as error:  # TVM raises many kinds
            return CheckResult("compile_error", reason=str(error)[-1000:])
        self.schedules[name] = schedule
        self._together(self._poison)
        first, second = self._run_once(name), self._run_once(name)
        same = self.compare(first)
        how_far = same.rel_error
        seen = f"rel_error={same.rel_error:.2e} worst_token={same.worst_token_error:.2e}"
        if not same:
            return CheckResult("incorrect", seen, same.reason, rel_error=how_far)
        strange = int((~first.isfinite()).sum())
        if strange:  # among the tokens that the reference has not computed
            reason = f"{strange} values of tokens that are not checked are NaN or infinite"
            return CheckResult("incorrect", seen, reason, rel_error=how_far)
        if not torch.equal(first, second):
            differing = int((first != second).sum())
            reason = f"{differing} values differ between two launches"
            return CheckResult("nondeterministic", seen, reason, rel_error=how_far)
        self.results[name] = first
        return CheckResult("ok", seen, rel_error=how_far)

    def compare(
        self,
        y: torch.Tensor,
        max_rel_error: float | None = None,
        max_token_error: float | None = None,
    ) -> Comparison:
        """A result of set 0 beside the reference, in the tokens that are checked.

        Args:
            y: (ranks here x tokens, hidden), as `outputs`.
            max_rel_error, max_token_error: as for `reference.compare`.
        """
        assert self.expected is not None
        found = reference.compare(
            y[self.checked],
            self.expected,
            intermediate=self.config.problem.intermediate,
            max_rel_error=max_rel_error,
            max_token_error=max_token_error,
        )
        if not found.reason or len(y) <= CHECKED_TOKENS:
            return found
        where = f"rows count the {CHECKED_TOKENS} of {len(y)} tokens that are checked"
        return replace(found, reason=f"{found.reason} ({where})")

    def _failed(self, name: str, result: CheckResult) -> CheckResult:
        if not result.context_lost:
            self.drop(name)
        return result

    def _recheck_here(self, name: str) -> CheckResult:
        """What `recheck` finds on the ranks here; all sets run, whatever is found in one."""
        timed = [self.results[name], *(y.clone() for y in self.outputs[1:])]
        reason = ""
        for index, expected in enumerate(timed):
            again = self._run_once(name, index)
            unknown = index > 0 and bool(expected.isnan().all())
            if unknown or torch.equal(again, expected):
                continue
            differing = int((again != expected).sum())
            reason = reason or f"{differing} values of set {index} differ after timing"
        return CheckResult("nondeterministic" if reason else "ok", reason=reason)

    def _guarded(self, work: Callable[[], CheckResult]) -> CheckResult:
        """What `work` finds, or what its exception means."""
        try:
            return work()
        except torch.cuda.OutOfMemoryError as error:
            return CheckResult("oom", reason=str(error)[:300])
        except Exception as error:
            return self._launch_failure(error)

    def _merged(self, own: CheckResult) -> CheckResult:
        """The result of all ranks, the same on each."""
        return merge_checks(self.ranks.gather(dict.fromkeys(self.ranks.here, own)))

    def _no_room(self, schedule: Schedule, phases: bool) -> str:
        """Why the GPUs or the buffers have no room for a candidate; empty when they do.

        The same on all ranks; `phases`: it runs as phases one after the other.
        """
        first, reason = self.ranks.first, ""
        if first.num_sms is not None and schedule.num_sms > first.num_sms:
            reason = (
                f"num_sms={schedule.num_sms} exceeds the {first.num_sms} SMs that a rank has here"
            )
        elif phases:
            reason = no_room_at_once(first, self.received, schedule.block_m)
        reasons = self.ranks.gather(dict.fromkeys(self.ranks.here, reason))
        return next(filter(None, reasons), "")

    def _poison(self) -> None:
        """Make set 0 forget: whatever a candidate before left there is not this one's."""
        self._meet()  # no peer's launch still writes here
        for buffer in self.buffers[0]:
            buffer.workspace.zero_()
            buffer.poison()
        self.outputs[0].fill_(torch.nan)

    # ---- launches

    def _launch(self, name: str, phase: str, index: int) -> None:
        kernel, schedule = self.kernels[name][phase], self.schedules[name]
        here, outputs = self.ranks.here, self.outputs[index].split(self.num_tokens)

        def launch(rank: int) -> None:
            place = here.index(rank)
            kernel.launch(
                self.buffers[index][place],
                self.weights[index][place],
                outputs[place],
                self.num_tokens,
                schedule,
            )

        self.sets[index].run(launch)

    def _run_once(self, name: str, index: int = 0) -> torch.Tensor:
        """The layer on one set: one fused launch, or all phases one after the other."""

        def run() -> torch.Tensor:
            for phase in self.kernels[name]:
                self._launch(name, phase, index)
            self._synchronize()
            return self.outputs[index].clone()

        return self._together(run)

    def _together(self, work: Callable[[], T]) -> T:
        """`work()` and a wait for the GPU, on every rank; what one of them raises, all raise."""
        out: list[T] = []
        failure: Exception | None = None
        try:
            out.append(work())
            self._synchronize()
        except Exception as error:
            failure = error
        told = None if failure is None else (type(failure).__name__, str(failure))
        every = self.ranks.gather(dict.fromkeys(self.ranks.here, told))
        if failure is not None:
            raise failure
        for rank, other in enumerate(every):
            if other is not None:
                raise RankFailed(other[0], f"rank {rank}: {other[0]}: {other[1]}")
        return out[0]

    def _synchronize(self) -> None:
        """Wait for the GPU; raises what its kernels did wrong."""
        if self._device != "cpu":
            torch.cuda.synchronize(self.ranks.device)

    def _agree(self, value: float) -> float:
        """The largest of the ranks' values: see `CudaBench`."""
        return max(self.ranks.gather(dict.fromkeys(self.ranks.here, value)))

    def _meet(self) -> None:
        """Return when the GPU of every rank is idle."""
        self.ranks.barrier()

    def _prepare(self, name: str) -> None:
        """Put into the buffers what a stand-alone phase reads; its layout follows block_m."""
        if self.config.phase != "fused":
            for index in range(NUM_SETS):
                for phase in STAGES:
                    self._launch(name, phase, index)

    @contextmanager
    def _reports(self) -> Iterator[None]:
        """Say of a launch that fails which of its waits timed out, if one did."""
        try:
            yield
        except Exception:
            self._check_reports()
            raise

    def _check_reports(self) -> None:
        check_reports([buffer for buffers in self.buffers for buffer in buffers])

    def _launch_failure(self, error: Exception) -> CheckResult:
        """What a launch that raised means; a CUDA error loses the context for good."""
        reason = f"{type(error).__name__}: {error}"
        status = "launch_error"
        try:
            self._check_reports()
        except MegaMoeTimeout as timeout:
            status, reason = "timeout", str(timeout)
        lost = self.context_lost()
        if isinstance(error, RankFailed) and status != "timeout":
            return CheckResult("ok", context_lost=lost)  # the rank that failed says what it was
        return CheckResult(status, "", reason[:1000], context_lost=lost)

    def context_lost(self) -> bool:
        """Whether a CUDA error has made this process useless."""
        try:
            self._synchronize()
            torch.zeros(1, device=self._device).item()
        except Exception:
            return True
        return False


def make_worker(config: WorkerConfig) -> Worker:
    """The factory that a child process imports; for one GPU."""
    if config.rank_mode == "virtual":
        ensure_connections()  # before anything starts CUDA
    quiet_tilelang()
    return Worker(config)
