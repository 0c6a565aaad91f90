"""A model of one launch: which candidates look good before anything has run.

It ranks without a GPU and orders the candidates of a limited search. It is no substitute for a
measurement: rows that rest on it say `source=model`.

    launch = start + dispatch + |walk, HBM, L2| + combine + tail

`walk` is the grid's time for its tiles, each as long as tensor cores, shared memory, promotion and
epilogue make it, in the order and with the waits of the schedule (walk_time.py): linear2 tiles that
wait and a last round that is not full are in it, and that a pool block of 128 rows with at most 64
is multiplied as one of 64 (`Schedule.tile_rows`).
HBM and L2 are the times in which those move the launch's bytes. All three overlap, and not wholly:
| | is their norm of exponent `overlap`. The clock falls with the tensor cores' share of the time.

What it does not see ties: cluster_size (0.97 to 1.02 of the time), load_warps (measured within 3 %
of each other, of either sign) and the registers (9 % in one kernel of deepseek-v4-flash, nothing in
the next). Nor does it see what two kernels of the same tile differ in by their machine code alone,
and that a launch that outgrows its ring walks by another lag (layout.py). That few routes of one
rank are counted without a barrier, and with swapped operands pulled by nobody, some 5 us of the
start each, it does not see either. It takes lags of 16 and 32 blocks at 4096 tokens and more for 2
to 6 % faster than they were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import BLOCK_K, Schedule

from .constants import BUILT_IN, Constants
from .walk_time import walk_time

SMEM_BYTES_PER_CLOCK = 128
"""Shared-memory bandwidth of an SM90 SM (CUDA programming guide)."""
TENSOR_MACS_PER_CLOCK = 4096
"""FP8 multiply-adds of an SM and clock: 128 x 128 x 128 takes 512 clocks."""
CARD_SMS = 132
"""SMs of an H200: a smaller grid loads the power limit less."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times in microseconds, by what they are spent on.

    Attributes:
        start_us: until the first tile.
        dispatch_us: what the pull of rows costs the tiles beside it.
        linear1_us, linear2_us: a block's mean time for its tiles.
        idle_us: what the walk takes besides: the last round, waits.
        memory_us: what HBM and L2 add to the walk.
        combine_us: the sum over slots.
        tail_us: the last barrier.
        pull_us: the whole pull; `dispatch` alone.
        alone_us: linear1 alone and linear2 alone, in whole rounds, memory included.
    """

    start_us: float
    dispatch_us: float
    linear1_us: float
    linear2_us: float
    idle_us: float
    memory_us: float
    combine_us: float
    tail_us: float
    pull_us: float
    alone_us: tuple[float, float]

    @property
    def total_us(self) -> float:
        """The whole fused layer."""
        return self.phase_us("fused")

    def phase_us(self, phase: str) -> float:
        """The fused layer, or a stand-alone phase without the waits for the others."""
        if phase == "dispatch":
            return self.start_us + self.pull_us
        if phase == "combine":
            return self.combine_us
        if phase in ("linear1", "linear2"):
            return self.alone_us[phase == "linear2"] + self.tail_us
        tiles = self.linear1_us + self.linear2_us + self.idle_us + self.memory_us
        return self.start_us + self.dispatch_us + tiles + self.combine_us + self.tail_us


@lru_cache(maxsize=256)
def uniform_counts(problem: Problem, num_tokens: int) -> tuple[int, ...]:
    """Rows that each local expert receives under uniform routing, as quantiles of the spread.

    Deterministic, so that a prediction is; the mean is tokens x ranks x topk / experts.
    """
    share = min(1.0, problem.num_topk / problem.num_experts)
    mean = num_tokens * problem.num_ranks * problem.num_topk / problem.num_experts
    deviation = math.sqrt(max(mean * (1 - share), 1e-9))
    local = problem.num_local_experts
    spread = NormalDist(mean, deviation)
    counts = [max(0, round(spread.inv_cdf((e + 0.5) / local))) for e in range(local)]
    missing = round(mean * local) - sum(counts)
    step = 1 if missing > 0 else -1
    place = local - 1 if missing > 0 else 0
    while missing:  # rounding: add from the fullest expert down, take from the emptiest up
        if counts[place] + step >= 0:
            counts[place] += step
            missing -= step
        place = (place - step) % local
    return tuple(counts)


def k_block_clocks(
    block_m: int,
    block_n: int,
    promotions: int = 1,
    *,
    pingpong: bool = False,
    swapped: bool = False,
    stages: int = 4,
    constants: Constants = BUILT_IN,
) -> float:
    """Clocks of one K block of a tile: the tensor cores, or the shared memory that feeds them.

    Shared memory takes the fill of both operands and each 64 x 128 unit's reads of them: 128 x 128
    640 clocks against 512 of tensor work, 128 x 256 1152 against 1024. Cooperative warpgroups
    promote side by side; in pingpong the one that multiplies promotes its two units alone.

    Args:
        block_m: rows of the tile.
        block_n: columns of the tile.
        promotions: how often a unit is promoted, once a scale.
        pingpong: one warpgroup computes the tile.
        swapped: a unit is 64 columns by all rows of the tile.
        stages: depth of the ring.
        constants: of the model.
    """
    units = block_m * block_n / (64 * 128)
    fill = (block_m + block_n) * BLOCK_K
    reads = (block_n // 64 * (64 + block_m) if swapped else units * (64 + 128)) * BLOCK_K
    memory = (fill + reads) / SMEM_BYTES_PER_CLOCK
    promoted = promotions * constants.promote_clocks * units / (1 if pingpong else 2)
    waits = constants.k_block_clocks + constants.ring_clocks / stages
    return max(memory, tensor_clocks(block_m, block_n)) + promoted + waits


def tensor_clocks(block_m: int, block_n: int) -> float:
    """Clocks in which the tensor cores work on one K block of a tile."""
    return block_m * block_n * BLOCK_K / TENSOR_MACS_PER_CLOCK


@dataclass(frozen=True, slots=True)
class _Tile:
    """One tile of a linear: clocks until the next can start, the hidden epilogue, bytes from L2."""

    clocks: float
    hidden_clocks: float
    tensor: float
    l2_bytes: float


def _tiles(
    problem: Problem, schedule: Schedule, linear: int, promotions: int, c: Constants
) -> tuple[_Tile, ...]:
    """A tile of each of `Schedule.tile_rows`."""
    return tuple(
        _tile(problem, replace(schedule, block_m=rows), linear, promotions, c)
        for rows in schedule.tile_rows(linear)
    )


def _tile(
    problem: Problem, schedule: Schedule, linear: int, promotions: int, c: Constants
) -> _Tile:
    block_n = schedule.linear1_block_n if linear == 1 else schedule.linear2_block_n
    k = problem.hidden if linear == 1 else problem.intermediate
    steps = (256 // block_n if linear == 1 else 1) * (k // BLOCK_K)
    pingpong = schedule.pingpong
    loop = steps * k_block_clocks(
        schedule.block_m,
        block_n,
        promotions,
        pingpong=pingpong,
        swapped=schedule.swapped,
        stages=schedule.stages,
        constants=c,
    )
    columns = 256 if linear == 1 else block_n
    units = schedule.block_m * columns / (64 * 128) / (1 if pingpong else 2)
    epilogue = units * (c.epilogue1_clocks if linear == 1 else c.epilogue2_clocks)
    return _Tile(
        # In pingpong it lies under the other warpgroup's K loop, where that is longer.
        clocks=max(loop, epilogue) if pingpong else loop + epilogue,
        hidden_clocks=epilogue if pingpong else 0.0,
        tensor=steps * tensor_clocks(schedule.block_m, block_n),
        l2_bytes=steps * (schedule.block_m + block_n) * BLOCK_K,
    )


@lru_cache(maxsize=1024)
def _pool(
    counts: tuple[int, ...], block_m: int
) -> tuple[tuple[int, ...], np.ndarray[Any, np.dtype[Any]]]:
    """First pool block of every expert, with their number at the end; the rows up to each block."""
    first, rows, ends = [0], 0, []
    for count in counts:
        first.append(first[-1] - (-count // block_m))
        ends += [rows + min(count, n * block_m) for n in range(1, first[-1] - first[-2] + 1)]
        rows += count
    return tuple(first), np.array(ends, float)


def predict(
    problem: Problem,
    schedule: Schedule,
    num_tokens: int,
    counts: tuple[int, ...] | None = None,
    *,
    recipe: Recipe | None = None,
    gpu_ranks: int = 1,
    constants: Constants | None = None,
) -> Prediction:
    """Predict one launch of one rank.

    Args:
        problem: the layer as the rank runs it.
        schedule: a valid schedule.
        num_tokens: tokens the rank contributes.
        counts: rows each local expert receives; those of uniform routing when None.
        recipe: a group of 64 columns promotes linear2 twice a K block.
        gpu_ranks: ranks that run on the GPU at once and share its memory bandwidth.
        constants: of the model; the built-in ones when None (`load_constants` has fitted ones).
    """
    c = constants or BUILT_IN
    counts = uniform_counts(problem, num_tokens) if counts is None else counts
    rows, touched = sum(counts), sum(n > 0 for n in counts)
    first_block, row_ends = _pool(counts, schedule.block_m)
    blocks, sms = first_block[-1], schedule.num_sms
    tiles = schedule.linear1_tiles(problem), schedule.linear2_tiles(problem)
    scales = (recipe or Recipe()).scales_per_k_block
    tile = [_tiles(problem, schedule, 1, 1, c), _tiles(problem, schedule, 2, scales, c)]
    # Of each block, which of `Schedule.tile_rows` its tiles have.
    block_rows = np.diff(row_ends, prepend=0.0)
    sizes = [np.searchsorted(schedule.tile_rows(k), block_rows) for k in (1, 2)]

    def by_block(k: int, of: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Of a tile of linear1 (k = 0) or linear2 of each block."""
        return np.array([getattr(t, of) for t in tile[k]], float)[sizes[k]]

    def total(k: int, of: str) -> float:
        """Of all tiles of linear1 (k = 0) or linear2."""
        return float(tiles[k] * by_block(k, of).sum())

    l2 = [total(k, "l2_bytes") * gpu_ranks / (c.l2_tbs * 1e6) for k in (0, 1)]
    weights, h, i = problem.hidden * problem.intermediate, problem.hidden, problem.intermediate
    # Weights once an expert, as in wave order; a row is read once and its result written once.
    hbm = [
        num_bytes * gpu_ranks / (c.hbm_tbs * 1e6)
        for num_bytes in (
            2 * touched * weights + rows * (h + i),
            touched * weights + rows * (i + 2 * h),
        )
    ]

    top_mhz = 1e3 * c.max_clock_ghz
    pull_us_a_row = (
        problem.hidden
        * c.pull_latency_us
        / (sms * schedule.row_slots * max(1, schedule.row_chunk(problem, recipe)))
    )
    walk_us = walk_time(
        first_block,
        schedule.experts_per_wave,
        schedule.lag,
        tiles,
        sms,
        (by_block(0, "clocks") / top_mhz, by_block(1, "clocks") / top_mhz),
        row_ends * pull_us_a_row,
        tile[0][0].hidden_clocks / top_mhz,
    )
    if blocks:
        walk_us += tile[1][0].hidden_clocks / top_mhz
    tensor_us = (total(0, "tensor") + total(1, "tensor")) / sms / top_mhz
    on_card = min(1.0, sms * gpu_ranks / CARD_SMS)
    busy = on_card * tensor_us / max(_norm(c, walk_us, sum(hbm), sum(l2)), 1e-9)
    mhz = top_mhz - 1e3 * c.clock_drop_ghz * busy
    walk_us *= top_mhz / mhz
    tiles_us = _norm(c, walk_us, sum(hbm), sum(l2))
    linear_us = [total(k, "clocks") / mhz for k in (0, 1)]  # of one block that did it all
    alone = tuple(
        _norm(c, -(-blocks * n // sms) * linear_us[k] / max(1, blocks * n), hbm[k], l2[k])
        for k, n in enumerate(tiles)
    )
    prefetched = sms * gpu_ranks * schedule.prefetch * 256 * BLOCK_K / (c.hbm_tbs * 1e6)
    combine_bytes = 2 * problem.hidden * (rows + num_tokens) * gpu_ranks
    linear1_us, linear2_us = (us / sms for us in linear_us)
    return Prediction(
        start_us=c.start_us - (min(c.l2_fill_us, prefetched) if touched else 0.0),
        dispatch_us=c.pull_exposed * rows * pull_us_a_row,
        linear1_us=linear1_us,
        linear2_us=linear2_us,
        idle_us=walk_us - linear1_us - linear2_us,
        memory_us=tiles_us - walk_us,
        combine_us=combine_bytes / (c.combine_tbs * 1e6),
        tail_us=c.tail_us,
        pull_us=rows * pull_us_a_row,
        alone_us=(alone[0], alone[1]),
    )


def _norm(c: Constants, *times: float) -> float:
    longest = max(times)
    if longest <= 0:
        return 0.0
    powers = sum((t / longest) ** c.overlap for t in times)
    return longest * math.pow(powers, 1 / c.overlap)
