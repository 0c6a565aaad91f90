"""The GPU side of a bench: our kernel and the baselines on the same weights, inputs and routing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tl_megamoe import reference
from tl_megamoe.schedule import Schedule
from tl_megamoe.synthetic import Inputs
from tl_megamoe.weights import restore_weights

from ..child import Child
from ..farm import quiet_tilelang
from ..messages import CheckResult, WorkerConfig
from ..protocol import NUM_SETS
from ..worker import Worker
from . import BASELINES
from .base import Baseline, Layer, LayerSet, Prepared


class BenchWorker(Worker):
    """A worker of one rank that knows baselines by name beside the candidates.

    Args:
        config: of one rank.
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
        result = self._guarded(partial(self._check_baseline, name, schedule))
        if result.status == "ok":
            self.bench.cell[name] = self.prepared[name].launch
        elif not result.context_lost:
            self.drop(name)
        return result

    def recheck(self, name: str) -> CheckResult:
        """After timing: a baseline's result is still right; for a candidate see `Worker`."""
        if name not in self.prepared:
            return super().recheck(name)
        result = self._guarded(partial(self._run_and_compare, name))
        if result.status != "ok" and not result.context_lost:
            self.drop(name)
        return result

    def drop(self, name: str) -> None:
        """Forget a candidate, or a baseline and its memory."""
        super().drop(name)
        self.prepared.pop(name, None)

    def _check_baseline(self, name: str, schedule: Schedule) -> CheckResult:
        self.prepared[name] = self.baselines[name].prepare(self._layer(schedule))
        return self._run_and_compare(name)

    def _run_and_compare(self, name: str) -> CheckResult:
        """All sets once; set 0 against the reference, under the baseline's own bounds."""
        prepared, bounds = self.prepared[name], self.baselines[name].tolerance
        for index in range(NUM_SETS):
            prepared.launch(index)
        self._synchronize()
        assert self.expected is not None
        same = reference.compare(
            prepared.outputs[0][self.checked],
            self.expected,
            intermediate=self.config.problem.intermediate,
            max_rel_error=None if bounds is None else bounds.result_of(len(self.expected)),
            max_token_error=None if bounds is None else bounds.token,
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
        config = self.config
        return Layer(config.problem, config.recipe, sets, schedule, self._compile)


def make_bench_worker(config: WorkerConfig) -> BenchWorker:
    """The factory that a child process imports."""
    quiet_tilelang()
    return BenchWorker(config)


def spawn_bench_worker(config: WorkerConfig) -> Child:
    """A fresh GPU process for a bench."""
    return Child(make_bench_worker, (config,))
