"""The operand ring and the other shared memory of a block.

buffer       arrivals on its barriers            who fills, who reads
ring.full    one a load warp, plus TMA bytes     load warps; both math warpgroups
ring.empty   8: one a math warp                  math warps, after their scale reads; load warps
row_bars     1, plus bulk-copy bytes             a lane of a dispatch warp, for itself

`empty` counts warps, not warpgroups: a warp that is done must not free a stage whose row scales
another warp of its warpgroup may still read.
"""

from __future__ import annotations

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from ..schedule import BLOCK_K, MATH_WARPS
from .plan import FP8, Plan


@T.meta_class
class Cursor:
    """Where a role stands in the ring: stage and parity.

    Carried, not derived from a step count: a modulo by a stage count that is no power of two costs
    a sixth of linear2 (821 -> 954 us at 49,152 rows, H200).
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


@T.meta_class
class Ring:
    """Staged operand tiles with a full and an empty barrier a stage."""

    def __init__(self, plan: Plan):
        s = plan.schedule
        self.stages = s.stages
        self.a = T.alloc_shared((s.stages, s.block_m, BLOCK_K), FP8)
        self.b = T.alloc_shared((s.stages, s.max_block_n, BLOCK_K), FP8)
        self.a_sf = T.alloc_shared((s.stages, s.block_m), "float32")
        self.full = T.alloc_barrier([s.load_warps] * s.stages)
        self.empty = T.alloc_barrier([MATH_WARPS] * s.stages)

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
        self.staging_fp8 = T.view(self.staging, (256, 64), FP8)
        T.annotate_layout({self.staging: make_swizzled_layout(self.staging)})
        self.amax = T.alloc_shared((2, 2, s.block_m), "float32")
        self.rows = T.alloc_shared((s.row_slots, plan.row_chunk), FP8)
        self.row_bars = T.alloc_barrier([1] * s.row_slots)
        self.tables = T.alloc_shared((problem.num_experts + 3 * local + 2,), "int32")
        self.counts = Table(self.tables, 0)
        self.total = Table(self.tables, problem.num_experts)
        self.first_block = Table(self.tables, problem.num_experts + local)
        self.first_row = Table(self.tables, problem.num_experts + 2 * local + 1)
