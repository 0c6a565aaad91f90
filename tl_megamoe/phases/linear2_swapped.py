"""Linear2 with swapped operands: what differs from linear2.py.

A tile is the same, 256 output columns, times as many rows of a pool block as it holds, in steps of
16. A warpgroup has 128 of the columns in two units (device/swapped.py), for all rows.

role   warps      work
load   1 or 2     A: bulk codes, of all rows the 64 left bytes and then the right, and scales;
                  B: bulk weights
math   4 + 4      K loop, BF16 rows to combine_acts[slot, token] of the source rank

barrier                  arrivals                      meaning
STAGING + warpgroup      128                           staging is free; it is filled
l2_arrival, l2_done      see linear2.py
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers
from ..device.matmul import thread_here
from ..device.plan import ITEM_BYTES_BF16, Params, Plan
from ..device.report import Report
from ..device.ring import Cursor, Shared, copy, expect, fill
from ..device.swapped import UNITS, stage_outputs, store_outputs, swapped_k_loop
from ..schedule import BLOCK_K, ROW_STEP
from .gather import route_of
from .linear2 import Targets, combine_row, report_read, wait_for_rows


@T.meta_class
class Rows:
    """Rows of the intermediate pool, as many as a tile has, 64 bytes each of two 64 x 64 tiles."""

    def __init__(self, acts):
        self.acts = acts

    @T.inline
    def start(self, ring, cursor, row, num_rows, k):
        block_m = ring.a.shape[1]
        if T.shuffle_elect(32):
            expect(ring, cursor, num_rows * BLOCK_K, False)
            for half in (0, 1):
                copy(
                    ring,
                    cursor,
                    ring.a[cursor.stage[0], half * (block_m // 2), 0],
                    self.acts[row // 64, k * 2 + half, 0, 0],
                    num_rows * (BLOCK_K // 2),
                )


@T.macro
def load(plan: Plan, p: Params, shared: Shared, cursor: Cursor, ahead, block, tile):
    """Fill the ring with the K blocks of one tile. Role: load."""
    wait_for_rows(plan, p, ahead, block, tile)
    fill(
        shared.ring,
        cursor,
        ahead,
        Rows(p.l2_acts),
        p.l2_acts_sf,
        (
            plan.ring_row(block),
            plan.padded_rows(ahead.rows[0]),
            plan.recipe.scales_per_k_block,
        ),
        p.w2,
        (ahead.expert[0], tile * 2, 2),
        plan.groups2,
        0,
    )


@T.meta_class
class RowTargets:
    """`Targets` of a row of the tile, by its route where rows are gathered."""

    def __init__(self, plan: Plan, p: Params, shared: Shared, report: Report, at, row):
        self.plan = plan
        self.p = p
        self.shared = shared
        self.at = at
        self.row = row
        self.pool = Targets(plan, p, report, at[0] * plan.schedule.block_m + row)
        self.address = self.pool.address

    @T.inline
    def under_product(self):
        plan, p = self.plan, self.p
        if plan.gathers:
            if plan.is_few(p):
                self.pool.report.pay_deferred()
                route = route_of(plan, self.shared, self.at, self.row)
                topk = plan.problem.num_topk
                self.address[0] = combine_row(
                    plan, p.peers[0], route % topk * plan.layout.capacity + route // topk
                )
            else:
                self.pool.under_product()
        else:
            self.pool.under_product()

    def of(self, lane):
        """The address that a lane holds."""
        return self.pool.of(lane)


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at, report: Report):
    """The K loop of one tile; returns where its rows go. Role: math.

    A warp stores rows 16 s + 4 warp + (0 .. 3) of the tile: lane l looks up that of s = l / 4 % 4
    and l % 4.
    """
    block, tile, expert, valid = at
    thread = T.alloc_var("int32")
    thread = thread_here()
    row = thread % 16 // 4 * 16 + thread % 128 // 32 * 4 + thread % 4
    targets = RowTargets(plan, p, shared, report, at, row)
    report.pay_if_empty(shared.ring, cursor)
    for rows in plan.tile_rows(2):
        if plan.takes(2, rows, valid):
            swapped_k_loop(
                plan,
                shared.ring,
                cursor,
                acc,
                wg,
                rows,
                (plan.groups2, plan.recipe.scales_per_k_block, True),
                p.w2_sf,
                (expert, (tile * 2 + wg,)),
                targets,
                None,
            )
    report_read(plan, p, wg, block)
    return targets


@T.macro
def scatter(plan: Plan, p: Params, shared: Shared, acc, wg, at, targets):
    """The rows of one tile, in BF16, to the tokens they came from. Role: math.

    64 columns of the warpgroup at a time, transposed on their way to its staging rows.
    """
    _, tile, _, valid = at
    thread = T.alloc_var("int32")
    thread = thread_here()
    to = T.alloc_local((4,), "int64")
    for rows in plan.tile_rows(2):
        if plan.takes(2, rows, valid):
            for step in tuple(range(rows // ROW_STEP)):
                to[step] = targets.of(step * 4 + thread % 32 // 8)
                if step * ROW_STEP + thread % 128 // 32 * 4 + thread % 32 // 8 >= valid:
                    to[step] = T.int64(0)
            for u in UNITS:
                # Behind the first the leader has paid for the linear1 tile before: its stores have
                # left.
                barriers.sync(barriers.STAGING + wg, 128)
                stage_outputs(rows, acc.total[u], shared.staging[wg * 64, 0])
                barriers.sync(barriers.STAGING + wg, 128)
                store_outputs(
                    rows,
                    to,
                    shared.staging[wg * 64, 0],
                    (tile * 256 + wg * 128 + u * 64) * ITEM_BYTES_BF16,
                )
