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
from ..device.ring import Cursor, Ring, Shared
from ..schedule import BLOCK_K, COUNTER_BITS


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
    with_a, with_b = what
    s = plan.schedule
    if with_a:
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
    for k in T.serial(plan.groups2):
        ring.acquire(cursor)
        if with_a:
            T.tma_copy(
                p.l2_acts[
                    block * s.block_m : (block + 1) * s.block_m, k * BLOCK_K : (k + 1) * BLOCK_K
                ],
                ring.a[cursor.stage[0], :, :],
                barrier=ring.full[cursor.stage[0]],
                leader_scope_threads=32,
            )
            T.tma_copy(
                p.l2_acts_sf[k, block * s.block_m : (block + 1) * s.block_m],
                ring.a_sf[cursor.stage[0], :],
                barrier=ring.full[cursor.stage[0]],
                leader_scope_threads=32,
            )
        if with_b:
            for b in tuple(range(s.linear2_block_n // 128)):
                T.tma_copy(
                    p.w2[expert, tile * (s.linear2_block_n // 128) + b, k, :, :],
                    ring.b[cursor.stage[0], b * 128 : (b + 1) * 128, :],
                    barrier=ring.full[cursor.stage[0]],
                    leader_scope_threads=32,
                )
        ring.commit(cursor)
        cursor.advance()


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
