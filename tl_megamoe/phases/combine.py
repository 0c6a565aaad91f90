"""Combine: y[token] = sum over its slots of combine_acts[slot, token], FP32, rounded once to BF16.

role             warps    work
math             4 + 4    wait until every block's rows are written, then one (token, column chunk)
                          a warp, whose rows are asked for while those of the one before are added
dispatch, load   4        meanwhile zero the counters and drop what L2 need not keep

barrier         arrivals                meaning
MATH            256                     all tiles of this block are scattered
BLOCK           384                     all rows are there, for all roles; of a phase alone, before
                                        that, this block's are
combine_sync    one a block             all rows are in combine_acts (gpu scope, never reset)
combine_signal  one a launch and peer   all rows of the peer are there (system scope, never reset)

Slots are added in slot order, so y does not depend on the schedule or on which block ran a tile.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers, l2, trace
from ..device.plan import ITEM_BYTES_BF16, Params, Plan
from ..device.ring import Shared

COMBINE_CUDA = r"""
// Read here, not where it is used: a plain load may be moved behind the barrier in between.
TLMM_DEV long long tlmm_load_now(const void* p) {
  long long v; asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
"""
LANE_COLUMNS = 8
"""Columns of one 16-byte BF16 load."""
OTHER_REGISTERS = 72
"""Of a math thread, those that hold no rows or experts while it combines."""


def items_in_flight(hidden: int, num_topk: int, math_registers: int) -> tuple[int, int]:
    """Items of a warp that are under way at once, and vectors of a lane in each.

    A slot takes four registers a vector and two for its expert.
    """
    for items, vectors in ((2, 2), (2, 1)):
        fits = items * num_topk * (4 * vectors + 2) <= math_registers - OTHER_REGISTERS
        if fits and (vectors == 1 or hidden % (2 * 32 * LANE_COLUMNS) == 0):
            return items, vectors
    return 1, 1


def _load_now(tensor, *index):
    return T.call_extern("int64", "tlmm_load_now", T.address_of(tensor[index]))


def _column(item, chunks: int, width: int, lane):
    """First column of a lane. An expression, not a bound name: the vectoriser must see it is a
    multiple of 8, else it falls back to 2-byte accesses."""
    return item % chunks * width + lane * LANE_COLUMNS


@T.meta_class
class Item:
    """One token's slots in a column chunk, of one warp: asked for by `load_experts` and
    `load_rows`, added by `store`.

    Attributes:
        rows: a lane's vectors, by vector and slot; of an unused slot whatever is there.
        expert: of each slot.
    """

    def __init__(self, plan: Plan, p: Params, vectors: int):
        hidden, lanes = plan.problem.hidden, 32 * LANE_COLUMNS
        self.plan = plan
        self.p = p
        self.topk = plan.problem.num_topk
        self.lanes = lanes
        self.vectors = vectors
        self.width = lanes * vectors
        self.chunks = (hidden + self.width - 1) // self.width
        self.lane = T.get_thread_binding() % 32
        self.rows = T.alloc_local((self.topk * self.vectors, LANE_COLUMNS), "bfloat16")
        self.expert = T.alloc_local((self.topk,), "int64")

    def is_inside(self, item):
        """Whether there is such an item and the lane has columns of it."""
        inside = item < self.p.num_tokens * self.chunks
        if self.plan.problem.hidden % self.width:
            column = _column(item, self.chunks, self.width, self.lane)
            inside &= column < self.plan.problem.hidden
        return inside

    @T.inline
    def load_experts(self, item):
        if self.is_inside(item):
            for slot in T.unroll(self.topk):
                self.expert[slot] = _load_now(self.p.topk_idx, item // self.chunks, slot)

    @T.inline
    def load_rows(self, acts, item):
        """Ask for all rows before the first is waited for."""
        if self.is_inside(item):
            for r in T.unroll(self.topk * self.vectors):
                for u in T.vectorized(LANE_COLUMNS):
                    self.rows[r, u] = acts[
                        r % self.topk,
                        item // self.chunks,
                        _column(item, self.chunks, self.width, self.lane)
                        + r // self.topk * self.lanes
                        + u,
                    ]

    @T.inline
    def store(self, item, total, rounded):
        """Add the slots and write their sum; `total` and `rounded` hold a vector each."""
        hidden, num_experts = self.plan.problem.hidden, self.plan.problem.num_experts
        if self.is_inside(item):
            for v in T.unroll(self.vectors):
                for u in T.unroll(LANE_COLUMNS):
                    total[u] = 0.0
                for slot in T.unroll(self.topk):
                    for u in T.unroll(LANE_COLUMNS):
                        total[u] += T.if_then_else(
                            (self.expert[slot] >= 0) & (self.expert[slot] < num_experts),
                            T.Cast("float32", self.rows[v * self.topk + slot, u]),
                            T.float32(0.0),
                        )
                for u in T.unroll(LANE_COLUMNS):
                    rounded[u] = T.Cast("bfloat16", total[u])
                y_row = T.make_tensor_from_addr(
                    self.p.y_address
                    + T.Cast("int64", item // self.chunks) * (hidden * ITEM_BYTES_BF16),
                    (hidden,),
                    "bfloat16",
                )
                for u in T.vectorized(LANE_COLUMNS):
                    y_row[
                        _column(item, self.chunks, self.width, self.lane) + v * self.lanes + u
                    ] = rounded[u]

    @T.inline
    def drop(self, acts, item):
        """Drop the rows from L2: nobody reads them again. All lanes have added theirs."""
        lanes_a_line = l2.LINE_BYTES // (LANE_COLUMNS * ITEM_BYTES_BF16)
        T.sync_warp()
        if self.is_inside(item):
            if self.lane % lanes_a_line == 0:
                # Not a Python loop: with a number for the slot an offset may not fit 32 bits.
                for r in T.unroll(self.topk * self.vectors):
                    l2.drop_line(
                        acts[
                            r % self.topk,
                            item // self.chunks,
                            _column(item, self.chunks, self.width, self.lane)
                            + r // self.topk * self.lanes,
                        ]
                    )


@T.macro
def wait_for_rows(plan: Plan, p: Params):
    """Every tile of every block of every rank is done and visible. Role: math, 256 threads; the
    dispatch and load warps wait at the last barrier here in `reset_counters`."""
    if not plan.fused:
        # Of a phase alone nobody waits for rows or reports, and counters are zeroed behind the
        # barrier of the grid: those of this block are there.
        barriers.sync(barriers.BLOCK, plan.schedule.threads)
    barriers.sync(barriers.MATH, 256)
    if plan.problem.num_ranks > 1:
        if T.get_thread_binding() < 160:
            barriers.rank_sync(plan, p, "combine", barriers.TAG_COMBINE_PEER, send_counts=False)
    else:
        if T.get_thread_binding() == 128:
            barriers.grid_sync(plan, p, "combine_sync", barriers.TAG_COMBINE_SYNC)
    barriers.sync(barriers.BLOCK, plan.schedule.threads)


@T.meta_class
class Combine:
    """Sums the slots of every token of this rank. Role: math (each warpgroup calls it).

    What does not depend on the rows is read before they are waited for.
    """

    def __init__(self, plan: Plan, p: Params, grid_block, wg):
        self.plan = plan
        self.p = p
        self.stride = plan.schedule.num_sms * 8
        self.first_item = grid_block * 8 + wg * 4 + (T.get_thread_binding() - 128 - wg * 128) // 32
        problem = plan.problem
        self.items, vectors = items_in_flight(
            problem.hidden, problem.num_topk, plan.schedule.math_registers
        )
        self.first = Item(plan, p, vectors)
        self.second = Item(plan, p, vectors) if self.items == 2 else None
        self.item = T.alloc_var("int32")
        self.base = T.alloc_var("int64")
        self.total = T.alloc_local((LANE_COLUMNS,), "float32")
        self.rounded = T.alloc_local((LANE_COLUMNS,), "bfloat16")

    @T.inline
    def prepare(self):
        """Before `wait_for_rows`."""
        self.item[0] = self.first_item
        self.base[0] = _load_now(self.p.peers, self.p.rank)
        self.first.load_experts(self.item[0])

    @T.inline
    def run(self):
        """Behind `wait_for_rows`. The rows of a warp's next item are on their way while those of
        this one are added."""
        section = self.plan.layout.sections["combine_acts"]
        acts = T.make_tensor_from_addr(self.base[0] + section.offset, section.shape, section.dtype)
        self.first.load_rows(acts, self.item[0])
        while self.item[0] < self.p.num_tokens * self.first.chunks:
            if self.items == 2:
                self.second.load_experts(self.item[0] + self.stride)
                self.second.load_rows(acts, self.item[0] + self.stride)
            self.first.store(self.item[0], self.total, self.rounded)
            if self.plan.fused:
                if self.p.evict_first == 1:
                    self.first.drop(acts, self.item[0])
            self.item[0] = self.item[0] + self.items * self.stride
            self.first.load_experts(self.item[0])
            self.first.load_rows(acts, self.item[0])
            if self.items == 2:
                self.second.store(self.item[0] - self.stride, self.total, self.rounded)
                if self.plan.fused:
                    if self.p.evict_first == 1:
                        self.second.drop(acts, self.item[0] - self.stride)


@T.macro
def wait_beside(plan: Plan, p: Params):
    """Every tile of every block of every rank is done. Role: dispatch and load, 128 threads, where
    the math warpgroups are in `wait_for_rows`."""
    T.sync_warp()
    if not plan.fused:
        barriers.sync(barriers.BLOCK, plan.schedule.threads)
    barriers.sync(barriers.BLOCK, plan.schedule.threads)
    trace.mark(plan, p, trace.COMBINE_WAIT)


@T.macro
def reset_counters(plan: Plan, p: Params, shared: Shared, grid_block):
    """Zero what this launch counted, behind the last barrier: the next one needs no memset. Role:
    dispatch and load, 128 threads, while the math warpgroups combine."""
    num_sms, threads = plan.schedule.num_sms, plan.schedule.role_threads
    tx = T.get_thread_binding()
    i = T.alloc_var("int32")
    i = grid_block * threads + tx
    while i < shared.first_block[plan.problem.num_local_experts]:
        for counter in ("l1_arrival_count", "l2_arrival", "l2_done"):
            p.workspace[plan.counter(counter) + i] = 0
        i += num_sms * threads
    if (grid_block == 0) & (tx == 0):
        p.workspace[plan.counter("next_task")] = 0
    if plan.fused:
        l2.drop_pools(plan, p, shared, grid_block * threads + tx, num_sms * threads)
    i = grid_block * threads + tx
    while i < plan.problem.num_experts:
        p.workspace[plan.counter("expert_send_count") + i] = 0
        i += num_sms * threads
    trace.mark(plan, p, trace.RESET)
