"""Few rows straight from their tokens: no pool, no dispatch warp and nothing to wait for.

With few routes every block knows them all (phases/dispatch.py), so it can load the rows of a linear1
tile from `x` itself. Through the pool they took a chain of some 5 us before the first product: to
shared memory, to the pool, fences, a release, another block's acquire. A tile of swapped operands
has few rows, and a warp's asynchronous copies of 16 bytes bring them with their swizzle.

role   warps   work
load   1       A: rows and their scales by cp.async; they arrive on ring.full beside the warp
math   4 + 4   a fence before the first product of a K block; weights and targets by route

Whole launches do so or do not: `Plan.gathers` is about the program, `Plan.is_few` about the launch.
"""

from __future__ import annotations

import tilelang.language as T

from ..device.plan import Params, Plan
from .dispatch import ENTRY_ROUTES

GATHER_CUDA = r"""
// One K block of a tile with few rows: 128 bytes and a scale of each row's token into a stage, 16-byte chunks swizzled by
// row. One warp, whose lanes' copies arrive on `full` when they are done (each adds its own arrival before).
template <int TOPK, int HIDDEN>
TLMM_DEV void tlmm_gather(const int* entries, int rows, long long x, long long x_sf, int k, void* acts, void* acts_sf,
                          void* full) {
  unsigned lane = tlmm_lane(), to = tlmm_smem(acts), sf = tlmm_smem(acts_sf), chunk = lane & 7;
  for (int row = (int)(lane >> 3); row < rows; row += 4) {
    int token = entries[row] % TLMM_ENTRY_ROUTES / TOPK;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
      :: "r"(to + row * 128 + ((chunk ^ row & 7) << 4)), "l"(x + (long long)token * HIDDEN + k * 128 + chunk * 16)
      : "memory"); }
  for (int row = (int)lane; row < rows; row += 32) {
    int token = entries[row] % TLMM_ENTRY_ROUTES / TOPK;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
      :: "r"(sf + row * 4), "l"(x_sf + ((long long)token * (HIDDEN / 128) + k) * 4) : "memory"); }
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" :: "r"(tlmm_smem(full)) : "memory");
  __syncwarp(); }
"""


@T.meta_class
class TokenRows:
    """Rows and scales of a linear1 tile, from their tokens.

    The pool's row and the padded number of rows, which `start` gets, do not matter.

    Attributes:
        first: the entry of the tile's first row in `shared.routes`.
        valid: rows that its block holds, and more where other blocks of the expert follow.
    """

    def __init__(self, plan: Plan, p: Params, shared, block, expert, valid):
        self.plan = plan
        self.p = p
        self.shared = shared
        self.first = first_entry(plan, shared, block, expert)
        self.valid = T.min(valid, plan.schedule.block_m)

    @T.inline
    def start(self, ring, cursor, row, num_rows, k):
        plan, p = self.plan, self.p
        T.call_extern(
            "handle",
            f"tlmm_gather<{plan.problem.num_topk}, {plan.problem.hidden}>",
            T.address_of(self.shared.routes[self.first]),
            self.valid,
            p.peers[0] + plan.offset("x"),
            p.peers[0] + plan.offset("x_sf"),
            k,
            T.address_of(ring.a[cursor.stage[0], 0, 0]),
            T.address_of(ring.a_sf[cursor.stage[0], 0, 0]),
            T.address_of(ring.full[cursor.stage[0]]),
        )


def first_entry(plan: Plan, shared, block, expert):
    """Where the rows of a pool block begin in `shared.routes`."""
    return shared.first_row[expert] + (block - shared.first_block[expert]) * plan.schedule.block_m


def route_of(plan: Plan, shared, at, row):
    """The route of a row of a tile, `at` = (block, tile, expert, valid rows); of a row behind them
    that of the last."""
    block, _, expert, valid = at
    entry = shared.routes[first_entry(plan, shared, block, expert) + T.min(row, valid - 1)]
    return entry % ENTRY_ROUTES
