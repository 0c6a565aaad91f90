"""The GPU side of a bench: our kernel and the baselines on the same weights, inputs and routing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tl_megamoe.kernel import CompiledKernel, KernelSpec
from tl_megamoe.schedule import Schedule
from tl_megamoe.synthetic import Inputs
from tl_megamoe.weights import restore_weights

from ..child import Child
from ..farm import quiet_tilelang
from ..measure import Process
from ..messages import CheckResult, WorkerConfig
from ..protocol import NUM_SETS
from ..real_ranks import join_real_ranks, spawn_real_ranks
from ..worker import Worker
from . import BASELINES
from .base import Baseline, Layer, LayerSet, Prepared
from .unfused import Unfused


class BenchWorker(Worker):
    """A worker of one rank that knows baselines by name beside the candidates.

    The rank is alone, or one of several with a GPU each, whose workers get the same calls: every
    step of a check ends where all of them hear of a failure of one, as in `Worker`.

    Args:
        config: of one rank, or of ranks with a GPU each.
        baselines: those it knows.
        **options: as for `Worker`.
    """

    def __init__(
        self, config: WorkerConfig, baselines: Sequence[Baseline] = BASELINES, **options: Any
    ):
        super().__init__(config, **options)
        self.baselines = {baseline.name: baseline for baseline in baselines}
        self.prepared: dict[str, Prepared] = {}
        self._plain_sets: list[Any] = []

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        """Run a candidate, or the baseline of this name, and compare it with the reference.

        Args:
            name: of a baseline, or any other name of a candidate.
            schedule: the candidate; beside a baseline it says what our own kernels run.
        """
        if name not in self.baselines:
            return super().check(name, schedule)
        self.schedules[name] = schedule
        result = self._merged(self._guarded(partial(self._check_baseline, name, schedule)))
        if result.status == "ok":
            self.bench.cell[name] = self.prepared[name].launch
        elif not result.context_lost:
            self.drop(name)
        return result

    def recheck(self, name: str) -> CheckResult:
        """After timing: a baseline's result is still right; for a candidate see `Worker`."""
        if name not in self.prepared:
            return super().recheck(name)
        result = self._merged(self._guarded(partial(self._recheck_baseline, name)))
        if result.status != "ok" and not result.context_lost:
            self.drop(name)
        return result

    def drop(self, name: str) -> None:
        """Forget a candidate, or a baseline and its memory."""
        super().drop(name)
        self.prepared.pop(name, None)

    def _check_baseline(self, name: str, schedule: Schedule) -> CheckResult:
        reason = self._no_room(schedule, True) if name == Unfused.name else ""
        if reason:
            return CheckResult("invalid", reason=reason)
        self._together(self._poison)  # the rows that our own kernel has left are right
        layer, baseline = self._layer(schedule), self.baselines[name]
        self.prepared[name] = self._together(lambda: baseline.prepare(layer))
        self._run(name)
        return self._compare(name)

    def _recheck_baseline(self, name: str) -> CheckResult:
        """What the timed launches left, which ran into each other, and one more of each set."""
        left = self._compare(name)
        self._run(name)
        again = self._compare(name)
        return again if left.status == "ok" else left

    def _run(self, name: str) -> None:
        """All sets once, on all ranks."""

        def run() -> None:
            for index in range(NUM_SETS):
                self.prepared[name].launch(index)

        self._together(run)

    def _compare(self, name: str) -> CheckResult:
        """Set 0 against the reference, under the baseline's own bounds; all must be finite."""
        prepared, bounds = self.prepared[name], self.baselines[name].tolerance
        assert self.expected is not None
        same = self.compare(
            prepared.outputs[0],
            None if bounds is None else bounds.result_of(len(self.expected)),
            None if bounds is None else bounds.token,
        )
        seen = f"rel_error={same.rel_error:.2e} worst_token={same.worst_token_error:.2e}"
        seen = f"{seen} {prepared.notes}".rstrip()
        strange = sum(int((~y.isfinite()).sum()) for y in prepared.outputs)
        if not same or strange:
            reason = same.reason or f"{strange} values are NaN or infinite"
            return CheckResult("incorrect", seen, reason, rel_error=same.rel_error)
        return CheckResult("ok", seen, rel_error=same.rel_error)

    def _layer(self, schedule: Schedule) -> Layer:
        """The layer of this cell; the plain weights of the sets are made once."""
        if not self._plain_sets:
            self._plain_sets = [restore_weights(by_rank[0]) for by_rank in self.weights]
        sets, n = [], self.num_tokens
        for plain, buffers, weights in zip(
            self._plain_sets, self.buffers, self.weights, strict=True
        ):
            b = buffers[0]
            inputs = Inputs(b.x[:n], b.x_sf[:n], b.topk_idx[:n], b.topk_weights[:n])
            sets.append(LayerSet(plain, inputs, b, weights[0]))
        config, group = self.config, None
        if config.rank_mode == "real":
            import torch.distributed as dist

            group = dist.group.WORLD
        return Layer(config.problem, config.recipe, sets, schedule, self._compile_in_turn, group)

    def _compile_in_turn(self, spec: KernelSpec) -> CompiledKernel:
        """A kernel of ours; of several ranks all call it, and one compiles."""
        return self.ranks.in_turn(lambda: self._compile(spec))


def make_bench_worker(config: WorkerConfig) -> BenchWorker:
    """The factory that a child process imports; for one GPU."""
    quiet_tilelang()
    return BenchWorker(config)


def make_real_bench_worker(config: WorkerConfig, rank: int, port: int) -> BenchWorker:
    """The factory that the child of a rank imports; as `real_ranks.make_real_worker`."""
    device = join_real_ranks(config, rank, port)
    return BenchWorker(config, device=str(device))


def spawn_bench_worker(config: WorkerConfig) -> Process:
    """A fresh GPU process for a bench; one a rank where each has a GPU."""
    if config.rank_mode == "real":
        return spawn_real_ranks(config, factory=make_real_bench_worker)
    return Child(make_bench_worker, (config,))
