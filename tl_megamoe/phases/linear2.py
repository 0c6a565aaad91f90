"""Linear2: intermediate rows @ down weights, BF16 rows scattered to their tokens' ranks.

A tile is (pool block, linear2_block_n output columns).

role   warps      work
load   1 or 2     A: wait for the block's linear1 tiles, TMA codes and scales; B: TMA weights
math   4 + 4      K loop, BF16 rows to combine_acts[slot, token] of the source rank

barrier                  arrivals                    meaning
l2_arrival[block]        2 a linear1 tile            the block's intermediate rows are in the pool
ring.full, ring.empty    see device/ring.py          a K block is there, is read

Rows past the expert's count are computed and dropped. The routing weight is part of the stored
scale (recipe.py), so a row is written as it is and combine only adds.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers
from ..device.matmul import scaled_k_loop
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
            )
        # Pairs with linear1's fence after its stores.
        barriers.fence_async()
        T.sync_warp()
    fill(
        ring,
        cursor,
        what,
        p.l2_acts,
        p.l2_acts_sf,
        block * s.block_m,
        s.block_m,
        p.w2,
        (expert, tile * (s.linear2_block_n // 128), s.linear2_block_n // 128),
        plan.groups2,
    )


@T.macro
def multiply_and_scatter(plan: Plan, p: Params, shared: Shared, cursor: Cursor, acc, wg, at):
    """One tile: K loop, then its rows to the tokens they came from. Role: math."""
    block, tile, expert = at
    s = plan.schedule
    tx = T.get_thread_binding()
    lane = tx % 32
    warp = (tx - 128 - wg * 128) // 32
    columns_split = s.linear2_block_n == 256
    units = tuple(range(s.m_halves)) if columns_split else (0,)
    first_row = 0 if columns_split else wg * 64
    # Lane l holds row l % 16 of this warp, of the second unit in the upper half warp.
    metadata = RowMetadata(
        p.metadata,
        block * s.block_m
        + first_row
        + (lane // 16) * (len(units) - 1) * 64
        + warp * 16
        + lane % 16,
    )
    scaled_k_loop(
        shared.ring,
        cursor,
        acc,
        units,
        (0, 64) if columns_split else (wg * 64,),
        wg * 128 if columns_split else 0,
        plan.groups2,
        p.w2_sf,
        (expert, tile * 2 + wg if columns_split else tile, None),
        metadata,
    )
    valid_rows = shared.total[expert] - (block - shared.first_block[expert]) * s.block_m
    column = tile * s.linear2_block_n + (wg * 128 if columns_split else 0)
    # 16 rows x 64 columns a warp and pass, through the warp's own staging rows.
    for q in units:
        for half in (0, 1):
            T.copy((acc.left, acc.right)[half][q], shared.staging[wg * 64 : wg * 64 + 64, :])
            T.sync_warp()
            for step in (0, 1, 2, 3):
                row = warp * 16 + step * 4 + lane // 8
                source = T.alloc_var("int32")
                source = T.shfl_sync(metadata.value[0], q * 16 + step * 4 + lane // 8)
                if first_row + q * 64 + row < valid_rows:
                    to = T.make_tensor_from_addr(
                        p.peers[source >> COUNTER_BITS]
                        + plan.offset("combine_acts")
                        + T.Cast("int64", source & ((1 << COUNTER_BITS) - 1))
                        * (plan.problem.hidden * ITEM_BYTES_BF16),
                        (plan.problem.hidden,),
                        "bfloat16",
                    )
                    for u in T.vectorized(8):
                        to[column + half * 64 + lane % 8 * 8 + u] = shared.staging[
                            wg * 64 + row, lane % 8 * 8 + u
                        ]
            T.sync_warp()
