"""Linear1: pool rows @ gate and up weights, SwiGLU, FP8 quantise, publish the pool block.

A tile is (pool block, 128 intermediate columns): 256 rows of the interleaved W1.

role   warps      work
load   1 or 2     A: wait for the block's tokens, TMA rows, bulk row scales; B: bulk weights
math   4 + 4      K loop(s), SwiGLU, row maxima over the 128 columns, codes and scales to the pool

barrier                    arrivals                         meaning
l1_arrival_count[block]    block_m x chunks (dispatch)      all rows of the block are in the pool
l2_done[earlier block]     one a linear2 tile (math)        its intermediate rows may be overwritten
ring.full, ring.empty      see device/ring.py               a K block is there, is read
AMAX                       256 (64 x 256, group 128)        row maxima are in shared memory
STAGING + warpgroup        128                              staging is free; it is filled
shared.stored              one a warpgroup (not pingpong)   the tile's bulk stores are done
l2_arrival[block]          one a warpgroup of a tile        linear2 may read the block (gpu scope)

The last two are in device/report.py.

Which part of the tile a warpgroup computes is a `Share` (device/matmul.py): 64 rows and 64 matching
gate and up columns a unit. With 128 columns a scale, a row's maximum is that of two units: of the
two warpgroups where they split the columns, else of the warpgroup's own two.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, trace
from ..device.matmul import (
    RAW,
    Share,
    first_unit_row,
    row_maxima,
    scaled_k_loop,
    shares,
    stage_codes,
    thread_here,
)
from ..device.plan import Params, Plan
from ..device.report import Report, fence_shared, store_bulk
from ..device.ring import Cursor, Shared, fill, thread_row
from ..recipe import Recipe
from ..scaling import device_e4m3_scale, device_inverse
from ..schedule import BLOCK_K

LINEAR1_CUDA = r"""
// left <- silu(left) * right, approximate. silu(g) = g / (1 + exp(-g)), for g < 0 as
// g * exp(g) / (1 + exp(g)): so the denominators lie in [1, 2], and four of a row take one
// reciprocal, that of their product. A NaN among them reaches all four; one is enough for NaN in
// all columns of linear2's row.
TLMM_DEV void tlmm_swiglu(float* total) {
  #pragma unroll
  for (int first = 0; first < 32; first += 8)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      float power[4], below[4], over[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        float gate = total[first + half * 2 + (i >> 1) * 4 + (i & 1)];
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power[i])
          : "f"(fabsf(gate) * -1.4426950408889634f));  // log2(e)
        below[i] = 1.0f + power[i]; }
      float low = below[0] * below[1], high = below[2] * below[3], all;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(all) : "f"(low * high));
      over[0] = all * high * below[1]; over[1] = all * high * below[0];
      over[2] = all * low * below[3]; over[3] = all * low * below[2];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        int v = first + half * 2 + (i >> 1) * 4 + (i & 1);
        float gate = total[v];
        total[v] = gate * (gate < 0.0f ? power[i] : 1.0f) * over[i] * total[v + 32]; } } }
"""


@T.meta_class
class Rows:
    """Pool rows of linear1, row-major in memory: one TMA copy swizzles them."""

    def __init__(self, acts):
        self.acts = acts

    @T.inline
    def start(self, ring, cursor, row, num_rows, k):
        T.tma_copy(
            self.acts[row : row + num_rows, k * BLOCK_K : (k + 1) * BLOCK_K],
            ring.a[cursor.stage[0], 0:num_rows, :],
            barrier=ring.full[cursor.stage[0]],
            leader_scope_threads=32,
        )


@T.macro
def wait_for_rows(plan: Plan, p: Params, ahead, block, tile):
    """Wait until the tile's rows may be loaded, if this warp loads them."""
    if ahead.loads_rows:
        ahead.wait_for_rows(
            "l1_arrival_count", plan.l1_arrival_target, barriers.TAG_TOKENS, block, tile
        )
        if plan.fused and plan.ring_wraps:
            # The tile's epilogue overwrites intermediate rows; it runs behind these loads.
            if block >= plan.ring_blocks:
                ahead.wait_for(
                    "l2_done",
                    plan.l2_done_target,
                    block - plan.ring_blocks,
                    barriers.TAG_INTERMEDIATE_RING,
                    block,
                    tile,
                )
        T.sync_warp()
        trace.mark_tile(plan, p, trace.ARRIVAL, 1, block, tile)


@T.macro
def load(plan: Plan, p: Params, shared: Shared, cursor: Cursor, ahead, block, tile):
    """Fill the ring with the K blocks of one tile. Role: load."""
    s = plan.schedule
    passes = 256 // s.linear1_block_n
    wait_for_rows(plan, p, ahead, block, tile)
    for rows in plan.tile_rows(1):
        if plan.takes(1, rows, ahead.rows[0]):
            for half in T.serial(passes):
                fill(
                    shared.ring,
                    cursor,
                    ahead,
                    Rows(p.l1_acts),
                    p.l1_acts_sf,
                    (plan.ring_row(block), rows, 1),
                    p.w1,
                    (ahead.expert[0], tile * 2 + half, s.linear1_block_n // 128),
                    plan.groups1,
                    half,
                )


@T.macro
def swiglu(plan: Plan, p: Params, gate, up, first: int, count: int, helper):
    """gate[v] <- silu(gate[v]) * up[first + v], first clamped if asked, for `count` values.

    An IEEE division is a subroutine of tens of instructions: with fast_math `helper`, (name,
    *arguments) of a device function, approximates it and the exponential.
    """
    value = T.alloc_var("float32")
    if plan.clamp:
        # Compared, not min and max: those would turn a NaN into the bound.
        for v in T.unroll(count):
            value = up[v + first]
            gate[v] = T.if_then_else(gate[v] > p.clamp, p.clamp, gate[v])
            up[v + first] = T.if_then_else(
                value > p.clamp, p.clamp, T.if_then_else(value < -p.clamp, -p.clamp, value)
            )
    if plan.fast_math:
        T.call_extern("handle", *helper)
    else:
        for v in T.unroll(count):
            gate[v] = gate[v] * (1.0 / (1.0 + T.exp(-gate[v]))) * up[v + first]


@T.macro
def activate(plan: Plan, p: Params, total, weight):
    """left <- silu(left) * right, first clamped if asked, times `weight` unless a scale has it."""
    swiglu(plan, p, total, total, RAW // 2, RAW // 2, ("tlmm_swiglu", total.data))
    if not plan.recipe.folds_topk_weight:
        for v in T.unroll(RAW // 2):
            total[v] = total[v] * weight[v // 2 % 2]


@T.meta_class
class RowWeights:
    """Routing weights of a thread's two rows, fetched under a product: the rows are there then.

    Attributes:
        values: by row half.
    """

    def __init__(self, p: Params, report: Report, row):
        self.p = p
        self.report = report
        self.row = row
        self.values = T.alloc_local((2,), "float32")

    @T.inline
    def under_product(self):
        self.report.pay_deferred()
        for h in (0, 1):
            self.values[h] = barriers.load_f32(self.p.l1_topk_weights, self.row + 8 * h)


def writes_scales(plan: Plan, share: Share, wg):
    """Whether warpgroup `wg` stores the scales of its units: those that the other one shares are
    stored by one."""
    shared = share.splits_columns and plan.recipe.intermediate_group == 128
    return wg == 0 if shared else True


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at, report: Report):
    """The K loops of one tile: gate left, up right; returns its `RowWeights`. Role: math."""
    block, tile, expert, valid = at
    weights = RowWeights(
        p,
        report,
        block * plan.schedule.block_m
        + first_unit_row(plan, 1, wg, valid)
        + thread_row(thread_here()),
    )
    report.pay_if_empty(shared.ring, cursor)
    for rows, share in zip(plan.tile_rows(1), shares(plan, 1, wg), strict=True):
        if plan.takes(1, rows, valid):
            for units in share.loops:
                scaled_k_loop(
                    plan,
                    shared.ring,
                    cursor,
                    acc,
                    share,
                    units,
                    (plan.groups1, 1, False),
                    p.w1_sf,
                    (expert, (tile, plan.groups2 + tile), ((0, 1), (0, 1))),
                    weights,
                )
    return weights


@T.macro
def write_accumulators(plan: Plan, p: Params, acc, wg, at):
    """The debug view: gate and up of the tile as float32, at `y_address`. Role: math."""
    block, tile, _, valid = at
    inter = plan.problem.intermediate
    tx = T.get_thread_binding()
    view = T.make_tensor_from_addr(p.y_address, (plan.layout.ring_rows, 2 * inter), "float32")
    for rows, share in zip(plan.tile_rows(1), shares(plan, 1, wg), strict=True):
        if plan.takes(1, rows, valid):
            for q in share.units:
                for v in T.unroll(RAW):
                    view[
                        plan.ring_row(block) + share.a_row + thread_row(tx) + v // 2 % 2 * 8,
                        v // 32 * inter
                        + tile * 128
                        + share.half[q] * 64
                        + v % 32 // 4 * 8
                        + tx % 4 * 2
                        + v % 2,
                    ] = acc.total[q][v]


def _row_maximum(shared: Shared, recipe: Recipe, exchange: bool, amax, q: int, other, h: int):
    """Largest magnitude of one row of unit q over the columns of one scale.

    Args:
        other: (turn, other warpgroup, row) in `shared.amax`, for an exchange.
    """
    if recipe.intermediate_group == 64:
        return amax[q][h]
    if not exchange:
        return T.max(amax[0][h], amax[1][h])
    turn, wg, row = other
    return T.max(amax[q][h], shared.amax[turn, wg, row + 8 * h])


def stored_scale(recipe: Recipe, sf, weight):
    """The scale that linear2 multiplies by."""
    return sf * weight if recipe.folds_topk_weight else sf


@T.macro
def finish(plan: Plan, p: Params, shared: Shared, acc, wg, at, turn: T.Ref, weights: RowWeights):
    """SwiGLU, row scales, FP8 codes, bulk stores. Role: math.

    `turn` alternates between two exchange buffers from one exchange of maxima to the next, so that
    one barrier is enough: nobody overwrites a maximum that the other warpgroup has yet to read.
    """
    _, _, _, valid = at
    for rows, share in zip(plan.tile_rows(1), shares(plan, 1, wg), strict=True):
        if plan.takes(1, rows, valid):
            exchange = share.splits_columns and plan.recipe.intermediate_group == 128
            _finish_units(plan, p, shared, acc, wg, at, turn, weights, share, exchange)
            if exchange:
                turn = turn ^ 1


@T.macro
def _finish_units(plan: Plan, p: Params, shared, acc, wg, at, turn, weights, share, exchange):
    block, tile, _, _ = at
    recipe = plan.recipe
    units = share.units
    first_row = plan.ring_row(block) + share.a_row
    thread = T.alloc_var("int32")
    thread = thread_here()
    row = thread_row(thread)
    warp = thread % 128 // 32
    scales = recipe.scales_per_k_block
    writes = writes_scales(plan, share, wg)
    # A scale of two units is stored by one of them.
    num_writers = len(units) if recipe.intermediate_group == 64 else 1
    sf = T.alloc_var("float32")
    amax = tuple(T.alloc_local((2,), "float32") for _ in units)
    for q in units:
        activate(plan, p, acc.total[q], weights.values)
    for q in units:
        row_maxima(acc.total[q], amax[q])
    # Behind either barrier the leader has paid for the tile before: its stores have left.
    if exchange:
        for q in units:
            for h in (0, 1):
                shared.amax[turn, wg, row + 8 * h] = amax[q][h]
        barriers.sync(barriers.AMAX, 256)
    else:
        barriers.sync(barriers.STAGING + wg, 128)
    for q in units:
        for h in (0, 1):
            sf = device_e4m3_scale(
                _row_maximum(shared, recipe, exchange, amax, q, (turn, 1 - wg, row), h), recipe
            )
            if q < num_writers:
                if writes:
                    shared.scales[wg, share.half[q] % scales, share.a_row + row + 8 * h] = (
                        stored_scale(recipe, sf, weights.values[h])
                    )
            sf = device_inverse(sf, recipe, plan.fast_math)
            for v in T.unroll(RAW // 4):
                acc.total[q][v // 2 * 4 + v % 2 + 2 * h] = (
                    acc.total[q][v // 2 * 4 + v % 2 + 2 * h] * sf
                )
        stage_codes(acc.total[q], T.address_of(shared.staging[wg * 64 + q * 32 + warp * 8, 0]))
    fence_shared()
    barriers.sync(barriers.STAGING + wg, 128)
    if T.get_thread_binding() == 128 + wg * 128:
        for q in units:
            store_bulk(
                p.l2_acts[first_row // 64, tile * 2 + share.half[q], 0, 0],
                shared.staging[wg * 64 + q * 32, 0],
                64 * 64,
            )
            if q < num_writers:
                if writes:
                    store_bulk(
                        p.l2_acts_sf[tile * scales + share.half[q] % scales, first_row],
                        shared.scales[wg, share.half[q] % scales, share.a_row],
                        64 * 4,
                    )
        weights.report.owe(block)
