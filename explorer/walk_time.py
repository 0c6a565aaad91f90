"""How long a grid takes for its walk: tiles of known cost, list scheduling, waits between linears.

A block of the grid that is free takes the next tile of the walk (device/lookahead.py). A linear1
tile waits until its pool block has arrived, a linear2 tile until all linear1 tiles of its pool
block are done, and the block of the grid waits with it. Nothing is drawn at random: the same
arguments give the same time.

All tiles of a pool block and linear cost the same and wait for the same. They are taken for
neighbours, which in wave order they are not where an expert has several pool blocks
(device/walk.py): those differ by their last one alone, and are taken one after the other. So blocks
of the grid that are free at the same time stay together, and the heap holds groups of them: a few a
pool block, not one a tile.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@lru_cache(maxsize=256)
def walk_segments(
    blocks: int, waves: tuple[int, ...], lag: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Runs of tiles of one pool block and linear, in walk order.

    Args:
        blocks: pool blocks of the launch.
        waves: first pool block of every wave, and `blocks` at the end; for order `wave`.
        lag: distance in pool blocks for order `lag`, 0 for order `wave`.

    Returns:
        The pool blocks, and 0 for linear1 or 1 for linear2.
    """
    if lag:
        lag = min(lag, blocks)
        middle = [m for b in range(blocks - lag) for m in (b + lag, b)]
        block = (*range(lag), *middle, *range(blocks - lag, blocks))
        return block, (0,) * lag + (0, 1) * (blocks - lag) + (1,) * lag
    spans = [range(a, b) for a, b in zip(waves, waves[1:], strict=False)]
    return (
        tuple(b for span in spans for _ in (0, 1) for b in span),
        tuple(linear for span in spans for linear in (0, 1) for _ in span),
    )


def walk_time(
    waves: tuple[int, ...],
    lag: int,
    tiles: tuple[int, int],
    num_sms: int,
    costs: tuple[Array, Array],
    arrivals: Array,
    publish: float = 0.0,
) -> float:
    """When the last tile is done, in the unit of `costs`.

    Args:
        waves: first pool block of every wave, and the number of pool blocks at the end.
        lag: distance in pool blocks for order `lag`, 0 for order `wave`.
        tiles: linear1 and linear2 tiles of a pool block.
        num_sms: blocks of the grid.
        costs: time of a linear1 and of a linear2 tile of each pool block.
        arrivals: when each pool block has its rows.
        publish: from a tile's end until its result can be read (a hidden epilogue).
    """
    blocks = waves[-1]
    if blocks == 0:
        return 0.0
    arrived, cost_of = arrivals.tolist(), [c.tolist() for c in costs]
    done = [0.0] * blocks
    free = [(0.0, num_sms)]  # when, how many
    for block, linear in zip(*walk_segments(blocks, waves, lag), strict=True):
        left, cost = tiles[linear], cost_of[linear][block]
        ready = done[block] if linear else arrived[block]
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
            end = max(time, ready) + cost
            if taken and end != finish:
                heappush(free, (finish, taken))
                taken = 0
            finish, taken = end, taken + count
        heappush(free, (finish, taken))
        if not linear:
            done[block] = finish + publish
    return max(free)[0]
