"""Linear1: pool rows @ gate and up weights, SwiGLU, FP8 quantise, publish the pool block.

A tile is (pool block, 128 intermediate columns): 256 rows of the interleaved W1.

role   warps      work
load   1 or 2     A: wait for the block's tokens, TMA rows and row scales; B: TMA weights
math   4 + 4      K loop(s), SwiGLU, row maxima over the 128 columns, codes and scales to the pool

barrier                    arrivals                         meaning
l1_arrival_count[block]    block_m x chunks (dispatch)      all rows of the block are in the pool
ring.full, ring.empty      see device/ring.py               a K block is there, is read
AMAX                       256 (columns split only)         row maxima are in shared memory
STAGING + warpgroup        128                              the warpgroup's stores are issued
l2_arrival[block]          2 a tile (math)                  linear2 may read the block (gpu scope)

Columns split (block_n 256): a warpgroup computes 64 gate and the 64 matching up columns of every
row, unit q is the q-th 64 rows. Rows split (block_n 128): a warpgroup computes all 128 columns of
64 rows in two K loops, unit q is the q-th 64 columns.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers
from ..device.matmul import row_maxima, scaled_k_loop
from ..device.plan import FP8, Params, Plan
from ..device.ring import Cursor, Ring, Shared, fill
from ..scaling import device_e4m3_scale


@T.macro
def load(plan: Plan, p: Params, ring: Ring, cursor: Cursor, what, block, tile, expert):
    """Fill the ring with the K blocks of one tile. Role: load; `what` = (rows too, weights too)."""
    s = plan.schedule
    passes = 256 // s.linear1_block_n
    if what[0]:
        if plan.fused:
            barriers.wait_equal(
                p,
                plan.counter("l1_arrival_count") + block,
                plan.l1_arrival_target,
                barriers.TAG_TOKENS,
                block,
            )
        # Pairs with the dispatch warps' fence: their plain stores of the row scales, our TMA.
        barriers.fence_async()
        T.sync_warp()
    for half in T.serial(passes):
        fill(
            ring,
            cursor,
            what,
            p.l1_acts,
            p.l1_acts_sf,
            block * s.block_m,
            s.block_m,
            p.w1,
            (expert, tile * 2 + half, s.linear1_block_n // 128),
            plan.groups1,
        )


@T.macro
def activate(plan: Plan, p: Params, gate, up):
    """gate <- silu(gate) * up, optionally clamped first."""
    if plan.clamp:
        # Compared, not min and max: those would turn a NaN into the bound.
        for i, j in T.Parallel(64, 64):
            gate[i, j] = T.if_then_else(gate[i, j] > p.clamp, p.clamp, gate[i, j])
        for i, j in T.Parallel(64, 64):
            up[i, j] = T.if_then_else(
                up[i, j] > p.clamp,
                p.clamp,
                T.if_then_else(up[i, j] < -p.clamp, -p.clamp, up[i, j]),
            )
    # An IEEE division is a subroutine: 1928 -> 1664 us at 49,152 rows with these two (H200).
    if plan.fast_math:
        for i, j in T.Parallel(64, 64):
            gate[i, j] = gate[i, j] * T.fast_rcp(1.0 + T.__exp(-gate[i, j])) * up[i, j]
    else:
        for i, j in T.Parallel(64, 64):
            gate[i, j] = gate[i, j] * (1.0 / (1.0 + T.exp(-gate[i, j]))) * up[i, j]


@T.macro
def quantise(plan: Plan, wg, acc, codes, inverse, shared: Shared, q):
    """Unit q of this warpgroup as FP8 codes in staging.

    A warp keeps to the 2 KiB of its own that linear2 gives it (16 rows of each unit): another warp
    may still read its rows of the linear2 tile before.
    """
    for i, j in T.Parallel(64, 64):
        codes[i, j] = T.Cast(FP8, acc.left[q][i, j] * inverse[i])
    for i, j in T.Parallel(64, 64):
        shared.staging_fp8[wg * 128 + i // 16 * 32 + q * 16 + i % 16, j] = codes[i, j]


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at):
    """The K loop, or loops, of one tile: gate in acc.left, up in acc.right. Role: math."""
    _, tile, expert = at
    scales = (expert, tile, plan.groups2 + tile)
    if plan.schedule.linear1_block_n == 256:
        units = tuple(range(plan.schedule.m_halves))
        scaled_k_loop(
            shared.ring, cursor, acc, units, (0, 64), wg * 128, plan.groups1, p.w1_sf, scales, None
        )
    else:
        for q in (0, 1):
            scaled_k_loop(
                shared.ring,
                cursor,
                acc,
                (q,),
                (wg * 64, wg * 64),
                0,
                plan.groups1,
                p.w1_sf,
                scales,
                None,
            )


@T.macro
def finish(plan: Plan, p: Params, shared: Shared, acc, wg, at, turn: T.Ref):
    """SwiGLU, row scales, FP8 codes, stores, report. Role: math.

    `turn` alternates between two exchange buffers, so that one barrier a tile is enough: nobody
    overwrites a maximum that the other warpgroup has yet to read.
    """
    block, tile, _ = at
    s = plan.schedule
    tx = T.get_thread_binding()
    lane = tx % 32
    warp = (tx - 128 - wg * 128) // 32
    codes = T.alloc_fragment((64, 64), FP8)
    sf = T.alloc_fragment((64,), "float32")
    columns_split = s.linear1_block_n == 256
    units = tuple(range(s.m_halves if columns_split else 2))
    row_sets = units if columns_split else (0,)  # a unit is other rows, or other columns
    amax = tuple(T.alloc_fragment((64,), "float32") for _ in units)
    weight = tuple(T.alloc_fragment((64,), "float32") for _ in row_sets)
    # Routing weights are asked for before the SwiGLU arithmetic, which hides their latency.
    for q in row_sets:
        if not columns_split or wg == 0:
            for i in T.Parallel(64):
                weight[q][i] = barriers.load_f32(
                    p.l1_topk_weights,
                    block * s.block_m + (q * 64 if columns_split else wg * 64) + i,
                )
    for q in units:
        activate(plan, p, acc.left[q], acc.right[q])
    if columns_split:
        for q in units:
            row_maxima(acc.left[q], amax[q])
            for i in T.Parallel(64):
                shared.amax[turn, wg, q * 64 + i] = amax[q][i]
        barriers.sync(barriers.AMAX, 256)
        for q in units:
            for i in T.Parallel(64):
                sf[i] = device_e4m3_scale(
                    T.max(amax[q][i], shared.amax[turn, 1 - wg, q * 64 + i]), plan.recipe
                )
                if wg == 0:
                    p.l2_acts_sf[tile, block * s.block_m + q * 64 + i] = sf[i] * weight[q][i]
                sf[i] = T.fast_rcp(sf[i]) if plan.fast_math else 1.0 / sf[i]
            quantise(plan, wg, acc, codes, sf, shared, q)
    else:
        for q in units:
            row_maxima(acc.left[q], amax[q])
        for i in T.Parallel(64):
            sf[i] = device_e4m3_scale(T.max(amax[0][i], amax[1][i]), plan.recipe)
            p.l2_acts_sf[tile, block * s.block_m + wg * 64 + i] = sf[i] * weight[0][i]
            sf[i] = T.fast_rcp(sf[i]) if plan.fast_math else 1.0 / sf[i]
        for q in units:
            quantise(plan, wg, acc, codes, sf, shared, q)
    turn = turn ^ 1
    T.sync_warp()
    # 16-byte stores, 4 lanes a 64-column row; a warp reads only the staging rows it wrote.
    for q in units:
        for step in (0, 1):
            row = step * 8 + lane // 4
            for u in T.vectorized(16):
                p.l2_acts[
                    block * s.block_m + (q * 64 if columns_split else wg * 64) + warp * 16 + row,
                    tile * 128 + (wg * 64 if columns_split else q * 64) + lane % 4 * 16 + u,
                ] = shared.staging_fp8[wg * 128 + warp * 32 + q * 16 + row, lane % 4 * 16 + u]
    T.sync_warp()
    # Pairs with linear2's load: our plain stores, its TMA. The barrier gathers the warpgroup's
    # stores behind the one release.
    barriers.fence_async()
    barriers.sync(barriers.STAGING + wg, 128)
    if tx == 128 + wg * 128:
        barriers.add_release(p.workspace, plan.counter("l2_arrival") + block, 1)
