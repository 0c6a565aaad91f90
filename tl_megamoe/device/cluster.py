"""Two blocks of a cluster that multiply the same weights: each brings half of them to both.

With `Schedule.cluster_size` 2 neighbouring blocks of the grid claim two tasks that follow each
other in the walk. Where both multiply the same 256 weight rows, each loads 128 of them, by
multicast, into both blocks' rings: a third less moves from L2 to shared memory than when each loads
all. Where they do not, each loads its own.

The warps that load weights agree on every stage of a shared tile: each tells the other one, not all
math warps of both blocks, that its stage is free. They do nothing else: a block's fourth warp finds
out what comes next (`Scheduler`), since a warp that stands still for 2000 clocks would stop two
blocks.

barrier            arrivals                        meaning
meet[stage]        1, of the other block           the other block's stage is free too
begun              1, of the weights warp          a tile has begun: the next may be claimed
claim_full[slot]   1 and 4 bytes                   the first block has claimed for both (block 1)
claim_free[slot]   1, of the other block           the slot may be written anew (block 0)

Nobody leaves before both blocks are done (`sync`): until then the other one may write here.

A stage of a shared tile is filled when both blocks have freed it, so a block may be held up by its
neighbour, which waits for other blocks' tiles. Those come before its own in the walk, and only the
tile just before may be this very block's. Then the two have different phases and the wave is a
single pool block, so that the pair behind shares weights only if that block has one linear2 tile,
which `Schedule.violations` rules out: with it the host model found a circle.
"""

from __future__ import annotations

import tilelang.language as T

from ..shared_memory import CLAIM_SLOTS
from . import barriers, walk
from .plan import Params, Plan
from .ring import Cursor, Shared, cluster_rank
from .walk import LINEAR1_BIT, block_of

CLUSTER_CUDA = r"""
// All threads of both blocks; each orders memory among them.
TLMM_DEV void tlmm_cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
TLMM_DEV int tlmm_cluster_rank() { int r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
TLMM_DEV unsigned tlmm_of_block(const void* s, int rank) {
  unsigned at; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(tlmm_smem(s)), "r"(rank)); return at; }
TLMM_DEV void tlmm_arrive_other(const void* bar, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(tlmm_of_block(bar, rank ^ 1)) : "memory"); }
// Of a stage that is free here: it is free in the other block too. One warp; flips the stage's bit of `phases`.
TLMM_DEV void tlmm_meet(const void* bar, int stage, int rank, int* phases) {
  if (tlmm_lane() == 0) tlmm_arrive_other(bar, rank);
  tlmm_wait_full(tlmm_smem(bar), *phases >> stage & 1);
  *phases ^= 1 << stage; }
TLMM_DEV void tlmm_load_both(void* s, const void* from, unsigned n, void* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
    :: "r"(tlmm_smem(s)), "l"(from), "r"(n), "r"(tlmm_smem(bar)), "h"((short)3) : "memory"); }
TLMM_DEV int tlmm_shares(const void* entry) {
  int v; asm volatile("ld.shared.b32 %0, [%1 + 12];" : "=r"(v) : "r"(tlmm_smem(entry)) : "memory"); return v; }
// A number from block 0 to block 1. One warp each.
TLMM_DEV void tlmm_send_claim(int value, const void* word, const void* full, const void* free, int parity) {
  if (tlmm_lane() == 0) {
    tlmm_wait_full(tlmm_smem(free), parity);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
      :: "r"(tlmm_of_block(word, 1)), "r"(value), "r"(tlmm_of_block(full, 1)) : "memory"); }
  __syncwarp(); }
TLMM_DEV int tlmm_receive_claim(const void* word, const void* full, const void* free, int parity) {
  if (tlmm_lane() == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4;" :: "r"(tlmm_smem(full)) : "memory");
  __syncwarp();
  tlmm_wait_full(tlmm_smem(full), parity);
  int v; asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(v) : "r"(tlmm_smem(word)) : "memory");
  __syncwarp();
  if (tlmm_lane() == 0) tlmm_arrive_other(free, 1);
  return v; }
"""


@T.macro
def sync(plan: Plan):
    """Both blocks of a cluster are here, if there are two. All threads."""
    if plan.schedule.cluster_size == 2:
        T.call_extern("handle", "tlmm_cluster_sync")


@T.meta_class
class Claims:
    """What block 0 claims for both. The warp that schedules, of both."""

    def __init__(self, shared: Shared):
        self.shared = shared
        self.turn = T.alloc_var("int32", init=0)

    def slot(self):
        shared, at = self.shared, self.turn[0] % CLAIM_SLOTS
        return (
            T.address_of(shared.tables[shared.claims.at(at)]),
            T.address_of(shared.claim_full[at]),
            T.address_of(shared.claim_free[at]),
        )

    def parity(self):
        return self.turn[0] // CLAIM_SLOTS % 2

    def send(self, index):
        """Tell block 1, in block 0; `next` behind it."""
        return T.call_extern("handle", "tlmm_send_claim", index, *self.slot(), self.parity() ^ 1)

    def receive(self):
        """What comes next, in block 1; `next` behind it."""
        return T.call_extern("int32", "tlmm_receive_claim", *self.slot(), self.parity())

    @T.inline
    def next(self):
        self.turn[0] = self.turn[0] + 1


@T.meta_class
class Pair:
    """The other block of the cluster, as the warp that loads weights knows it.

    Attributes:
        shares: 1 while the tile's weights are both blocks'.
        phases: of each stage's `meet`, a bit.
    """

    def __init__(self, shared: Shared):
        self.shared = shared
        self.shares = T.alloc_var("int32", init=0)
        self.phases = T.alloc_var("int32", init=0)

    @T.inline
    def begin(self, tasks, place, code):
        """The tile at `place` has been read: the one behind it may be claimed."""
        self.shares[0] = tasks.shares(place)
        if code >= 0:
            if T.shuffle_elect(32):
                T.mbarrier_arrive(self.shared.begun[0])

    @T.inline
    def meet(self, stage):
        """The stage, which is free here, is free in both blocks."""
        T.call_extern(
            "handle",
            "tlmm_meet",
            T.address_of(self.shared.meet[stage]),
            stage,
            cluster_rank(),
            T.address_of(self.phases),
        )

    def load(self, to, source, num_bytes: int, barrier):
        """Start a bulk copy into the same place of both blocks."""
        return T.call_extern(
            "handle",
            "tlmm_load_both",
            T.address_of(to),
            T.address_of(source),
            num_bytes,
            T.address_of(barrier),
        )


@T.meta_class
class Scheduler:
    """Finds out one tile after the other, and tells everyone (`Tasks`). One warp of each block.

    Attributes:
        near: which tiles before and behind this one have the same weights.
        ahead: K blocks that this block has been given more than the other one: a tile of linear1
            where the other had one of linear2. Weights go to the same stage of both blocks, so
            tiles are shared only where that is the next of both.
    """

    def __init__(self, plan: Plan, p: Params, shared: Shared, grid_block):
        self.plan = plan
        self.p = p
        self.shared = shared
        self.grid_block = grid_block
        self.tasks = shared.tasks
        self.claims = Claims(shared)
        self.place = Cursor(plan.schedule.task_slots, 0)
        self.begun = T.alloc_var("int32", init=0)
        self.index = T.alloc_var("int32")
        self.code = T.alloc_var("int32")
        self.expert = T.alloc_var("int32")
        self.other = T.alloc_var("int32")
        self.near = T.alloc_var("int32", init=0)
        self.ahead = T.alloc_var("int32", init=0)

    @T.inline
    def run(self):
        self.index[0] = self.grid_block - cluster_rank()
        self.publish()
        # Not behind the last tile: nobody would wait for that add before the counter is reset.
        while self.code[0] >= 0:
            T.mbarrier_wait_parity(self.shared.begun[0], self.begun[0])
            self.begun[0] = self.begun[0] ^ 1
            self.claim()
            self.publish()

    @T.inline
    def claim(self):
        """The next two positions of the walk."""
        if cluster_rank() == 0:
            if T.get_thread_binding() % 32 == 0:
                self.index[0] = (
                    barriers.fetch_add(self.p.workspace, self.plan.counter("next_task"), 2)
                    + self.plan.schedule.num_sms
                )
            self.index[0] = T.shfl_sync(self.index[0], 0)
            self.claims.send(self.index[0])
        else:
            self.index[0] = self.claims.receive()
        self.claims.next()

    @T.inline
    def publish(self):
        """Find out this block's task of the two, and publish it."""
        plan, p, shared = self.plan, self.p, self.shared
        self.code[0] = walk.task_expression(plan, p, shared, self.index[0] + cluster_rank())
        self.near[0] = 0
        if walk.walks_pairs(plan, p, shared):
            self.other[0] = walk.task_expression(
                plan, p, shared, self.index[0] + (cluster_rank() ^ 1)
            )
            self.code[0] = walk.pair_expression(plan, shared, self.code[0], self.near[0])
            if self.ahead[0] % plan.schedule.stages != 0:
                self.near[0] = 0
            if (self.code[0] >= 0) & ((self.code[0] >> 30) != (self.other[0] >> 30)):
                self.ahead[0] = self.ahead[0] + T.if_then_else(
                    self.code[0] >= LINEAR1_BIT,
                    plan.groups1 - plan.groups2,
                    plan.groups2 - plan.groups1,
                )
        self.expert[0] = walk.expert_expression(plan, shared, block_of(self.code[0]))
        self.tasks.publish(
            self.place,
            self.code[0],
            self.expert[0],
            plan.valid_rows(shared, block_of(self.code[0]), self.expert[0]),
            (self.near[0] >> cluster_rank()) & 1,
        )
        self.place.advance()
