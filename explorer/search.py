"""One search: enumerate, compile, screen, confirm, record. Every candidate leaves a row.

The GPU side and the compiler come in as arguments, so that all of this runs in tests without
either.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from tl_megamoe import frozen
from tl_megamoe.device.walk import first_blocks
from tl_megamoe.layout import make_layout
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

from .cell import Cell
from .confirm import candidates_of, confirm, is_confirmed, seconds_of
from .constants import load_constants
from .cost import uniform_counts
from .duplicates import launch_key
from .farm import NOT_BUILT, Farm, kernel_digest
from .messages import WorkerConfig, kernel_specs
from .points import dimensions, point_schedule
from .protocol import SCREEN_RULES, Rules
from .record import Recorder
from .screen import Budget, CellBench, screen
from .space import Space, best_by_model, enumerate_candidates
from .strategy import STRATEGIES, Grid, Halving, OptunaSearch, Strategy

logger = logging.getLogger(__name__)

MODEL_DEVICE = "sm90-model"
"""Device of rows that rest on the cost model."""
OPTUNA_TRIALS = 64
"""Candidates of a cell with --strategy optuna and no --limit."""

W = TypeVar("W")
MakeBench = Callable[[WorkerConfig, Schedule], CellBench]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search.

    Attributes:
        problem: the layer as it runs: the one-rank view, or over all its ranks.
        rank_mode: `one`; `virtual`: all ranks of `problem` share the GPU; `real`: a GPU a rank.
        tokens: token counts that a rank contributes, one cell each.
        space: where candidates come from.
        results: folder of the tables.
        limit: candidates a cell, the best by the model; None for all.
        capacity: tokens of the buffers, at least max(tokens).
        routings: table name -> what the bench takes, a cell each.
        seed: of weights, order, and the first routing.
        strategy: `grid`, `halving` or `optuna`.
        confirm_top: best candidates of a cell that are confirmed; 0 confirms nothing.
        num_seeds, num_observations: routings of a confirmation, and rounds of each.
        budget_s: seconds on the GPU; None for no limit.
        again: measure finished rows once more.
        commit: recorded with every row.
        rules, screen_rules: numbers of the full protocol and of a screening block.
    """

    problem: Problem
    tokens: tuple[int, ...]
    space: Space
    results: Path
    capacity: int
    rank_mode: str = "one"
    recipe: Recipe = Recipe()
    phase: str = "fused"
    routings: dict[str, str] = field(default_factory=lambda: {"uniform": "uniform"})
    seed: int = 0
    limit: int | None = None
    strategy: str = "halving"
    confirm_top: int = 4
    num_seeds: int = 3
    num_observations: int = 5
    budget_s: float | None = None
    again: bool = False
    commit: str = ""
    rules: Rules = Rules()
    screen_rules: Rules = SCREEN_RULES

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} must be one of {', '.join(STRATEGIES)}")

    @property
    def gpu_ranks(self) -> int:
        """Ranks that run on one GPU."""
        return 1 if self.rank_mode == "real" else self.problem.num_ranks

    @property
    def seeds(self) -> range:
        """Seeds of the confirmation's routings."""
        return range(self.seed, self.seed + self.num_seeds)


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """What a search did: rows written by status, candidates that had rows already."""

    path: Path
    written: int
    skipped: int
    statuses: dict[str, int]


def worker_config(options: SearchOptions) -> WorkerConfig:
    """What the GPU worker of a search is built for."""
    return WorkerConfig(
        problem=options.problem,
        capacity=options.capacity,
        rank_mode=options.rank_mode,
        recipe=options.recipe,
        phase=options.phase,
        seed=options.seed,
        rules=options.rules,
    )


def plan_cells(options: SearchOptions, frozen_device: str | None = None) -> list[Cell]:
    """The candidates of every token count and routing, the device's frozen schedule among them.

    Raises:
        ScheduleError: the built-in default of a token count is not valid for the problem.
    """
    problem, recipe = options.problem, options.recipe
    cells = []
    for num_tokens in options.tokens:
        baseline = default_schedule(problem, num_tokens, recipe=recipe)
        baseline.check(problem, recipe)
        current = None
        if frozen_device is not None:
            found = frozen.lookup(problem, frozen_device, num_tokens, rank_mode=options.rank_mode)
            current = found.schedule if found is not None else None
        candidates = enumerate_candidates(
            problem, num_tokens, options.space, recipe, current, gpu_ranks=options.gpu_ranks
        )
        limit = None if options.strategy == "optuna" else options.limit
        schedules = best_by_model(
            candidates,
            problem,
            num_tokens,
            limit,
            recipe=recipe,
            gpu_ranks=options.gpu_ranks,
            constants=load_constants(),
        )
        pinned = candidates.pinned
        if options.strategy == "optuna":  # it proposes the others
            schedules = [s for s in schedules if s in set(pinned.values())]
        kept = tuple(s for word, s in pinned.items() if word != "classic")
        for name, source in options.routings.items():
            cells.append(Cell(num_tokens, list(schedules), pinned["default"], name, source, kept))
    return cells


def build_cells(options: SearchOptions, cells: Sequence[Cell], farm: Farm) -> dict[str, int]:
    """Compile what the cells need; a progress bar goes to stderr. Counts kernels by status.

    A candidate without a prebuilt kernel leaves its cell, with a message.
    """
    config = worker_config(options)
    schedules = {s for cell in cells for s in (*cell.schedules, cell.baseline)}
    specs = {s: kernel_specs(config, s) for s in sorted(schedules, key=lambda s: s.name)}
    everything = [spec for by_phase in specs.values() for spec in by_phase.values()]
    distinct = len({spec.key() for spec in everything})
    with tqdm(total=distinct, desc="compile", unit="kernel", file=sys.stderr) as bar:
        results = farm.run(everything, lambda spec, result: _tick(bar))
    for cell in cells:
        for schedule in {*cell.schedules, cell.baseline}:
            by_phase = {p: results[spec.key()] for p, spec in specs[schedule].items()}
            bad = [r for r in by_phase.values() if r.status != "ok"]
            cell.builds[schedule] = bad[0] if bad else by_phase[options.phase]
        built = [s for s in cell.schedules if cell.builds[s].status != NOT_BUILT]
        if len(built) < len(cell.schedules):
            logger.warning(
                "%s: %d of %d candidates are not prebuilt and are left out",
                cell.label,
                len(cell.schedules) - len(built),
                len(cell.schedules),
            )
        cell.schedules = built
    counts: dict[str, int] = {}
    for result in results.values():
        counts[result.status] = counts.get(result.status, 0) + 1
    return counts


def _tick(bar: Any) -> None:
    bar.update()


def run_search(
    options: SearchOptions,
    farm: Farm,
    make_bench: MakeBench | None,
    device_name: str | None = None,
    *,
    num_gpus: int = 1,
    budget: Budget | None = None,
) -> SearchSummary:
    """Search: with a bench candidates are measured, without one the model ranks them.

    Args:
        options: what to search.
        farm: compiles.
        make_bench: a GPU worker from its config and the control schedule; None without a GPU.
        device_name: the GPU's name, for example `NVIDIA H200`; None without a GPU.
        num_gpus: cells that are timed at once, each on a GPU of its own.
        budget: clock of `options.budget_s`; tests pass their own.

    Raises:
        measure.GpuUnusable: the GPU does not run even the control; finished rows are kept.
        TableError: the table is damaged or of another device.
    """
    device = MODEL_DEVICE if device_name is None else frozen.device_key(device_name)
    recorder = Recorder(options, device, measured=make_bench is not None)
    cells = plan_cells(options, None if device_name is None else device)
    known = {
        (c.num_tokens, c.routing, s) for c in cells for s in c.schedules if recorder.seen(c, s)
    }
    if make_bench is None:
        todo = [c for c in cells if any(recorder.seen(c, s) is None for s in c.schedules)]
        if todo:
            build_cells(options, todo, farm)
        for cell in todo:
            fresh = [s for s in cell.schedules if recorder.seen(cell, s) is None]
            recorder.write(recorder.model_row(cell, s) for s in fresh)
    else:
        search = _Search(options, farm, recorder, cells, budget or Budget(options.budget_s))
        search.run(make_bench, max(1, num_gpus))
    statuses = recorder.statuses
    return SearchSummary(recorder.path, sum(statuses.values()), len(known), statuses)


class _Search:
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
        strategies = [self._strategy(cell) for cell in self.cells]
        for cell, strategy in zip(self.cells, strategies, strict=True):
            if isinstance(strategy, OptunaSearch):  # what it proposed in earlier runs
                cell.schedules = list(dict.fromkeys([*cell.schedules, *strategy.known]))
        build_cells(self.options, self.cells, self.farm)
        for cell in self.cells:
            self._refuse(cell)
        pool = _Benches(lambda: make_bench(self.config, self.cells[-1].baseline), self.recorder)
        self.budget.start()  # making weights and buffers counts
        try:
            asked = [(c, s, s.ask()) for c, s in zip(self.cells, strategies, strict=True)]
            pool.each([work for work in asked if work[2]], self._screen, num_gpus)
            if self.options.confirm_top:
                chosen = [(c, self._chosen(c)) for c in self.cells]
                todo = [(c, s) for c, s in chosen if s and not self._is_confirmed(c, s)]
                pool.each(todo, self._confirm, num_gpus)
        finally:
            pool.close()

    def _screen(
        self, work: tuple[Cell, Strategy, list[Schedule]], bench: CellBench, remaining: int
    ) -> None:
        cell, strategy, first = work
        reserve = self._reserve()
        until = self.budget.left - max(0.0, self.budget.left - reserve) / remaining

        def enough() -> bool:
            return self.budget.left <= max(until, reserve)

        screen(
            cell,
            bench,
            self.recorder,
            strategy,
            first,
            lambda c, schedules: self._build(c, schedules, strategy),
            self.options.screen_rules,
            enough if self.options.budget_s is not None else lambda: False,
        )

    def _confirm(self, work: tuple[Cell, list[Schedule]], bench: CellBench, remaining: int) -> None:
        cell, schedules = work
        confirm(
            cell,
            schedules,
            bench,
            self.recorder,
            self.options.rules,
            self.options.seeds,
            self.options.num_observations,
            lambda: self.budget.left <= 0,
        )

    def _chosen(self, cell: Cell) -> list[Schedule]:
        return candidates_of(cell, self.cells, self.recorder, self.options.confirm_top)

    def _is_confirmed(self, cell: Cell, schedules: list[Schedule]) -> bool:
        o = self.options
        return is_confirmed(cell, schedules, self.recorder, o.seeds, o.num_observations)

    def _reserve(self) -> float:
        """Seconds that the confirmation of all cells will take."""
        o = self.options
        if not o.confirm_top:
            return 0.0
        return len(self.cells) * seconds_of(o.confirm_top + 3, o.num_seeds, o.num_observations)

    def _strategy(self, cell: Cell) -> Strategy:
        o = self.options

        def look(schedule: Schedule) -> Any:
            return self.recorder.seen(cell, schedule)

        if o.strategy == "grid":
            return Grid(cell.schedules, look)
        if o.strategy == "halving":
            return Halving(cell.schedules, look, o.confirm_top)
        study = (cell.num_tokens, cell.routing, o.rank_mode, o.phase, str(o.recipe), o.capacity)
        return OptunaSearch(
            cell.schedules,
            lambda choice: point_schedule(
                o.space, o.problem, choice, o.recipe, gpu_ranks=o.gpu_ranks
            ),
            dimensions(o.space, o.problem),
            look,
            trials=o.limit or OPTUNA_TRIALS,
            storage=self.recorder.path.with_suffix(".optuna.log"),
            study="-".join(map(str, (*study, kernel_digest()))),
            seed=o.seed,
        )

    def _build(self, cell: Cell, schedules: list[Schedule], strategy: Strategy) -> list[Schedule]:
        """Those that can run; compiles what is new, records what failed."""
        fresh = [s for s in schedules if s not in cell.builds]
        if fresh:
            config = self.config
            specs = {s: kernel_specs(config, s) for s in fresh}
            results = self.farm.run([x for of in specs.values() for x in of.values()])
            for schedule, by_phase in specs.items():
                found = {p: results[spec.key()] for p, spec in by_phase.items()}
                bad = [r for r in found.values() if r.status != "ok"]
                cell.builds[schedule] = bad[0] if bad else found[self.options.phase]
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
                if same == schedule:
                    continue
                status, reason = "duplicate", f"the same launch as {same.name}"
            if self.recorder.seen(cell, schedule) is None:
                rows.append(self.recorder.failed_row(cell, schedule, status, reason))
        self.recorder.write(rows)


class _Benches:
    """Benches that are kept from one piece of work to the next, one for each GPU in use."""

    def __init__(self, make: Callable[[], CellBench], recorder: Recorder):
        self._make = make
        self._recorder = recorder
        self._idle: list[tuple[CellBench, dict[str, str]]] = []
        self._all: list[CellBench] = []

    def each(
        self, work: Sequence[W], do: Callable[[W, CellBench, int], None], num_gpus: int
    ) -> None:
        """`do(piece, bench, pieces that are left)` for each piece, on up to `num_gpus` benches."""
        queue = list(enumerate(work))

        def serve() -> None:
            bench, found = self._take()
            self._recorder.meet(found)
            while queue:
                place, piece = queue.pop(0)
                do(piece, bench, len(work) - place)
            self._idle.append((bench, found))

        workers = min(num_gpus, len(work))
        if workers == 1:
            serve()
        elif workers:
            with ThreadPoolExecutor(workers) as pool:
                for future in [pool.submit(serve) for _ in range(workers)]:
                    future.result()

    def _take(self) -> tuple[CellBench, dict[str, str]]:
        if self._idle:
            return self._idle.pop()
        bench = self._make()
        self._all.append(bench)
        return bench, bench.start()

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
