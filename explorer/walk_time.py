"""How long a grid takes for its walk: tiles of known cost, list scheduling, waits between linears.

A block of the grid that is free takes the next tile of the walk (device/lookahead.py). A linear1
tile waits until its pool block has arrived, a linear2 tile until all linear1 tiles of its pool
block are done, and the block of the grid waits with it. Nothing is drawn at random: the same
arguments give the same time.

The tiles of a group of an expert's pool blocks are neighbours in the walk. Its blocks are all done
when the group is, and the last, which may have fewer rows, counts behind the others. So blocks of
the grid that are free at the same time stay together, and the heap holds groups of them: a few a
segment, not one a tile.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from tl_megamoe.device.walk import groups_between, turn_blocks

Array = np.ndarray[Any, np.dtype[Any]]


@lru_cache(maxsize=256)
def walk_segments(
    first_block: tuple[int, ...], step: int, lag: int
) -> tuple[tuple[range, range, int], ...]:
    """Runs of tiles that cost the same and wait for the same, in walk order.

    Args:
        first_block: first pool block of every expert, and the number of pool blocks at the end.
        step: experts per wave; for order `wave`.
        lag: distance in pool blocks for order `lag`, 0 for order `wave`.

    Returns:
        The pool blocks of each, those of its group, and 0 for linear1 or 1 for linear2.
    """
    blocks = first_block[-1]
    runs: list[tuple[int, int, int]] = []  # first block, last, linear
    if lag:
        lag = min(lag, blocks)
        rest, turn = blocks - lag, turn_blocks(lag)
        runs.append((0, lag, 0))
        for begin in range(0, rest, turn):
            end = min(begin + turn, rest)
            runs += [(lag + begin, lag + end, 0), (begin, end, 1)]
        runs.append((rest, blocks, 1))
    else:
        waves = (*first_block[:-1:step], blocks)
        runs = [(*wave, k) for wave in zip(waves, waves[1:], strict=False) for k in (0, 1)]
    return tuple(
        (part, group, linear)
        for first, end, linear in runs
        for group in groups_between(first_block, first, end)
        for part in (group[:-1], group[-1:])
        if part
    )


def walk_time(
    first_block: tuple[int, ...],
    step: int,
    lag: int,
    tiles: tuple[int, int],
    num_sms: int,
    costs: tuple[Array, Array],
    arrivals: Array,
    publish: float = 0.0,
) -> float:
    """When the last tile is done, in the unit of `costs`.

    Args:
        first_block: first pool block of every expert, and the number of pool blocks at the end.
        step: experts per wave; for order `wave`.
        lag: distance in pool blocks for order `lag`, 0 for order `wave`.
        tiles: linear1 and linear2 tiles of a pool block.
        num_sms: blocks of the grid.
        costs: time of a linear1 and of a linear2 tile of each pool block.
        arrivals: when each pool block has its rows.
        publish: from a tile's end until its result can be read (a hidden epilogue).
    """
    blocks = first_block[-1]
    if blocks == 0:
        return 0.0
    arrived, cost_of = arrivals.tolist(), [c.tolist() for c in costs]
    done = [0.0] * blocks
    free = [(0.0, num_sms)]  # when, how many
    for part, group, linear in walk_segments(first_block, step, lag):
        left, last = tiles[linear] * len(part), part[-1]
        cost, ready = cost_of[linear][last], (done if linear else arrived)[last]
        finish, taken = -1.0, 0
        while left:
            if taken and (not free or finish <= free[0][0]):
                heappush(free, (finish, taken))
                taken = 0
            time, count = heappop(free)
            if count > left:
                heappush(free, (time, count - left))
                count = left
            left -= count
            over = max(time, ready) + cost
            if taken and over != finish:
                heappush(free, (finish, taken))
                taken = 0
            finish, taken = over, taken + count
        heappush(free, (finish, taken))
        if not linear:
            finish = max(finish + publish, done[group.start])
            done[group.start : group.stop] = [finish] * len(group)
    return max(free)[0]
