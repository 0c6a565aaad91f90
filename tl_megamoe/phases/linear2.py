"""Linear2: intermediate rows @ down weights, BF16 rows scattered to their tokens' ranks.

A tile is (pool block, linear2_block_n output columns).

role   warps      work
load   1 or 2     A: wait for the block's linear1 tiles, bulk codes and scales; B: bulk weights
math   4 + 4      K loop, BF16 rows to combine_acts[slot, token] of the source rank

barrier                  arrivals                      meaning
l2_arrival[block]        one a warpgroup of a tile     the block's intermediate rows are in the pool
ring.full, ring.empty    see device/ring.py            a K block is there, is read
l2_done[block]           one a tile                    its intermediate rows may be overwritten
STAGING + warpgroup      128                           staging is free

Rows past the expert's count are computed and dropped. The routing weight is in the intermediate or
its stored scale (recipe.py), so a row is written as it is and combine only adds.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, trace
from ..device.matmul import (
    LEFT,
    RIGHT,
    first_unit_row,
    scaled_k_loop,
    shares,
    stage_rows,
    store_rows,
    thread_here,
)
from ..device.plan import ITEM_BYTES_BF16, Params, Plan
from ..device.report import Report
from ..device.ring import Cursor, Shared, copy, expect, fill
from ..schedule import BLOCK_K, COUNTER_BITS


def combine_row(plan: Plan, base, row):
    """Address of a row of combine_acts, `slot * capacity + token`, in the buffer at `base`."""
    return (
        base
        + plan.offset("combine_acts")
        + T.Cast("int64", row) * (plan.problem.hidden * ITEM_BYTES_BF16)
    )


@T.meta_class
class Targets:
    """Where the rows of a tile go, fetched under a product: lane l of a warp holds the
    address of row l % 16 of the warp's 16."""

    def __init__(self, plan: Plan, p: Params, report: Report, row):
        self.plan = plan
        self.p = p
        self.report = report
        self.row = row
        self.address = T.alloc_var("int64", init=T.int64(0))

    @T.inline
    def under_product(self):
        self.report.pay_deferred()
        source = barriers.load(self.p.metadata, self.row)
        # Rows past the expert's count hold anything: some rank's address, never stored to.
        rank = T.min(
            T.Cast("int32", T.Cast("uint32", source) >> T.uint32(COUNTER_BITS)),
            self.plan.problem.num_ranks - 1,
        )
        self.address[0] = combine_row(
            self.plan, self.p.peers[rank], source & ((1 << COUNTER_BITS) - 1)
        )

    def of(self, lane):
        """The address that a lane holds."""
        return T.shfl_sync(self.address[0], lane)


@T.meta_class
class Rows:
    """Rows of the intermediate pool: for every 64 rows and K block 8 KiB, as WGMMA reads them."""

    def __init__(self, acts):
        self.acts = acts

    @T.inline
    def start(self, ring, cursor, row, num_rows, k):
        if T.shuffle_elect(32):
            expect(ring, cursor, num_rows * BLOCK_K, False)
            for part in tuple(range(num_rows // 64)):
                copy(
                    ring,
                    cursor,
                    ring.a[cursor.stage[0], part * 64, 0],
                    self.acts[row // 64 + part, k * 2, 0, 0],
                    64 * BLOCK_K,
                )


@T.macro
def wait_for_rows(plan: Plan, p: Params, ahead, block, tile):
    """Wait until the tile's rows may be loaded, if this warp loads them."""
    if ahead.loads_rows:
        ahead.wait_for_rows("l2_arrival", plan.l2_arrival_target, barriers.TAG_LINEAR1, block, tile)
        T.sync_warp()
        trace.mark_tile(plan, p, trace.ARRIVAL, 2, block, tile)


@T.macro
def load(plan: Plan, p: Params, shared: Shared, cursor: Cursor, ahead, block, tile):
    """Fill the ring with the K blocks of one tile. Role: load."""
    s = plan.schedule
    wait_for_rows(plan, p, ahead, block, tile)
    for rows in plan.tile_rows(2):
        if plan.takes(2, rows, ahead.rows[0]):
            fill(
                shared.ring,
                cursor,
                ahead,
                Rows(p.l2_acts),
                p.l2_acts_sf,
                (plan.ring_row(block), rows, plan.recipe.scales_per_k_block),
                p.w2,
                (ahead.expert[0], tile * (s.linear2_block_n // 128), s.linear2_block_n // 128),
                plan.groups2,
                0,
            )


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at, report: Report):
    """The K loop of one tile; returns where its rows go. Role: math."""
    block, tile, expert, valid = at
    s = plan.schedule
    thread = T.alloc_var("int32")
    thread = thread_here()
    targets = Targets(
        plan,
        p,
        report,
        block * s.block_m
        + first_unit_row(plan, 2, wg, valid)
        + thread % 128 // 32 * 16
        + thread % 16,
    )
    report.pay_if_empty(shared.ring, cursor)
    for rows, share in zip(plan.tile_rows(2), shares(plan, 2, wg), strict=True):
        if plan.takes(2, rows, valid):
            scale_rows = tuple(
                tile * (s.linear2_block_n // 128) + share.half[q] for q in share.units
            )
            scaled_k_loop(
                plan,
                shared.ring,
                cursor,
                acc,
                share,
                share.units,
                (plan.groups2, plan.recipe.scales_per_k_block, True),
                p.w2_sf,
                (expert, scale_rows, tuple((q, q) for q in share.units)),
                targets,
            )
    report_read(plan, p, wg, block)
    return targets


@T.macro
def report_read(plan: Plan, p: Params, wg, block):
    """The tile's intermediate rows have been read."""
    if plan.ring_wraps:
        # Any math thread behind the K loop: the tile's TMA reads are complete.
        if T.get_thread_binding() == (128 + wg * 128 if plan.schedule.pingpong else 128):
            barriers.add_release(p.workspace, plan.counter("l2_done") + block, 1)


@T.macro
def scatter(plan: Plan, p: Params, shared: Shared, acc, wg, at, targets):
    """The rows of one tile, in BF16, to the tokens they came from. Role: math."""
    block, tile, expert, valid = at
    s = plan.schedule
    thread = T.alloc_var("int32")
    thread = thread_here()
    warp = thread % 128 // 32
    # 16 rows x 64 columns a warp and pass, through the warp's own staging rows. Behind the barrier
    # the leader has paid for the linear1 tile before: its stores have left.
    staging = T.address_of(shared.staging[wg * 64 + warp * 16, 0])
    to = T.alloc_local((4,), "int64")
    barriers.sync(barriers.STAGING + wg, 128)
    for rows, share in zip(plan.tile_rows(2), shares(plan, 2, wg), strict=True):
        if plan.takes(2, rows, valid):
            if share.a_row < valid:
                for step in (0, 1, 2, 3):
                    row = step * 4 + thread % 32 // 8
                    to[step] = targets.of(row)
                    if share.a_row + warp * 16 + row >= valid:
                        to[step] = T.int64(0)
                for q in share.units:
                    column = tile * s.linear2_block_n + share.half[q] * 128
                    for first in (LEFT, RIGHT):
                        stage_rows(acc.total[q], first, staging)
                        store_rows(to, staging, (column + first * 2) * ITEM_BYTES_BF16)
