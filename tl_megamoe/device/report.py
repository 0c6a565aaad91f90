"""Reports of linear1 tiles: they come when the tile's stores are done, and no math warp waits for that.

A math warpgroup's codes and scales leave shared memory by bulk stores. One thread, its first, has
issued them and owes the tile; it pays under a product of its next tile, when they are long
complete, by counting it in `shared.stored`. The warp that loads rows then reports for both
warpgroups (`Lookahead.report_before`): an add with release takes some 1200 clocks, which a load warp has
and a math warp has not.

Not before the next tile's first stage is full: if the stage is empty still, what it waits for may
be this very report, so the thread pays at once. In pingpong mode the other warpgroup's tile may wait
for it, and the tensor cores are busy meanwhile: the thread pays at once too, and reports itself.
"""

from __future__ import annotations

import tilelang.language as T

from . import barriers
from .plan import Params, Plan

REPORT_CUDA = r"""
TLMM_DEV void tlmm_store_bulk(void* to, const void* s, unsigned n) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
    :: "l"(to), "r"(tlmm_smem(s)), "r"(n) : "memory"); }
TLMM_DEV void tlmm_commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
TLMM_DEV void tlmm_wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Not a plain store: with one ptxas spills in the K loops of the profiling build.
TLMM_DEV void tlmm_clear_stored(const void* s) {
  asm volatile("st.shared::cta.v2.b32 [%0], {%1, %1};" :: "r"(tlmm_smem(s)), "r"(0) : "memory"); }
TLMM_DEV void tlmm_count_stored(const void* s) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" :: "r"(tlmm_smem(s)) : "memory"); }
TLMM_DEV int tlmm_is_stored(const void* s, int want) {
  int first, second;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(first) : "r"(tlmm_smem(s)) : "memory");
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1 + 4];" : "=r"(second) : "r"(tlmm_smem(s)) : "memory");
  return first >= want && second >= want; }
// One lane reports a tile, once both warpgroups have counted it.
TLMM_DEV void tlmm_report(const void* s, int want, void* counter, int count) {
  if (tlmm_lane() == 0) {
    while (!tlmm_is_stored(s, want)) {}
    tlmm_add_release(counter, count); }
  __syncwarp(); }
// Waits for the counter of another tile or for this block's own tile; whether the first has come.
TLMM_DEV int tlmm_wait_first(const void* counter, int target, const void* s, int want) {
  int come = 0;
  if (tlmm_lane() == 0) while (!(come = tlmm_load_acquire(counter) == target) && !tlmm_is_stored(s, want)) {}
  __syncwarp();
  return __shfl_sync(0xffffffffu, come, 0); }
TLMM_DEV void tlmm_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
"""


def store_bulk(to, source, num_bytes: int):
    """Start a bulk store of contiguous bytes from shared to global memory, by one thread."""
    return T.call_extern(
        "handle", "tlmm_store_bulk", T.address_of(to), T.address_of(source), num_bytes
    )


def fence_shared():
    """Order this thread's shared-memory writes before later bulk stores from there."""
    return T.call_extern("handle", "tlmm_fence_shared")


def clear_stored(shared):
    """Nothing has left yet: one thread, before all threads meet."""
    return T.call_extern("handle", "tlmm_clear_stored", T.address_of(shared.stored[0]))


def report(shared, tiles, counter, count: int):
    """Add `count` to a counter in memory when both warpgroups have seen `tiles` linear1 tiles leave.
    One warp. Counts, not a barrier's phases: one warpgroup may be two tiles on."""
    return T.call_extern(
        "handle",
        "tlmm_report",
        T.address_of(shared.stored[0]),
        tiles,
        T.address_of(counter),
        count,
    )


def wait_first(counter, target: int, shared, tiles):
    """Wait until a counter in memory has come to `target`, or `report` would not wait: 1 or 0. One
    warp."""
    return T.call_extern(
        "int32",
        "tlmm_wait_first",
        T.address_of(counter),
        target,
        T.address_of(shared.stored[0]),
        tiles,
    )


@T.meta_class
class Report:
    """What the first thread of math warpgroup `wg` owes: the pool block, -1 when nothing."""

    def __init__(self, plan: Plan, p: Params, shared, wg):
        self.plan = plan
        self.p = p
        self.shared = shared
        self.wg = wg
        self.leader = 128 + wg * 128
        self.deferred = not plan.schedule.pingpong
        self.block = T.alloc_var("int32", init=-1)

    @T.inline
    def owe(self, block):
        """The stores of a tile of `block` have been started by this thread, the leader."""
        T.call_extern("handle", "tlmm_commit_stores")
        self.block[0] = block
        if not self.deferred:
            self.pay()

    @T.inline
    def pay(self):
        """Wait for the stores and say so; the leader, if it owes anything."""
        if (T.get_thread_binding() == self.leader) & (self.block[0] >= 0):
            T.call_extern("handle", "tlmm_wait_stores")
            if self.deferred:
                T.call_extern(
                    "handle", "tlmm_count_stored", T.address_of(self.shared.stored[self.wg])
                )
            else:
                barriers.add_release(
                    self.p.workspace, self.plan.counter("l2_arrival") + self.block[0], 1
                )
            self.block[0] = -1

    @T.inline
    def pay_if_empty(self, ring, cursor):
        """Pay now unless the next stage is full."""
        if self.deferred:
            if (T.get_thread_binding() == self.leader) & (self.block[0] >= 0):
                if ring.is_full(cursor) == 0:
                    self.pay()

    @T.inline
    def pay_deferred(self):
        """Pay, under a product of the next tile or behind the block's last one."""
        if self.deferred:
            self.pay()
