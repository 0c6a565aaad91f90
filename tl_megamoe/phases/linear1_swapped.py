"""Linear1 with swapped operands: what differs from linear1.py.

A tile is the same, the 256 rows of W1 that make 128 intermediate columns, times as many rows of a
pool block as it holds, in steps of 16. A warpgroup has 64 of the columns, gate in one unit and up
in the other (device/swapped.py), for all rows.

role   warps      work
load   1 or 2     A: TMA in pieces of 16 rows, bulk row scales (gather.py: from the tokens); B: bulk
                  weights
math   4 + 4      K loop, SwiGLU, maxima of a row from all warps, one thread a row for its scale

barrier                    arrivals                         meaning
AMAX                       256 (group 128)                  all warps' maxima are in shared memory
STAGING + warpgroup        128                              routing weights are there (where no
                                                            scale has them); staging is free (group
                                                            64: and maxima are there); scales are
                                                            there; staging is filled
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, trace
from ..device.matmul import thread_here
from ..device.plan import Params, Plan
from ..device.report import Report, fence_shared, store_bulk
from ..device.ring import Cursor, Shared, fill, thread_row
from ..device.swapped import (
    UNITS,
    column_maxima,
    largest_of_warps,
    scale_columns,
    stage_columns,
    swapped_k_loop,
)
from ..scaling import device_e4m3_scale, device_inverse
from ..schedule import BLOCK_K, ROW_STEP
from .gather import TokenRows, route_of
from .linear1 import stored_scale, swiglu, wait_for_rows


@T.meta_class
class Rows:
    """Pool rows of linear1, as many as a tile has."""

    def __init__(self, acts):
        self.acts = acts

    @T.inline
    def start(self, ring, cursor, row, num_rows, k):
        for piece in T.serial(num_rows // ROW_STEP):
            T.tma_copy(
                self.acts[
                    row + piece * ROW_STEP : row + piece * ROW_STEP + ROW_STEP,
                    k * BLOCK_K : (k + 1) * BLOCK_K,
                ],
                ring.a[cursor.stage[0], piece * ROW_STEP : piece * ROW_STEP + ROW_STEP, :],
                barrier=ring.full[cursor.stage[0]],
                leader_scope_threads=32,
            )


@T.macro
def load(plan: Plan, p: Params, shared: Shared, cursor: Cursor, ahead, block, tile):
    """Fill the ring with the K blocks of one tile. Role: load."""
    if plan.gathers and ahead.loads_rows:
        if plan.is_few(p):
            trace.mark_tile(plan, p, trace.ARRIVAL, 1, block, tile)
            rows = TokenRows(plan, p, shared, block, ahead.expert[0], ahead.rows[0])
            _fill(plan, p, shared, cursor, ahead, rows, None, block, tile)
        else:
            _load_from_pool(plan, p, shared, cursor, ahead, block, tile)
    else:
        _load_from_pool(plan, p, shared, cursor, ahead, block, tile)


@T.macro
def _load_from_pool(plan: Plan, p: Params, shared: Shared, cursor, ahead, block, tile):
    wait_for_rows(plan, p, ahead, block, tile)
    _fill(plan, p, shared, cursor, ahead, Rows(p.l1_acts), p.l1_acts_sf, block, tile)


@T.macro
def _fill(plan: Plan, p: Params, shared: Shared, cursor: Cursor, ahead, acts, acts_sf, block, tile):
    fill(
        shared.ring,
        cursor,
        ahead,
        acts,
        acts_sf,
        (plan.ring_row(block), plan.padded_rows(ahead.rows[0]), 1),
        p.w1,
        (ahead.expert[0], tile * 2, 2),
        plan.groups1,
        0,
    )


@T.meta_class
class RowWeight:
    """The routing weight of row `thread % 128` of the tile, which that thread scales, fetched under
    a product: it is there then.

    Attributes:
        value: the weight; of a thread without a row, that of another.
    """

    def __init__(self, plan: Plan, p: Params, shared: Shared, report: Report, at):
        self.plan = plan
        self.p = p
        self.shared = shared
        self.report = report
        self.at = at
        self.value = T.alloc_var("float32", init=0.0)

    @T.inline
    def under_product(self):
        plan, p = self.plan, self.p
        self.report.pay_deferred()
        if plan.gathers:
            if plan.is_few(p):
                self.value[0] = T.call_extern(
                    "float32",
                    "tlmm_load_at",
                    p.peers[0] + plan.offset("topk_weights"),
                    route_of(plan, self.shared, self.at, thread_here() % 128),
                )
            else:
                self.value[0] = self.in_pool()
        else:
            self.value[0] = self.in_pool()

    def in_pool(self):
        block_m = self.plan.schedule.block_m
        row = self.at[0] * block_m + T.min(thread_here() % 128, block_m - 1)
        return barriers.load_f32(self.p.l1_topk_weights, row)


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at, report: Report):
    """The K loop of one tile: gate in unit 0, up in unit 1; returns its `RowWeight`. Role: math."""
    _, tile, expert, valid = at
    weight = RowWeight(plan, p, shared, report, at)
    report.pay_if_empty(shared.ring, cursor)
    for rows in plan.tile_rows(1):
        if plan.takes(1, rows, valid):
            swapped_k_loop(
                plan,
                shared.ring,
                cursor,
                acc,
                wg,
                rows,
                (plan.groups1, 1, False),
                p.w1_sf,
                (expert, (tile, plan.groups2 + tile)),
                weight,
                plan.is_few(p) if plan.gathers else None,
            )
    return weight


@T.macro
def write_accumulators(plan: Plan, p: Params, acc, wg, at):
    """The debug view: gate and up of the tile as float32, at `y_address`. Role: math."""
    block, tile, _, valid = at
    inter = plan.problem.intermediate
    tx = T.get_thread_binding()
    view = T.make_tensor_from_addr(p.y_address, (plan.layout.ring_rows, 2 * inter), "float32")
    for rows in plan.tile_rows(1):
        if plan.takes(1, rows, valid):
            for u in UNITS:
                for v in T.unroll(rows // 2):
                    view[
                        plan.ring_row(block) + v // 4 * 8 + tx % 4 * 2 + v % 2,
                        u * inter + tile * 128 + wg * 64 + thread_row(tx) + v // 2 % 2 * 8,
                    ] = acc.total[u][v]


@T.macro
def finish(plan: Plan, p: Params, shared: Shared, acc, wg, at, turn: T.Ref, weight: RowWeight):
    """SwiGLU, row scales, FP8 codes, bulk stores. Role: math.

    `turn` alternates as in linear1.py.
    """
    _, _, _, valid = at
    for rows in plan.tile_rows(1):
        if plan.takes(1, rows, valid):
            _finish_rows(plan, p, shared, acc, wg, at, turn, weight, rows)
            if plan.recipe.intermediate_group == 128:
                turn = turn ^ 1


@T.macro
def _finish_rows(plan: Plan, p: Params, shared, acc, wg, at, turn, weight, rows):
    block, tile, _, _ = at
    recipe = plan.recipe
    scales = recipe.scales_per_k_block
    shares = recipe.intermediate_group == 128  # a row's scale, with the other warpgroup
    first_row = plan.ring_row(block)
    thread = T.alloc_var("int32")
    thread = thread_here()
    row = thread % 128
    sf = T.alloc_var("float32")
    gate, up = acc.total
    swiglu(plan, p, gate, up, 0, rows // 2, (f"tlmm_swiglu_columns<{rows}>", gate.data, up.data))
    if not recipe.folds_topk_weight:
        if row < rows:
            shared.inverse[wg, row] = weight.value[0]
        barriers.sync(barriers.STAGING + wg, 128)
        scale_columns(rows, gate, shared.inverse[wg, 0])
    column_maxima(rows, gate, shared.amax[turn, thread // 32 - 4, 0])
    # Behind either barrier the leader has paid for the tile before: its stores have left.
    if shares:
        barriers.sync(barriers.AMAX, 256)
    else:
        barriers.sync(barriers.STAGING + wg, 128)
    if row < rows:
        largest = largest_of_warps(
            8 if shares else 4,
            shared.amax[turn, 0 if shares else wg * 4, row],
            plan.schedule.block_m,
        )
        sf = device_e4m3_scale(largest, recipe)
        if (wg == 0) if shares else True:
            shared.scales[wg, wg % scales, row] = stored_scale(recipe, sf, weight.value[0])
        shared.inverse[wg, row] = device_inverse(sf, recipe, plan.fast_math)
    barriers.sync(barriers.STAGING + wg, 128)
    stage_columns(rows, gate, shared.inverse[wg, 0], shared.staging[wg * 64, 0])
    fence_shared()
    barriers.sync(barriers.STAGING + wg, 128)
    if T.get_thread_binding() == 128 + wg * 128:
        store_bulk(
            p.l2_acts[first_row // 64, tile * 2 + wg, 0, 0], shared.staging[wg * 64, 0], rows * 64
        )
        if (wg == 0) if shares else True:
            store_bulk(
                p.l2_acts_sf[tile * scales + wg % scales, first_row],
                shared.scales[wg, wg % scales, 0],
                rows * 4,
            )
        weight.report.owe(block)
