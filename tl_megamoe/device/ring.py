"""The operand ring and the other shared memory of a block.

buffer       arrivals on its barriers            who fills, who reads
ring.full    one a load warp, plus TMA bytes     load warps; both math warpgroups
ring.empty   one a math warp of a tile           math warps, after their scale reads; load warps
row_bars     1, plus bulk-copy bytes             a lane of a dispatch warp, for itself

`empty` counts warps, not warpgroups: a warp that is done must not free a stage whose row scales
another warp of its warpgroup may still read.
"""

from __future__ import annotations

import tilelang.language as T

from ..schedule import BLOCK_K
from .plan import FP8, Plan


@T.meta_class
class Cursor:
    """Where a role stands in the ring: stage and parity.

    Carried, not derived from a step count: in the K loop a modulo by a stage count that is no power
    of two costs as much as several of its instructions.
    """

    def __init__(self, stages: int, parity: int):
        self.stages = stages
        self.stage = T.alloc_var("int32", init=0)
        self.parity = T.alloc_var("int32", init=parity)

    @T.inline
    def advance(self):
        self.parity[0] = T.if_then_else(
            self.stage[0] == self.stages - 1, self.parity[0] ^ 1, self.parity[0]
        )
        self.stage[0] = T.if_then_else(self.stage[0] == self.stages - 1, 0, self.stage[0] + 1)

    @T.inline
    def skip(self, count):
        """Pass over `count` K blocks that another role handles; a Python int."""
        self.stage[0] = self.stage[0] + count % self.stages
        self.parity[0] = T.if_then_else(
            self.stage[0] >= self.stages,
            self.parity[0] ^ (1 - count // self.stages % 2),
            self.parity[0] ^ (count // self.stages % 2),
        )
        self.stage[0] = T.if_then_else(
            self.stage[0] >= self.stages, self.stage[0] - self.stages, self.stage[0]
        )


@T.meta_class
class Ring:
    """Staged operand tiles with a full and an empty barrier a stage."""

    def __init__(self, plan: Plan):
        s = plan.schedule
        self.stages = s.stages
        self.a = T.alloc_shared((s.stages, s.block_m, BLOCK_K), FP8)
        # Blocks of 128 rows, as they arrive: with 64-column scales a stage is stored in two halves
        # of K, and a copy of half its rows would not be contiguous.
        self.b = T.alloc_shared((s.stages, s.max_block_n // 128, 128, BLOCK_K), FP8)
        self.a_sf = T.alloc_shared((s.stages, plan.recipe.scales_per_k_block, s.block_m), "float32")
        self.full = T.alloc_barrier([s.load_warps] * s.stages)
        self.empty = T.alloc_barrier([s.tile_warps] * s.stages)

    @T.inline
    def acquire(self, cursor):
        T.mbarrier_wait_parity(self.empty[cursor.stage[0]], cursor.parity[0])

    @T.inline
    def commit(self, cursor):
        if T.shuffle_elect(32):
            T.mbarrier_arrive(self.full[cursor.stage[0]])

    @T.inline
    def wait(self, cursor):
        T.mbarrier_wait_parity(self.full[cursor.stage[0]], cursor.parity[0])

    @T.inline
    def release(self, cursor):
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[cursor.stage[0]])


@T.macro
def fill(ring, cursor, what, acts, acts_sf, rows, weights, at, num_k):
    """Fill the ring with the K blocks of one tile. Role: load, one warp.

    Args:
        ring: where the operands go.
        cursor: this warp's place in the ring.
        what: (rows too, weights too), Python bools: one warp may load both.
        acts: pool (rows, K) e4m3.
        acts_sf: its scales (K/128 x scales of a K block, rows) float32.
        rows: (first row of the tile in memory, number of rows, scales of a K block).
        weights: pre-tiled (experts, N/128, K/128, 128, 128) e4m3.
        at: (expert, first block of 128 weight rows, number of such blocks).
        num_k: K blocks.
    """
    with_a, with_b = what
    row, block_m, scales = rows
    expert, first_block, num_blocks = at
    for k in T.serial(num_k):
        ring.acquire(cursor)
        if with_a:
            T.tma_copy(
                acts[row : row + block_m, k * BLOCK_K : (k + 1) * BLOCK_K],
                ring.a[cursor.stage[0], :, :],
                barrier=ring.full[cursor.stage[0]],
                leader_scope_threads=32,
            )
            for group in tuple(range(scales)):
                T.tma_copy(
                    acts_sf[k * scales + group, row : row + block_m],
                    ring.a_sf[cursor.stage[0], group, :],
                    barrier=ring.full[cursor.stage[0]],
                    leader_scope_threads=32,
                )
        if with_b:
            for b in tuple(range(num_blocks)):
                T.tma_copy(
                    weights[expert, first_block + b, k, :, :],
                    ring.b[cursor.stage[0], b, :, :],
                    barrier=ring.full[cursor.stage[0]],
                    leader_scope_threads=32,
                )
        ring.commit(cursor)
        cursor.advance()


class Table:
    """A run of the shared table: `table[i]` reads, `shared.tables[table.at(i)] = v` writes.

    TileLang starts every shared buffer at a multiple of 1 KiB, so small tables share one buffer.
    """

    def __init__(self, tables, offset: int):
        self.tables = tables
        self.offset = offset

    def at(self, index):
        return self.offset + index

    def __getitem__(self, index):
        return self.tables[self.at(index)]


@T.meta_class
class Shared:
    """Everything a block keeps in shared memory; Schedule.smem_buffers counts the same.

    table          entries               holds
    counts         experts               this block's routes, then received counts by source rank
    total          local experts         rows received
    first_block    local experts + 1     first pool block, number of blocks at the end
    first_row      local experts + 1     first received row, number of rows at the end
    """

    def __init__(self, plan: Plan):
        problem, s = plan.problem, plan.schedule
        local = problem.num_local_experts
        self.ring = Ring(plan)
        self.staging = T.alloc_shared((128, 64), "bfloat16")
        self.amax = T.alloc_shared((2, 2, s.block_m), "float32")
        self.rows = T.alloc_shared((s.row_slots, plan.row_chunk), FP8)
        self.row_bars = T.alloc_barrier([1] * s.row_slots)
        self.tables = T.alloc_shared((problem.num_experts + 3 * local + 2,), "int32")
        self.counts = Table(self.tables, 0)
        self.total = Table(self.tables, problem.num_experts)
        self.first_block = Table(self.tables, problem.num_experts + local)
        self.first_row = Table(self.tables, problem.num_experts + 2 * local + 1)
