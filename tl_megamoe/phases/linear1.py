"""Linear1: pool rows @ gate and up weights, SwiGLU, FP8 quantise, publish the pool block.

A tile is (pool block, 128 intermediate columns): 256 rows of the interleaved W1.

role   warps      work
load   1 or 2     A: wait for the block's tokens, TMA rows and row scales; B: TMA weights
math   4 + 4      K loop(s), SwiGLU, row maxima over the 128 columns, codes and scales to the pool

barrier                    arrivals                         meaning
l1_arrival_count[block]    block_m x chunks (dispatch)      all rows of the block are in the pool
l2_done[earlier block]     one a linear2 tile (math)        its intermediate rows may be overwritten
ring.full, ring.empty      see device/ring.py               a K block is there, is read
AMAX                       256 (columns split, group 128)   row maxima are in shared memory
STAGING + warpgroup        128                              the warpgroup's stores are issued
l2_arrival[block]          one a warpgroup of a tile        linear2 may read the block (gpu scope)

Which part of the tile a warpgroup computes is a `Share` (device/matmul.py): 64 rows and 64 matching
gate and up columns a unit. With 128 columns a scale, a row's maximum is that of two units: of the
two warpgroups where they split the columns, else of the warpgroup's own two.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, trace
from ..device.matmul import Share, row_maxima, scaled_k_loop, stage_codes, store_codes
from ..device.plan import Params, Plan
from ..device.ring import Cursor, Ring, Shared, fill
from ..recipe import Recipe
from ..scaling import device_e4m3_scale, device_inverse


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
                expert,
                tile,
            )
            if plan.ring_wraps:
                # The tile's epilogue overwrites intermediate rows; it runs behind these loads.
                if block >= plan.ring_blocks:
                    barriers.wait_equal(
                        p,
                        plan.counter("l2_done") + block - plan.ring_blocks,
                        plan.l2_done_target,
                        barriers.TAG_INTERMEDIATE_RING,
                        block,
                        expert,
                        tile,
                    )
        # Pairs with the dispatch warps' fence: their plain stores of the row scales, our TMA.
        barriers.fence_async()
        T.sync_warp()
        trace.mark_tile(plan, p, trace.ARRIVAL, 1, block, tile)
    for half in T.serial(passes):
        fill(
            ring,
            cursor,
            what,
            p.l1_acts,
            p.l1_acts_sf,
            (plan.ring_row(block), s.block_m, 1),
            p.w1,
            (expert, tile * 2 + half, s.linear1_block_n // 128),
            plan.groups1,
        )


@T.macro
def activate(plan: Plan, p: Params, gate, up, weight):
    """gate <- silu(gate) * up, optionally clamped first; times `weight` unless a scale holds it."""
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
    # An IEEE division is a subroutine of tens of instructions: with fast_math both are approximate.
    if plan.fast_math:
        for i, j in T.Parallel(64, 64):
            gate[i, j] = gate[i, j] * T.fast_rcp(1.0 + T.__exp(-gate[i, j])) * up[i, j]
    else:
        for i, j in T.Parallel(64, 64):
            gate[i, j] = gate[i, j] * (1.0 / (1.0 + T.exp(-gate[i, j]))) * up[i, j]
    if not plan.recipe.folds_topk_weight:
        for i, j in T.Parallel(64, 64):
            gate[i, j] = gate[i, j] * weight[i]


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at):
    """The K loop, or loops, of one tile: gate in acc.left, up in acc.right. Role: math."""
    _, tile, expert = at
    share = Share.of(plan.schedule, 1, wg)
    for units in share.loops:
        scaled_k_loop(
            plan,
            shared.ring,
            cursor,
            acc,
            share,
            units,
            (plan.groups1, 1),
            p.w1_sf,
            (expert, (tile, plan.groups2 + tile), ((0, 1), (0, 1))),
            None,
        )


@T.macro
def write_accumulators(plan: Plan, p: Params, acc, wg, at):
    """The debug view: gate and up of the tile as float32, at `y_address`. Role: math."""
    block, tile, _ = at
    inter = plan.problem.intermediate
    share = Share.of(plan.schedule, 1, wg)
    view = T.make_tensor_from_addr(p.y_address, (plan.layout.ring_rows, 2 * inter), "float32")
    for q in share.units:
        for i, j in T.Parallel(64, 64):
            view[plan.ring_row(block) + share.a_row[q] + i, tile * 128 + share.half[q] * 64 + j] = (
                acc.left[q][i, j]
            )
        for i, j in T.Parallel(64, 64):
            view[
                plan.ring_row(block) + share.a_row[q] + i,
                inter + tile * 128 + share.half[q] * 64 + j,
            ] = acc.right[q][i, j]


def _row_maximum(shared: Shared, recipe: Recipe, exchange: bool, amax, q: int, turn, wg: int, i):
    """Largest magnitude of row i of unit q over the columns of one scale."""
    if recipe.intermediate_group == 64:
        return amax[q][i]
    return (
        T.max(amax[0][i], amax[1][i])
        if not exchange
        else T.max(amax[q][i], shared.amax[turn, 1 - wg, q * 64 + i])
    )


def _stored(recipe: Recipe, sf, weight):
    """The scale that linear2 multiplies by."""
    return sf * weight if recipe.folds_topk_weight else sf


@T.macro
def finish(plan: Plan, p: Params, shared: Shared, acc, wg, at, turn: T.Ref):
    """SwiGLU, row scales, FP8 codes, stores, report. Role: math.

    `turn` alternates between two exchange buffers, so that one barrier a tile is enough: nobody
    overwrites a maximum that the other warpgroup has yet to read.
    """
    block, tile, _ = at
    s, recipe = plan.schedule, plan.recipe
    share = Share.of(s, 1, wg)
    units, first_row = share.units, plan.ring_row(block)
    tx = T.get_thread_binding()
    warp = (tx - 128 - wg * 128) // 32
    exchange = share.splits_columns and recipe.intermediate_group == 128
    # A scale of two units is stored by one of them.
    both = recipe.intermediate_group == 64 or share.splits_columns
    writes = recipe.intermediate_group == 64 or not share.splits_columns or wg == 0
    # Of which unit's rows the weights are needed, and where: in the activation or in the scale.
    row_sets = units if share.splits_columns else (0,)
    needs_weights = writes or not recipe.folds_topk_weight
    sf = T.alloc_fragment((64,), "float32")
    amax = tuple(T.alloc_fragment((64,), "float32") for _ in units)
    weight = tuple(T.alloc_fragment((64,), "float32") for _ in row_sets)
    # Routing weights are asked for before the SwiGLU arithmetic, which hides their latency.
    if needs_weights:
        for q in row_sets:
            for i in T.Parallel(64):
                weight[q][i] = barriers.load_f32(
                    p.l1_topk_weights, block * s.block_m + share.a_row[q] + i
                )
    for q in units:
        activate(plan, p, acc.left[q], acc.right[q], weight[q % len(row_sets)])
    for q in units:
        row_maxima(acc.left[q], amax[q])
    if exchange:
        for q in units:
            for i in T.Parallel(64):
                shared.amax[turn, wg, q * 64 + i] = amax[q][i]
        barriers.sync(barriers.AMAX, 256)
    for q in units:
        for i in T.Parallel(64):
            sf[i] = device_e4m3_scale(
                _row_maximum(shared, recipe, exchange, amax, q, turn, wg, i), recipe
            )
            if writes and (both or q == 0):
                p.l2_acts_sf[
                    tile * recipe.scales_per_k_block + share.half[q] % recipe.scales_per_k_block,
                    first_row + share.a_row[q] + i,
                ] = _stored(recipe, sf[i], weight[q % len(row_sets)][i])
            sf[i] = device_inverse(sf[i], recipe, plan.fast_math)
        for i, j in T.Parallel(64, 64):
            acc.left[q][i, j] = acc.left[q][i, j] * sf[i]
        # The staging rows that linear2 gives this warp: another may still read its own.
        stage_codes(acc.left[q], T.address_of(shared.staging[wg * 64 + warp * 16 + q * 8, 0]))
    turn = turn ^ 1
    T.sync_warp()
    for q in units:
        store_codes(
            T.address_of(shared.staging[wg * 64 + warp * 16 + q * 8, 0]),
            T.address_of(
                p.l2_acts[first_row + share.a_row[q] + warp * 16, tile * 128 + share.half[q] * 64]
            ),
            plan.problem.intermediate,
        )
    T.sync_warp()
    # Pairs with linear2's load: our plain stores, its TMA. The barrier gathers the warpgroup's
    # stores behind the one release.
    barriers.fence_async()
    barriers.sync(barriers.STAGING + wg, 128)
    if tx == 128 + wg * 128:
        barriers.add_release(p.workspace, plan.counter("l2_arrival") + block, 1)
