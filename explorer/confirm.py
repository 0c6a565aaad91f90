"""Confirmation: the few best of a cell, timed by the full protocol over several routings.

A round is one observation of every candidate, interleaved, and is written when it is done. Freezing
looks at confirmed rows only (evidence.py). A confirmation that was interrupted is made anew, with
further observation numbers: its candidates must have run beside each other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm

from tl_megamoe.schedule import Schedule

from .cell import Cell
from .protocol import Rules
from .record import Recorder
from .screen import CellBench, Round
from .strategy import ranked

logger = logging.getLogger(__name__)

SECONDS_A_BLOCK = 0.12
"""What a block of the full protocol takes with its yardstick, for planning a budget."""
SECONDS_A_CHECK = 0.3
"""What checking and capturing a candidate at a new routing takes, for planning a budget."""


def candidates_of(
    cell: Cell, cells: Sequence[Cell], recorder: Recorder, top: int
) -> list[Schedule]:
    """Whom a cell's confirmation compares: its best, those that always run, its neighbours' best.

    The neighbours' best are there so that one schedule can be frozen for several token counts.

    Args:
        cell: the cell.
        cells: all cells of the search.
        recorder: knows the screened rows.
        top: how many of the cell's own best.
    """

    def best(of: Cell, count: int) -> list[Schedule]:
        return ranked(of.schedules, lambda s: recorder.seen(of, s))[:count]

    def runs(schedule: Schedule) -> bool:
        seen = recorder.seen(cell, schedule)
        return seen is not None and seen.ok

    same = sorted((c for c in cells if c.routing == cell.routing), key=lambda c: c.num_tokens)
    place = same.index(cell)
    beside = [c for c in same[max(0, place - 1) : place + 2] if c is not cell]
    chosen = [*best(cell, top), *(s for s in (cell.baseline, *cell.pinned) if runs(s))]
    chosen += [s for c in beside for s in best(c, 1) if runs(s)]
    return list(dict.fromkeys(chosen))


def is_confirmed(
    cell: Cell,
    schedules: Sequence[Schedule],
    recorder: Recorder,
    seeds: Sequence[int],
    observations: int,
) -> bool:
    """Whether an earlier run confirmed exactly these, or more, together."""
    return recorder.confirmed_together(cell, {s.name for s in schedules}, seeds, observations)


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
    enough: Callable[[], bool],
) -> None:
    """Time candidates over routings and observations; a row each, at once.

    Args:
        cell: where they run.
        schedules: the candidates, the default among them.
        bench: the GPU.
        recorder: gets the rows.
        rules: the full protocol; each observation is one block.
        seeds: of the routings and inputs.
        observations: rounds a seed.
        enough: whether the budget is spent.
    """
    once = replace(rules, rounds=1)
    failed: set[Schedule] = set()
    total = len(seeds) * observations
    with tqdm(total=total, desc=f"{cell.label}: confirm", unit="round", file=sys.stderr) as bar:
        for seed in seeds:
            info = bench.cell(cell.num_tokens, cell.source, seed, rules)
            stage = Round(cell, bench, info, recorder, "confirm", seed)
            first = recorder.next_observation(cell, seed)
            stage.check([s for s in schedules if s not in failed])
            for number in range(first, first + observations):
                if enough():
                    logger.warning("%s: the budget is spent, nothing is confirmed", cell.label)
                    return
                runs = list(stage.ready.values())
                warm = number == first
                stage.time(runs, once, number, warm_up=warm, observation=number)
                bar.update()
            stage.recheck(list(stage.ready.values()))
            failed |= stage.failed
