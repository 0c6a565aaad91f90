"""The cells of a search, and the kernels that they need."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from tl_megamoe import frozen
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.schedule import Schedule, default_schedule

from .cell import Cell
from .constants import load_constants
from .farm import NOT_BUILT, BuildResult, Farm
from .messages import kernel_specs
from .options import SearchOptions, worker_config
from .space import best_by_model, enumerate_candidates

logger = logging.getLogger(__name__)


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
    schedules = {s for cell in cells for s in (*cell.schedules, cell.baseline)}
    found, results = compile_schedules(
        options, sorted(schedules, key=lambda s: s.name), farm, quiet=False
    )
    for cell in cells:
        cell.builds.update({s: found[s] for s in (*cell.schedules, cell.baseline)})
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


def compile_schedules(
    options: SearchOptions, schedules: Sequence[Schedule], farm: Farm, *, quiet: bool
) -> tuple[dict[Schedule, BuildResult], dict[KernelSpec, BuildResult]]:
    """Outcomes by schedule, the first bad one of its phases if there is one, and by kernel."""
    config = worker_config(options)
    specs = {s: kernel_specs(config, s) for s in schedules}
    everything = [spec for by_phase in specs.values() for spec in by_phase.values()]
    distinct = len({spec.key() for spec in everything})
    with tqdm(total=distinct, desc="compile", unit="kernel", file=sys.stderr, disable=quiet) as bar:
        results = farm.run(everything, lambda spec, result: _tick(bar))
    found = {}
    for schedule, by_phase in specs.items():
        outcomes = {phase: results[spec.key()] for phase, spec in by_phase.items()}
        bad = [r for r in outcomes.values() if r.status != "ok"]
        found[schedule] = bad[0] if bad else outcomes[options.phase]
    return found, results


def _tick(bar: Any) -> None:
    bar.update()
