"""Confirmation: the few best of a cell, timed by the full protocol over several routings.

A round is one observation of every candidate, interleaved, and is written when it is done. Freezing
looks at confirmed rows only (evidence.py). A confirmation that was interrupted is made anew, with
further observation numbers: its candidates must have run beside each other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tqdm import tqdm

from tl_megamoe.schedule import Schedule

from .cell import Cell
from .protocol import Rules
from .record import Recorder
from .screen import CellBench, Round

logger = logging.getLogger(__name__)

SECONDS_A_BLOCK = 0.12
"""What a block of the full protocol takes with its yardstick, for planning a budget."""
SECONDS_A_CHECK = 0.3
"""What checking and capturing a candidate at a new routing takes, for planning a budget."""


def candidates_of(
    cells: Sequence[Cell],
    neighbours: Sequence[Sequence[Cell]],
    mix: Mapping[str, float],
    recorder: Recorder,
    top: int,
) -> list[Schedule]:
    """Whom a confirmation compares: the best, those that always run, the neighbours' best.

    The neighbours' best are there so that one schedule can be frozen for several token counts.

    Args:
        cells: of one token count, a cell for each routing; all confirm the same candidates.
        neighbours: the cells of the token counts before and after.
        mix: routing -> weight in the ranking.
        recorder: knows the screened rows.
        top: how many of the best.

    Returns:
        Nothing when the default does not run in every cell: nothing can be compared then.
    """

    def score(schedule: Schedule, of: Sequence[Cell]) -> float | None:
        total = 0.0
        for cell in of:
            seen = recorder.seen(cell, schedule)
            if seen is None or not seen.ranked or not cell.can_run(schedule):
                return None
            total += mix[cell.routing] * seen.score
        return total

    def best(of: Sequence[Cell], count: int) -> list[Schedule]:
        found = {s: score(s, of) for s in of[0].schedules}
        ranked = sorted((v, s.name, s) for s, v in found.items() if v is not None)
        return [s for _, _, s in ranked[:count]]

    def runs(schedule: Schedule) -> bool:
        return score(schedule, cells) is not None

    if not runs(cells[0].baseline):
        logger.warning(
            "%s: the default %s does not run here, so nothing can be confirmed beside it",
            cells[0].label,
            cells[0].baseline.name,
        )
        return []
    chosen = [*best(cells, top), cells[0].baseline, *(s for s in cells[0].pinned if runs(s))]
    chosen += [s for of in neighbours for s in best(of, 1) if runs(s)]
    return list(dict.fromkeys(chosen))


def seconds_of(num_candidates: int, seeds: int, observations: int) -> float:
    """About how long a confirmation takes on the GPU."""
    a_round = num_candidates * SECONDS_A_BLOCK
    return seeds * (num_candidates * SECONDS_A_CHECK + observations * a_round)


def confirm(
    cell: Cell,
    schedules: Sequence[Schedule],
    bench: CellBench,
    recorder: Recorder,
    rules: Rules,
    seeds: Sequence[int],
    observations: int,
    left: Callable[[], float],
) -> bool:
    """Time candidates over routings and observations; a row each, at once.

    Args:
        cell: where they run.
        schedules: the candidates, the default among them.
        bench: the GPU.
        recorder: gets the rows.
        rules: the full protocol; each observation is one block.
        seeds: of the routings and inputs.
        observations: rounds a seed.
        left: seconds of the budget that are left; it is not begun if they do not suffice.

    Returns:
        Whether it came to its end.
    """
    once = replace(rules, rounds=1)
    failed: set[Schedule] = set()
    total = len(seeds) * observations
    if left() < seconds_of(len(schedules), len(seeds), observations):
        logger.warning("%s: too little of the budget is left to confirm", cell.label)
        return False
    with tqdm(total=total, desc=f"{cell.label}: confirm", unit="round", file=sys.stderr) as bar:
        for seed in seeds:
            info = bench.cell(cell.num_tokens, cell.source, seed, rules)
            stage = Round(cell, bench, info, recorder, "confirm", seed)
            first = recorder.next_observation(cell, seed)
            stage.check([s for s in schedules if s not in failed])
            if cell.baseline.name not in stage.ready:
                logger.warning("%s: the default failed, nothing is confirmed", cell.label)
                return False
            for number in range(first, first + observations):
                runs = list(stage.ready.values())
                warm = number == first
                stage.time(runs, once, number, warm_up=warm, observation=number)
                bar.update()
                if cell.baseline.name not in stage.ready:
                    logger.warning("%s: the default failed, nothing is confirmed", cell.label)
                    return False
            stage.recheck(list(stage.ready.values()))
            failed |= stage.failed
    return True
