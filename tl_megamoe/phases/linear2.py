"""Linear2: intermediate rows @ down weights, BF16 rows scattered to their tokens' ranks.

A tile is (pool block, linear2_block_n output columns).

role   warps      work
load   1 or 2     A: wait for the block's linear1 tiles, TMA codes and scales; B: TMA weights
math   4 + 4      K loop, BF16 rows to combine_acts[slot, token] of the source rank

barrier                  arrivals                      meaning
l2_arrival[block]        one a warpgroup of a tile     the block's intermediate rows are in the pool
ring.full, ring.empty    see device/ring.py            a K block is there, is read
l2_done[block]           one a tile                    its intermediate rows may be overwritten

Rows past the expert's count are computed and dropped. The routing weight is in the intermediate or
its stored scale (recipe.py), so a row is written as it is and combine only adds.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, trace
from ..device.matmul import Share, scaled_k_loop, stage_rows, store_row
from ..device.plan import ITEM_BYTES_BF16, Params, Plan
from ..device.ring import Cursor, Ring, Shared, fill
from ..schedule import COUNTER_BITS


@T.meta_class
class RowMetadata:
    """Source of one pool row, fetched under the first product of a tile."""

    def __init__(self, tensor, row):
        self.tensor = tensor
        self.row = row
        self.value = T.alloc_var("int32", init=0)

    @T.inline
    def fetch(self):
        self.value[0] = barriers.load(self.tensor, self.row)


@T.macro
def load(plan: Plan, p: Params, ring: Ring, cursor: Cursor, what, block, tile, expert):
    """Fill the ring with the K blocks of one tile. Role: load; `what` = (rows too, weights too)."""
    s = plan.schedule
    if what[0]:
        if plan.fused:
            barriers.wait_equal(
                p,
                plan.counter("l2_arrival") + block,
                plan.l2_arrival_target,
                barriers.TAG_LINEAR1,
                block,
                expert,
                tile,
            )
        # Pairs with linear1's fence after its stores.
        barriers.fence_async()
        T.sync_warp()
        trace.mark_tile(plan, p, trace.ARRIVAL, 2, block, tile)
    fill(
        ring,
        cursor,
        what,
        p.l2_acts,
        p.l2_acts_sf,
        (plan.ring_row(block), s.block_m, plan.recipe.scales_per_k_block),
        p.w2,
        (expert, tile * (s.linear2_block_n // 128), s.linear2_block_n // 128),
        plan.groups2,
    )


@T.macro
def multiply(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at):
    """The K loop of one tile; returns the sources of its rows. Role: math."""
    block, tile, expert = at
    s = plan.schedule
    tx = T.get_thread_binding()
    lane = tx % 32
    warp = (tx - 128 - wg * 128) // 32
    share = Share.of(s, 2, wg)
    units = share.units
    row_sets = len(units) if share.splits_columns else 1
    # Lane l holds row l % 16 of this warp, of the second row set in the upper half warp.
    metadata = RowMetadata(
        p.metadata,
        block * s.block_m
        + share.a_row[0]
        + (lane // 16) * (row_sets - 1) * 64
        + warp * 16
        + lane % 16,
    )
    scale_rows = tuple(
        tile * (s.linear2_block_n // 128) + h for h in sorted({*share.half[: len(units)]})
    )
    scale_of = tuple((q % len(scale_rows), q % len(scale_rows)) for q in (0, 1))
    scaled_k_loop(
        plan,
        shared.ring,
        cursor,
        acc,
        share,
        units,
        (plan.groups2, plan.recipe.scales_per_k_block),
        p.w2_sf,
        (expert, scale_rows, scale_of),
        metadata,
    )
    if plan.ring_wraps:
        # Any math thread behind the K loop: the tile's TMA reads are complete.
        if s.pingpong or wg == 0:
            if tx == 128 + wg * 128:
                barriers.add_release(p.workspace, plan.counter("l2_done") + block, 1)
    return metadata


@T.macro
def scatter(plan: Plan, p: Params, shared: Shared, acc, wg, at, metadata):
    """The rows of one tile, in BF16, to the tokens they came from. Role: math."""
    block, tile, expert = at
    s = plan.schedule
    tx = T.get_thread_binding()
    lane = tx % 32
    warp = (tx - 128 - wg * 128) // 32
    share = Share.of(s, 2, wg)
    units = share.units
    row_sets = len(units) if share.splits_columns else 1
    valid_rows = shared.total[expert] - (block - shared.first_block[expert]) * s.block_m
    # 16 rows x 64 columns a warp and pass, through the warp's own staging rows.
    staging = T.address_of(shared.staging[wg * 64 + warp * 16, 0])
    for q in units:
        column = tile * s.linear2_block_n + share.half[q] * 128
        for half in (0, 1):
            if half == 1:
                # Renames registers: only `left` has the order that `stage_rows` knows.
                for i, j in T.Parallel(64, 64):
                    acc.left[q][i, j] = acc.right[q][i, j]
            stage_rows(acc.left[q], staging)
            for step in (0, 1, 2, 3):
                row = step * 4 + lane // 8
                source = T.alloc_var("int32")
                source = T.shfl_sync(metadata.value[0], q % row_sets * 16 + row)
                if share.a_row[q] + warp * 16 + row < valid_rows:
                    store_row(
                        p.peers[source >> COUNTER_BITS]
                        + plan.offset("combine_acts")
                        + T.Cast("int64", source & ((1 << COUNTER_BITS) - 1))
                        * (plan.problem.hidden * ITEM_BYTES_BF16)
                        + (column + half * 64) * ITEM_BYTES_BF16,
                        staging,
                        row,
                    )
            T.sync_warp()
