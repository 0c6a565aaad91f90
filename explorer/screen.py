"""Screening: many candidates with few samples each, in interleaved batches beside the default."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tqdm import tqdm

from tl_megamoe.schedule import Schedule

from .cell import Cell
from .messages import CellInfo, CheckResult
from .protocol import Bench, Failure, Measurement, Rules, run_rounds
from .record import Recorder
from .strategy import Strategy, ranked

logger = logging.getLogger(__name__)


class CellBench(Bench, Protocol):
    """`protocol.Bench` with the checks around it: `measure.RemoteBench` or a fake."""

    def start(self) -> dict[str, str]: ...
    def facts(self) -> dict[str, str]: ...
    def cell(
        self,
        num_tokens: int,
        routing: str,
        seed: int | None = None,
        rules: Rules | None = None,
    ) -> CellInfo: ...
    def check(self, name: str, schedule: Schedule) -> CheckResult: ...
    def recheck(self, name: str) -> CheckResult: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Budget:
    """Seconds that a search may take on the GPU.

    Attributes:
        seconds: None for no limit.
        clock: seconds since some start.
    """

    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    _start: float | None = field(default=None, init=False)

    def start(self) -> None:
        """The GPU begins to work."""
        self._start = self.clock()

    @property
    def left(self) -> float:
        """Seconds that remain; infinity without a limit."""
        if self.seconds is None:
            return float("inf")
        spent = 0.0 if self._start is None else self.clock() - self._start
        return self.seconds - spent


class Round:
    """Candidates of a cell on the bench: checked once, then timed together any number of times.

    Args:
        cell: where they run.
        bench: the GPU, at this cell's routing.
        info: the routing.
        recorder: gets every failure at once.
        stage: of the rows.
        seed: of the routing.
    """

    def __init__(
        self,
        cell: Cell,
        bench: CellBench,
        info: CellInfo,
        recorder: Recorder,
        stage: str,
        seed: int,
    ):
        self.cell = cell
        self.bench = bench
        self.info = info
        self.recorder = recorder
        self.stage = stage
        self.seed = seed
        self.ready: dict[str, Schedule] = {}
        self.failed: set[Schedule] = set()
        self.readings: list[float] = []

    def check(self, schedules: Sequence[Schedule]) -> None:
        """Run candidates against the reference, those that were not yet."""
        for schedule in schedules:
            if schedule.name in self.ready or schedule in self.failed:
                continue
            found = self.bench.check(schedule.name, schedule)
            if found.status == "ok":
                self.ready[schedule.name] = schedule
            else:
                self._fail(schedule, found)

    def time(
        self,
        schedules: Sequence[Schedule],
        rules: Rules,
        order_seed: int,
        *,
        warm_up: bool = True,
        observation: int | None = None,
    ) -> None:
        """One interleaved round of those that passed; a row each."""
        names = [s.name for s in dict.fromkeys(schedules) if s.name in self.ready]
        timed = run_rounds(
            self.bench,
            names,
            rules=rules,
            seed=order_seed,
            warm_up=warm_up,
            readings=self.readings,
        )
        measured = {n: m for n, m in timed.items() if isinstance(m, Measurement)}
        yardstick = max((m.max_yardstick_tflops for m in measured.values()), default=0.0)
        baseline = measured.get(self.cell.baseline.name)
        extra = {} if observation is None else {"observation": observation}
        rows = []
        for name, found in timed.items():
            schedule = self.ready[name]
            if isinstance(found, Failure):
                self._fail(schedule, CheckResult(found.status, "", found.reason))
                continue
            args = (self.cell, schedule, found, self.info, yardstick, baseline)
            row = self.recorder.measured_row(*args, stage=self.stage, seed=self.seed)
            rows.append({**row, **extra})
        self.recorder.meet(self.bench.facts())
        self.recorder.write(rows)

    def recheck(self, schedules: Sequence[Schedule]) -> None:
        """After timing: every result must still be what it was, to the bit."""
        for schedule in schedules:
            if schedule.name in self.ready:
                found = self.bench.recheck(schedule.name)
                if found.status != "ok":
                    self._fail(schedule, found)

    def _fail(self, schedule: Schedule, found: CheckResult) -> None:
        self.ready.pop(schedule.name, None)
        if schedule != self.cell.baseline:  # all need it: the next round tries it again
            self.failed.add(schedule)
        self.recorder.write(
            [self.recorder.check_row(self.cell, schedule, found, self.stage, self.seed)]
        )


def screen(
    cell: Cell,
    bench: CellBench,
    recorder: Recorder,
    strategy: Strategy,
    first: list[Schedule],
    build: Callable[[Cell, list[Schedule]], list[Schedule]],
    rules: Rules,
    enough: Callable[[], bool],
) -> None:
    """Time what a strategy asks for, batch by batch; rows are written after each.

    The default and the best so far run in every batch: the one makes rows of different batches
    comparable, the other is measured again every few trials.

    Args:
        cell: its candidates.
        bench: the GPU.
        recorder: gets the rows and knows those of earlier runs.
        strategy: hands out batches.
        first: the batch that it handed out already.
        build: compiles candidates, records those that cannot run, and returns the others.
        rules: the numbers of a screening block.
        enough: whether the budget is spent.
    """
    stage: Round | None = None
    seed = recorder.options.seed
    label = f"{cell.label}: screen"
    with tqdm(desc=label, unit="trial", file=sys.stderr) as bar:
        asked = first
        while not enough():
            if not asked:
                return
            batch = build(cell, asked)
            bar.update(len(asked))
            if not batch:  # failures have rows now, so that the next batch is another one
                again = strategy.ask()
                if again == asked:
                    logger.warning(
                        "%s: %d candidates cannot run and have no row", label, len(asked)
                    )
                    return
                asked = again
                continue
            if stage is None:
                info = bench.cell(cell.num_tokens, cell.source, seed, rules)
                stage = Round(cell, bench, info, recorder, "screen", seed)
            best = ranked(cell.schedules, lambda s: recorder.seen(cell, s))[:1]
            group = list(dict.fromkeys([*batch, *build(cell, [cell.baseline]), *best]))
            stage.check(group)
            stage.time(group, rules, order_seed=len(stage.ready))
            stage.recheck(batch)
            asked = strategy.ask()
    logger.warning("%s: the budget is spent; the same command goes on from here", label)
