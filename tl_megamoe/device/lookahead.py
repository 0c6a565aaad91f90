"""A load warp's place in the walk: the tile that it loads, and the next, known before it is needed.

A block's first tile is that of its number; every other is claimed, by an add on `next_task`, so
that no block idles while another has tiles left. Claims are in the order of the walk, and a tile
waits only for tiles before it, so that the wait ends while all blocks are resident.

part of a tile's K blocks   warp      what it does beside the loads
its beginning               weights   claims the next tile
stages + 1, or the last     rows      reports the linear1 tile before this one (report.py)
a quarter                   weights   finds out which tile it has claimed
a half                      weights   and whose, and tells everyone (`Tasks`)
three quarters              rows      asks whether that tile's rows have arrived

Each of these takes up to 2000 clocks, a K block of the math warpgroups half as many, and a ring of
4 stages holds four: done one after the other they would empty it. The last does not come at a
tile's beginning: an acquire takes microseconds where memory is busy, and all blocks would let it
idle. A tile with two K loops has all of this in its first.

In a cluster (device/cluster.py) a fourth warp schedules: it claims when the weights warp begins a
tile, for both blocks at once, finds out the task and whose it is and tells everyone. The weights
warp only loads.
"""

from __future__ import annotations

import tilelang.language as T

from . import barriers, cluster, l2, walk
from .plan import Params, Plan
from .report import report, wait_first
from .ring import Cursor, Shared
from .walk import LINEAR1_BIT, block_of

LOOKAHEAD_CUDA = r"""
TLMM_DEV int tlmm_is_equal(const void* p, int want) { return tlmm_load_acquire(p) == want; }
// Not clock(), which has 64 bits where a start of 32 would be subtracted from it.
TLMM_DEV unsigned tlmm_clock() {
  unsigned now; asm volatile("mov.u32 %0, %%clock;" : "=r"(now) :: "memory"); return now; }
TLMM_DEV void tlmm_pause(unsigned clocks) {
  unsigned start = tlmm_clock(); while (tlmm_clock() - start < clocks) {} }
"""

START_CLOCKS = 2000
"""Between a block's first loads of weights: about a microsecond. Measured with 4 stages, which take
three of them, less than the first rows do; a deeper ring takes more."""


@T.meta_class
class Lookahead:
    """Of the tile that the warp loads:

    code: `walk.task_expression`, negative past the end.
    expert: its expert.
    rows: rows that its pool block holds.
    once: 1 when L2 need not keep its weights (l2.py).
    ready: 1 when its rows are known to be in the pool and may be loaded.
    is_first: 1 while it is the block's first.
    owed: the pool block of the linear1 tile before it, until that is reported; -1 when nothing is.
    reported: linear1 tiles that are.
    """

    def __init__(self, plan: Plan, p: Params, shared: Shared, grid_block, what):
        self.plan = plan
        self.p = p
        self.shared = shared
        self.tasks = shared.tasks
        self.loads_rows, self.loads_weights = what
        self.in_cluster = plan.schedule.cluster_size == 2
        self.publishes = self.loads_weights and not self.in_cluster
        self.pair = cluster.Pair(shared) if self.loads_weights and self.in_cluster else None
        self.reports = self.loads_rows and plan.runs("linear1") and not plan.schedule.pingpong
        self.place = Cursor(plan.schedule.task_slots, 0)
        self.first = grid_block
        self.index = T.alloc_var("int32", init=0)
        self.code = T.alloc_var("int32", init=0)
        self.expert = T.alloc_var("int32", init=0)
        self.rows = T.alloc_var("int32", init=0)
        self.once = T.alloc_var("int32", init=0)
        self.ready = T.alloc_var("int32", init=0)
        self.is_first = T.alloc_var("int32", init=0)
        self.owed = T.alloc_var("int32", init=-1)
        self.reported = T.alloc_var("int32", init=0)
        self.come = T.alloc_var("int32", init=0)
        self.next_code = T.alloc_var("int32", init=0)
        self.next_expert = T.alloc_var("int32", init=0)
        self.next_rows = T.alloc_var("int32", init=0)
        self.next_ready = T.alloc_var("int32", init=0)

    @T.inline
    def start(self):
        """Look up the block's first tile."""
        self.index[0] = self.first - self.plan.schedule.num_sms
        self.find()
        self.publish()
        self.ask()
        self.advance()
        self.is_first[0] = 1

    @T.inline
    def advance(self):
        """Go on to the next tile, and claim the one behind it."""
        self.is_first[0] = 0
        if self.reports:
            if self.code[0] >= LINEAR1_BIT:
                self.owed[0] = block_of(self.code[0])
        self.tasks.read(self.place, self.code, self.expert, self.rows)
        if self.pair is not None:
            self.pair.begin(self.tasks, self.place, self.code[0])
        self.place.advance()
        self.ready[0] = self.next_ready[0]
        if self.loads_weights:
            self.once[0] = T.Cast("int32", l2.reads_once(self.p, self.shared, self.expert[0]))
        if self.publishes:
            # Not behind the last tile: nobody would wait for that add before the counter is reset.
            if (T.get_thread_binding() % 32 == 0) & (self.code[0] >= 0):
                self.index[0] = barriers.fetch_add(
                    self.p.workspace, self.plan.counter("next_task"), 1
                )

    @T.inline
    def find(self):
        """Find out the next tile. The warp that loads weights."""
        if self.publishes:
            self.next_code[0] = walk.task_expression(
                self.plan,
                self.p,
                self.shared,
                T.shfl_sync(self.index[0], 0) + self.plan.schedule.num_sms,
            )

    @T.inline
    def publish(self):
        """Tell everyone of it. The warp that loads weights."""
        if self.publishes:
            self.next_expert[0] = walk.expert_expression(
                self.plan, self.shared, block_of(self.next_code[0])
            )
            self.next_rows[0] = self.plan.valid_rows(
                self.shared, block_of(self.next_code[0]), self.next_expert[0]
            )
            self.tasks.publish(
                self.place, self.next_code[0], self.next_expert[0], self.next_rows[0]
            )

    @T.inline
    def ask(self):
        """Find out whether the next tile's rows are there. The warp that loads rows."""
        if self.loads_rows:
            if not self.publishes:
                self.tasks.read(self.place, self.next_code, self.next_expert, self.next_rows)
            if self.plan.fused:
                self.next_ready[0] = 0
                if self.waits_for_tokens(self.next_code[0]):
                    self.next_ready[0] = self.is_equal(
                        "l1_arrival_count", self.next_code[0], self.plan.l1_arrival_target
                    )
                if (self.next_code[0] >> 30) == 0:
                    self.next_ready[0] = self.is_equal(
                        "l2_arrival", self.next_code[0], self.plan.l2_arrival_target
                    )
                if self.next_ready[0] == 1:
                    barriers.fence_async()

    @T.inline
    def report_before(self):
        """Report the linear1 tile before this one, if that is still to be done."""
        if self.reports:
            if self.owed[0] >= 0:
                self.reported[0] = self.reported[0] + 1
                report(
                    self.shared,
                    self.reported[0],
                    self.counter("l2_arrival", self.owed[0]),
                    self.plan.warpgroups_a_tile,
                )
                self.owed[0] = -1

    def counter(self, name: str, block):
        """A counter of a pool block."""
        return self.p.workspace[self.plan.counter(name) + block]

    @T.inline
    def wait_for(self, name: str, target, of_block, tag, block, tile):
        """Wait until a counter of pool block `of_block` has come to `target`, bounded. Meanwhile
        the tile before this one is reported: others may wait for it, and this wait for them."""
        self.come[0] = 0
        if self.reports:
            if self.owed[0] >= 0:
                self.come[0] = wait_first(
                    self.counter(name, of_block), target, self.shared, self.reported[0] + 1
                )
                if self.come[0] == 0:
                    self.report_before()
        if self.come[0] == 0:
            barriers.wait_equal(
                self.p,
                self.plan.counter(name) + of_block,
                target,
                tag,
                block,
                self.expert[0],
                tile,
            )

    def waits_for_tokens(self, code):
        """Whether a task is linear1's and its rows come through the pool, traced."""
        is_linear1 = code >= LINEAR1_BIT
        return is_linear1 & T.Not(self.plan.is_few(self.p)) if self.plan.gathers else is_linear1

    def is_equal(self, counter, code, want):
        """Whether a counter of a task's pool block has come to `want`, as 0 or 1."""
        at = self.counter(counter, block_of(code))
        return T.call_extern("int32", "tlmm_is_equal", T.address_of(at), want)

    @T.inline
    def wait_for_rows(self, counter, target, tag, block, tile):
        """Wait until the tile's rows are in the pool, unless that is known."""
        if self.plan.fused:
            if self.ready[0] == 0:
                self.wait_for(counter, target, block, tag, block, tile)
                # Pairs with the writers' fences: plain and bulk stores of other blocks, our bulk
                # loads.
                barriers.fence_async()

    @T.inline
    def hold_back(self, k):
        """Before K block `k` of a tile's weights. The ring is filled for the first time while
        tokens come, by a chain of small accesses, each of which would queue in memory behind the
        weights that all blocks ask for: so they ask for one stage after the other. Not the warp
        that loads rows too, which has waited for the tokens, and not where rows are gathered, which
        is one access."""
        if self.loads_weights and not self.loads_rows and self.plan.fused:
            if self.holds_back(k):
                T.call_extern("handle", "tlmm_pause", START_CLOCKS)

    def holds_back(self, k):
        """Whether K block `k` is one of those, traced."""
        plan = self.plan
        held = (self.is_first[0] == 1) & (k > 0) & (k < plan.schedule.stages)
        return held & T.Not(plan.is_few(self.p)) if plan.gathers else held

    @T.inline
    def beside(self, k, num_k: int):
        """Part of the loop over a tile's K blocks, behind the loads of K block `k`."""
        # The stage that comes next was K block 1's, under whose first product math warps count the
        # tile before: they have. With fewer K blocks this may wait for them.
        if k == min(self.plan.schedule.stages + 1, num_k - 1):
            self.report_before()
        if self.publishes:
            if k == num_k // 4:
                self.find()
            if k == num_k // 2:
                self.publish()
        if self.loads_rows:
            if k == num_k * 3 // 4:
                self.ask()
