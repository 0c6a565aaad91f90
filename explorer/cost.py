"""A roofline model of one launch: which candidates look good before anything has run.

It ranks without a GPU and orders the candidates of a limited search. It is no substitute for a
measurement: rows that rest on it say `source=model`. Fields that it does not see (load_warps,
registers) tie. All constants are for an H200; where they come from stands beside them. Times named
there were measured on cooperative prototypes of these kernels, not on this repository's; pingpong
follows from them and was fitted to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from tl_megamoe.metrics import HBM_READ_TBS
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import BLOCK_K, MATH_WARPS, Schedule

CLOCK_GHZ = 1.455
"""SM clock under sustained FP8 load at the 700 W limit (of 1.98 GHz; measured after 0.3 s)."""
SMEM_BYTES_PER_CLOCK = 128
"""Shared-memory bandwidth of an SM90 SM (CUDA programming guide)."""
TENSOR_MACS_PER_CLOCK = 4096
"""FP8 multiply-adds of an SM and clock: 128 x 128 x 128 takes 512 clocks."""
PROMOTE_CLOCKS = 130
"""Clocks to add a 64 x 128 unit of raw products, scaled, to its accumulators; fitted, with
K_BLOCK_CLOCKS, to stand-alone linear1 and linear2 at 8192 tokens (128 x 256: 1371 and 719 us,
128 x 128: 1664 and 821, 64 x 256: 1751 and 899)."""
K_BLOCK_CLOCKS = 120
"""Clocks a K block takes besides: barrier waits and WGMMA's start."""
EPILOGUE = {1: 1.07, 2: 1.12}
"""Tile time with its epilogue over the time of its K loop; profiled for linear1 and linear2. In
pingpong 1: one warpgroup's epilogue lies under the other's K loop."""
START_US = 7.0
"""Until the counts are known and the first tile starts, from stamps."""
TAIL_US = 12.0
"""The last tiles' imbalance and the final grid barrier, from stamps (12 to 18 us)."""
L2_FILL_US = 4.0
"""The part of the start in which the L2 prefetch of weights runs."""
PULL_LATENCY_US = 5.0
"""A bulk copy of a row chunk under load: 690 us for 49,152 rows of 4 KiB, 6 chunks a block."""
PULL_EXPOSED = 0.1
"""The part of the pull that is not hidden: dispatch slows the first third of a large launch."""
COMBINE_TBS = 3.8
"""Mixed read and write bandwidth of the combine: 124 us for 470 MB."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times in microseconds, by what they are spent on."""

    start_us: float
    dispatch_us: float
    linear1_us: float
    linear2_us: float
    stall_us: float
    combine_us: float
    tail_us: float

    @property
    def total_us(self) -> float:
        """The whole fused layer."""
        return self.phase_us("fused")

    def phase_us(self, phase: str) -> float:
        """The fused layer, or a stand-alone phase without the waits for the others."""
        if phase == "fused":
            parts = (self.start_us, self.dispatch_us, self.linear1_us, self.linear2_us)
            return sum(parts) + self.stall_us + self.combine_us + self.tail_us
        if phase == "dispatch":
            return self.start_us + self.dispatch_us / PULL_EXPOSED
        return float(getattr(self, f"{phase}_us")) + (0.0 if phase == "combine" else self.tail_us)


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


def k_block_clocks(block_m: int, block_n: int, promotions: int = 1) -> float:
    """Clocks of one K block of a tile: the tensor cores, or the shared memory that feeds them.

    Shared memory takes the fill of both operands and each 64 x 128 unit's reads of them: 128 x 128
    640 clocks against 512 of tensor work, 128 x 256 1152 against 1024. Two warpgroups promote side
    by side, whether they share the tile or have one each.

    Args:
        block_m: rows of the tile.
        block_n: columns of the tile.
        promotions: how often a unit is promoted, once a scale.
    """
    units = block_m * block_n // (64 * 128)
    fill = (block_m + block_n) * BLOCK_K
    reads = units * (64 + 128) * BLOCK_K
    memory = (fill + reads) / SMEM_BYTES_PER_CLOCK
    tensor = block_m * block_n * BLOCK_K / TENSOR_MACS_PER_CLOCK
    return max(memory, tensor) + promotions * PROMOTE_CLOCKS * units / 2 + K_BLOCK_CLOCKS


def _tile_us(
    problem: Problem,
    schedule: Schedule,
    phase: int,
    weight_passes: float,
    promotions: int,
    gpu_ranks: int,
) -> float:
    """An SM's time for one tile: its K loops, or its share of memory bandwidth for its weights.

    In pingpong two tiles are under way and each takes twice as long.
    """
    block_n = schedule.linear1_block_n if phase == 1 else schedule.linear2_block_n
    k = problem.hidden if phase == 1 else problem.intermediate
    loops = 256 // block_n if phase == 1 else 1
    clocks = loops * (k // BLOCK_K) * k_block_clocks(schedule.block_m, block_n, promotions)
    epilogue = 1.0 if schedule.pingpong else EPILOGUE[phase]
    math_us = clocks * epilogue / (CLOCK_GHZ * 1e3)
    weights = weight_passes * loops * block_n * k
    memory_us = weights * schedule.num_sms * gpu_ranks / (HBM_READ_TBS * 1e6)
    return max(math_us, memory_us)


def _stall_us(
    schedule: Schedule, blocks: int, touched: int, tiles: tuple[int, int], tile_us: float
) -> float:
    """Waits of linear2 tiles for linear1 tiles that have barely started.

    The distance between them is a wave's linear1 tiles, or `lag` blocks of them; under one round
    of the grid the rest of a tile's time is waited for, once a wave, or in every round of the lag.
    """
    if blocks == 0:
        return 0.0
    if schedule.order == "lag":
        distance = min(schedule.lag, blocks) * tiles[0]
        times = blocks * sum(tiles) / schedule.num_sms
    else:
        in_wave = min(schedule.experts_per_wave, max(touched, 1))
        distance = round(blocks * in_wave / max(touched, 1)) * tiles[0]
        times = max(1.0, touched / in_wave)
    return times * tile_us * max(0.0, 1.0 - distance / schedule.num_sms)


def predict(
    problem: Problem,
    schedule: Schedule,
    num_tokens: int,
    counts: tuple[int, ...] | None = None,
    *,
    recipe: Recipe | None = None,
    gpu_ranks: int = 1,
) -> Prediction:
    """Predict one launch of one rank.

    Args:
        problem: the layer as the rank runs it.
        schedule: a valid schedule.
        num_tokens: tokens the rank contributes.
        counts: rows each local expert receives; those of uniform routing when None.
        recipe: a group of 64 columns promotes linear2 twice a K block.
        gpu_ranks: ranks that run on the GPU at once and share its memory bandwidth.
    """
    counts = uniform_counts(problem, num_tokens) if counts is None else counts
    rows, touched = sum(counts), sum(c > 0 for c in counts)
    blocks = sum(-(-c // schedule.block_m) for c in counts)
    n1, n2 = schedule.linear1_tiles(problem), schedule.linear2_tiles(problem)
    # An expert's weights come from HBM once; its further pool blocks find them in L2.
    passes = touched / max(blocks, 1)
    scales = (recipe or Recipe()).scales_per_k_block
    tile1 = _tile_us(problem, schedule, 1, passes, 1, gpu_ranks)
    tile2 = _tile_us(problem, schedule, 2, passes, scales, gpu_ranks)
    tasks = blocks * (n1 + n2)
    at_once = MATH_WARPS // schedule.tile_warps
    # The last round of the grid counts as a whole one.
    rounds = -(-tasks // (at_once * schedule.num_sms)) * at_once / tasks if tasks else 0.0
    sms = schedule.num_sms * gpu_ranks
    prefetched_us = (
        sms * schedule.prefetch * 256 * BLOCK_K / (HBM_READ_TBS * 1e6) if touched else 0.0
    )
    slots = schedule.num_sms * schedule.row_slots
    pull_us = (
        rows * problem.hidden * PULL_LATENCY_US / (slots * schedule.row_chunk(problem, recipe))
    )
    combine_bytes = 2 * problem.hidden * (rows + num_tokens)
    return Prediction(
        start_us=START_US - min(L2_FILL_US, prefetched_us),
        dispatch_us=PULL_EXPOSED * pull_us,
        linear1_us=blocks * n1 * tile1 * rounds,
        linear2_us=blocks * n2 * tile2 * rounds,
        stall_us=_stall_us(schedule, blocks, touched, (n1, n2), at_once * max(tile1, tile2)),
        combine_us=combine_bytes * gpu_ranks / (COMBINE_TBS * 1e6),
        tail_us=TAIL_US,
    )
