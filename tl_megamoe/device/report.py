"""Reports of linear1 tiles: they come when the tile's stores are done, and nobody waits for that.

A math warpgroup's codes and scales leave shared memory by bulk stores. One thread, its first, has
issued them and owes the report; it pays under a product of its next tile, when they are long
complete. Not before that tile's first stage is full: if the stage is empty still, what it waits for
may be this very report, so it pays at once. In pingpong mode the other warpgroup's tile may wait
for it, and the tensor cores are busy meanwhile: it pays at once too.
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


@T.meta_class
class Report:
    """What the first thread of math warpgroup `wg` owes: the pool block, -1 when nothing."""

    def __init__(self, plan: Plan, p: Params, wg):
        self.plan = plan
        self.p = p
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
        """Wait for the stores and report; the leader, if it owes anything."""
        if (T.get_thread_binding() == self.leader) & (self.block[0] >= 0):
            T.call_extern("handle", "tlmm_wait_stores")
            barriers.add_release(
                self.p.workspace, self.plan.counter("l2_arrival") + self.block[0], 1
            )
            self.block[0] = -1

    @T.inline
    def pay_if_empty(self, ring, cursor):
        """Report now unless the next stage is full."""
        if self.deferred:
            if (T.get_thread_binding() == self.leader) & (self.block[0] >= 0):
                if ring.is_full(cursor) == 0:
                    self.pay()

    @T.inline
    def pay_deferred(self):
        """Report, under a product of the next tile or behind the block's last one."""
        if self.deferred:
            self.pay()
