"""How long a grid takes for its walk: tiles of known cost, static striding, waits between linears.

Block `b` of the grid runs the tasks b, b + num_sms, ... of the walk (`device/walk.py`) one after
the other. A linear1 tile waits until its pool block has arrived, a linear2 tile until all linear1
tiles of its pool block are done. Nothing is drawn at random: the same arguments give the same time.

The walk is cut into stretches in which no linear2 tile waits for a linear1 tile of the same
stretch. Inside a stretch a block's finish times are a running maximum, so numpy computes all blocks
and rounds of it at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

STEADY_BLOCKS = 96
"""Pool blocks from which the lag order, which repeats itself, is continued as a straight line."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tasks that wait for nothing of their own.

    Attributes:
        first, end: positions of the walk.
        linear1: of each task, whether it is a linear1 tile.
        block: of each task, its pool block.
        published: pool blocks whose linear1 tiles are in the stretch, all of them.
    """

    first: int
    end: int
    linear1: Array
    block: Array
    published: Array


def walk_segments(blocks: int, waves: tuple[int, ...], lag: int) -> tuple[Array, Array]:
    """Runs of tasks of one pool block and linear, in walk order: (pool blocks, whether linear1).

    Args:
        blocks: pool blocks of the launch.
        waves: first pool block of every wave, and `blocks` at the end; for order `wave`.
        lag: distance in pool blocks for order `lag`, 0 for order `wave`.
    """
    if lag:
        lag = min(lag, blocks)
        steady = np.arange(blocks - lag)
        middle = np.stack([steady + lag, steady], axis=1).ravel()
        block = np.concatenate([np.arange(lag), middle, np.arange(blocks - lag, blocks)])
        kinds = (np.ones(lag, bool), np.arange(len(middle)) % 2 == 0, np.zeros(lag, bool))
        return block, np.concatenate(kinds)
    spans = [np.arange(a, b) for a, b in zip(waves, waves[1:], strict=False) if b > a]
    block = np.concatenate([s for span in spans for s in (span, span)])
    linear1 = np.concatenate(
        [k for s in spans for k in (np.ones(len(s), bool), np.zeros(len(s), bool))]
    )
    return block, linear1


@lru_cache(maxsize=256)
def stretches(
    blocks: int, waves: tuple[int, ...], lag: int, tiles: tuple[int, int]
) -> tuple[Stretch, ...]:
    """The walk of `blocks` pool blocks in stretches; `tiles` of a pool block in each linear."""
    block, linear1 = walk_segments(blocks, waves, lag)
    lengths = np.where(linear1, tiles[0], tiles[1])
    ends = np.cumsum(lengths)
    published = np.zeros(blocks, int)
    published[block[linear1]] = ends[linear1]
    cuts, first = [0], 0
    waits = zip(
        (ends - lengths)[~linear1].tolist(), published[block[~linear1]].tolist(), strict=True
    )
    for start, needed in waits:
        if needed > first:
            cuts.append(start)
            first = start
    cuts.append(int(ends[-1]))
    task_block, task_linear1 = (
        np.repeat(block.astype(np.int32), lengths),
        np.repeat(linear1, lengths),
    )
    out = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        kind = task_linear1[a:b]
        out.append(Stretch(a, b, kind, task_block[a:b], task_block[a:b][kind][:: tiles[0]]))
    return tuple(out)


def walk_time(
    waves: tuple[int, ...],
    lag: int,
    tiles: tuple[int, int],
    num_sms: int,
    costs: tuple[float, float],
    arrivals: Array,
    publish: float = 0.0,
) -> float:
    """When the last tile is done, in the unit of `costs`.

    Args:
        waves: first pool block of every wave, and the number of pool blocks at the end.
        lag: distance in pool blocks for order `lag`, 0 for order `wave`.
        tiles: linear1 and linear2 tiles of a pool block.
        num_sms: blocks of the grid.
        costs: time of a linear1 and of a linear2 tile.
        arrivals: when each pool block has its rows.
        publish: from a tile's end until its result can be read (a hidden epilogue).
    """
    blocks = waves[-1]
    if blocks == 0:
        return 0.0
    if lag and blocks > max(STEADY_BLOCKS, 4 * lag):
        most = max(STEADY_BLOCKS, 4 * lag)
        # Whole turns of the walk over the grid, where one is short enough: it repeats from there.
        turn = num_sms // math.gcd(sum(tiles), num_sms)
        fewer = most - (turn * (most // 2 // turn) or most // 3)
        long, short = (
            walk_time((0, n), lag, tiles, num_sms, costs, arrivals, publish) for n in (most, fewer)
        )
        return long + (blocks - most) * (long - short) / (most - fewer)
    free = np.zeros(num_sms)
    done = np.zeros(blocks)
    for part in stretches(blocks, waves, lag, tiles):
        row = part.first // num_sms
        shape = (-(-part.end // num_sms) - row, num_sms)
        inside = slice(part.first - row * num_sms, part.end - row * num_sms)
        ready, cost = np.full(shape, -np.inf), np.zeros(shape)
        ready.ravel()[inside] = np.where(part.linear1, arrivals[part.block], done[part.block])
        cost.ravel()[inside] = np.where(part.linear1, costs[0], costs[1])
        spent = np.cumsum(cost, axis=0)
        ready -= spent - cost
        np.maximum.accumulate(ready, axis=0, out=ready)
        finish = np.maximum(ready, free) + spent
        free = finish[-1]
        if len(part.published):
            tile_ends = finish.ravel()[inside][part.linear1].reshape(-1, tiles[0])
            done[part.published] = tile_ends.max(axis=1) + publish
    return float(free.max())
