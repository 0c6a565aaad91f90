"""The measured part of a search: screens every cell, then confirms every token count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tl_megamoe.device.walk import first_blocks
from tl_megamoe.layout import make_layout
from tl_megamoe.schedule import Schedule

from .cell import Cell
from .confirm import candidates_of, confirm, seconds_of
from .cost import uniform_counts
from .duplicates import launch_key
from .farm import NOT_BUILT, Farm, kernel_digest
from .messages import WorkerConfig
from .options import SearchOptions, worker_config
from .planning import build_cells, compile_schedules
from .points import dimensions, point_schedule, space_digest
from .record import Recorder
from .screen import Budget, CellBench, screen
from .strategy import Grid, Halving, OptunaSearch, Strategy

OPTUNA_TRIALS = 64
"""Candidates of a cell with --strategy optuna and no --limit."""

W = TypeVar("W")
MakeBench = Callable[[WorkerConfig, Schedule], CellBench]


class Session:
    """The measured part: screens every cell, then confirms every cell."""

    def __init__(
        self,
        options: SearchOptions,
        farm: Farm,
        recorder: Recorder,
        cells: list[Cell],
        budget: Budget,
    ):
        self.options = options
        self.farm = farm
        self.recorder = recorder
        self.cells = cells
        self.budget = budget
        self.config = worker_config(options)

    def run(self, make_bench: MakeBench, num_gpus: int) -> None:
        """Do all of it, on up to `num_gpus` GPU processes at once."""
        build_cells(self.options, self.cells, self.farm)
        for cell in self.cells:
            if not cell.can_run(cell.baseline) and cell.baseline not in cell.schedules:
                raise ValueError(
                    f"{cell.label}: the built-in default {cell.baseline.name}, beside which all "
                    "others are timed, has no prebuilt kernel. Build with the flags of the search"
                )
            self._refuse(cell)
        work = [self._screen_work(cell) for cell in self.cells]
        pool = Benches(lambda: make_bench(self.config, self.cells[-1].baseline), self.recorder)
        self.budget.start()  # making weights and buffers counts
        try:
            pool.each([w for w in work if w[2]], partial(self._screen, num_gpus), num_gpus)
            if self.options.confirm_top:
                pool.each(self._confirm_work(), self._confirm, num_gpus)
        finally:
            pool.close()

    def _screen_work(self, cell: Cell) -> tuple[Cell, Strategy, list[Schedule]]:
        """A cell, its strategy and the first batch, empty when there is nothing left to time."""
        strategy = self._strategy(cell)
        if isinstance(strategy, OptunaSearch):  # what it proposed in earlier runs
            self._build(cell, list(strategy.known), strategy)
        return cell, strategy, strategy.ask()

    def _screen(
        self,
        num_gpus: int,
        work: tuple[Cell, Strategy, list[Schedule]],
        bench: CellBench,
        remaining: int,
    ) -> None:
        cell, strategy, first = work
        # At most half is kept for confirming: a small budget screens, the next one confirms.
        until = float("-inf")
        if self.options.budget_s is not None:
            left = self.budget.left
            free = left - min(self._reserve() / num_gpus, left / 2)
            until = left - free * min(1.0, num_gpus / remaining)
        screen(
            cell,
            bench,
            self.recorder,
            strategy,
            first,
            lambda c, schedules: self._build(c, schedules, strategy),
            self.options.screen_rules,
            lambda: self.budget.left <= until,
        )

    def _confirm_work(self) -> list[tuple[list[Cell], list[Schedule]]]:
        """For each token count that is not confirmed, its cells and the candidates to compare."""
        o = self.options
        counts = sorted({cell.num_tokens for cell in self.cells})
        by_count = [[c for c in self.cells if c.num_tokens == count] for count in counts]
        work = []
        for place, cells in enumerate(by_count):
            beside = [*by_count[max(0, place - 1) : place], *by_count[place + 1 : place + 2]]
            chosen = candidates_of(cells, beside, o.weights, self.recorder, o.confirm_top)
            names = {s.name for s in chosen}
            if chosen and not self.recorder.confirmed_together(
                cells, names, o.seeds, o.num_observations
            ):
                work.append((cells, chosen))
        return work

    def _confirm(
        self, work: tuple[list[Cell], list[Schedule]], bench: CellBench, remaining: int
    ) -> None:
        cells, schedules = work
        for cell in cells:
            complete = confirm(
                cell,
                schedules,
                bench,
                self.recorder,
                self.options.rules,
                self.options.seeds,
                self.options.num_observations,
                lambda: self.budget.left,
            )
            if not complete:
                return

    def _reserve(self) -> float:
        """Seconds that confirming all cells takes, one after the other."""
        o = self.options
        if not o.confirm_top:
            return 0.0
        return len(self.cells) * seconds_of(o.confirm_top + 3, o.num_seeds, o.num_observations)

    def _strategy(self, cell: Cell) -> Strategy:
        o = self.options

        def look(schedule: Schedule) -> Any:
            return self.recorder.seen(cell, schedule)

        runnable = [s for s in cell.schedules if cell.can_run(s)]
        if o.strategy == "grid":
            return Grid(runnable, look)
        if o.strategy == "halving":
            return Halving(runnable, look, o.confirm_top)
        study = (cell.num_tokens, cell.routing, o.rank_mode, o.phase, str(o.recipe), o.capacity)
        return OptunaSearch(
            runnable,
            lambda choice: point_schedule(
                o.space, o.problem, choice, o.recipe, gpu_ranks=o.gpu_ranks
            ),
            dimensions(o.space, o.problem),
            look,
            trials=o.limit or OPTUNA_TRIALS,
            storage=self.recorder.path.with_suffix(".optuna.log"),
            study="-".join(map(str, (*study, kernel_digest(), space_digest(o.space)))),
            seed=o.seed,
        )

    def _build(self, cell: Cell, schedules: list[Schedule], strategy: Strategy) -> list[Schedule]:
        """Those that can run; compiles what is new, records what failed."""
        fresh = [s for s in schedules if s not in cell.builds]
        if fresh:
            cell.builds.update(compile_schedules(self.options, fresh, self.farm, quiet=True)[0])
            cell.schedules += [s for s in fresh if cell.builds[s].status != NOT_BUILT]
            self._refuse(cell)
            if isinstance(strategy, OptunaSearch):
                for schedule in fresh:
                    if cell.builds[schedule].status == NOT_BUILT:
                        strategy.drop(schedule)
        return [
            s
            for s in schedules
            if cell.builds[s].status == "ok"
            and ((seen := self.recorder.seen(cell, s)) is None or seen.ok or s == cell.baseline)
        ]

    def _refuse(self, cell: Cell) -> None:
        """Rows of candidates that cannot run or need not: failed builds, and equal launches."""
        rows = []
        first: dict[tuple[Any, ...], Schedule] = {}
        order = [*cell.pinned, *cell.schedules]
        counts = _wrapping_counts(self.options, cell)
        for schedule in dict.fromkeys(s for s in order if s in cell.builds):
            build = cell.builds[schedule]
            if build.status == NOT_BUILT:
                continue
            status, reason = build.status, build.reason
            if build.report is not None and status == "ok":
                o = self.options
                received = counts.get(schedule.block_m)
                key = launch_key(
                    build.report, o.problem, schedule, o.capacity, received, phase=o.phase
                )
                same = first.setdefault(key, schedule)
                if same == schedule or schedule in cell.pinned:  # freezing looks for these by name
                    continue
                status, reason = "duplicate", f"the same launch as {same.name}"
            if self.recorder.seen(cell, schedule) is None:
                rows.append(self.recorder.failed_row(cell, schedule, status, reason))
        self.recorder.write(rows)


class Benches:
    """Benches that are kept from one piece of work to the next, one for each GPU in use."""

    def __init__(self, make: Callable[[], CellBench], recorder: Recorder):
        self._make = make
        self._recorder = recorder
        self._idle: SimpleQueue[CellBench] = SimpleQueue()
        self._all: list[CellBench] = []

    def each(
        self, work: Sequence[W], do: Callable[[W, CellBench, int], None], num_gpus: int
    ) -> None:
        """`do(piece, bench, pieces that are left)` for each piece, on up to `num_gpus` benches."""
        queue: SimpleQueue[tuple[int, W]] = SimpleQueue()
        for numbered in enumerate(work):
            queue.put(numbered)
        failed = threading.Event()

        def serve() -> None:
            try:
                bench = self._take()
                self._recorder.meet(bench.facts())
                while not failed.is_set():
                    try:
                        place, piece = queue.get_nowait()
                    except Empty:
                        break
                    do(piece, bench, len(work) - place)
            except BaseException:  # the others stop after what they are doing
                failed.set()
                raise
            self._idle.put(bench)

        workers = min(num_gpus, len(work))
        if workers == 1:
            serve()
        elif workers:
            with ThreadPoolExecutor(workers) as pool:
                futures = [pool.submit(serve) for _ in range(workers)]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    failed.set()
                    raise

    def _take(self) -> CellBench:
        try:
            return self._idle.get_nowait()
        except Empty:
            bench = self._make()
        self._all.append(bench)
        bench.start()
        return bench

    def close(self) -> None:
        """End all."""
        for bench in self._all:
            bench.close()


def _wrapping_counts(options: SearchOptions, cell: Cell) -> dict[int, list[tuple[int, ...]]]:
    """block_m -> rows of each expert, where uniform routing surely wraps the pool's ring.

    There the walk is that of lag order whatever a schedule says, so that more candidates are equal.
    """
    problem = options.problem
    if problem.num_ranks == 1 or cell.routing != "uniform":
        return {}
    layout, counts = (
        make_layout(problem, options.capacity),
        uniform_counts(problem, cell.num_tokens),
    )
    return {
        block_m: [counts]
        for block_m in (64, 128)
        if first_blocks(counts, block_m)[-1] > 1.1 * layout.ring_blocks(block_m)
    }
