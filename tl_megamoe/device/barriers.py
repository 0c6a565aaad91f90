"""Named barriers, grid barriers and bounded waits.

TileLang's own thread barriers carry no memory clobber and pick ids from 3 up, so every barrier here
is placed by hand (the program disables `thread_storage_sync`) and goes through these helpers.

id                       threads              meaning
BLOCK                    all 384              the roles meet: routing steps, counts known
MATH                     256                  all tiles of this block are done; combine may start
AMAX                     256                  both math warpgroups have written their row maxima
STAGING + warpgroup      128                  the warpgroup's stores are issued; one thread reports

Waits for other blocks are bounded: one longer than `timeout_ms` writes {tag, rank, block, thread, info, have, want}
to its tag's slot of pinned host memory and, 100 ms later, stores to address 0, which ends the launch
with an illegal-address error.
`__trap()` would make ptxas give the math branch 168 registers and spill in its K loop, and any printf
would serialise WGMMA (C7510), so neither is used.
"""

from __future__ import annotations

import tilelang.language as T

from .plan import Params, Plan

BLOCK = 2
MATH = 5
AMAX = 10
STAGING = 11

TAG_DISPATCH_SYNC = 1
TAG_TOKENS = 4
TAG_LINEAR1 = 5
TAG_COMBINE_SYNC = 6

BARRIERS_CUDA = r"""
#include <stdint.h>
#define TLMM_DEV static __device__ __forceinline__
TLMM_DEV unsigned long long tlmm_now() {
  unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory"); return t; }
TLMM_DEV int tlmm_load_acquire(const void* p) {
  int v; asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
// Relaxed loads bypass the const __restrict__ of kernel parameters: what this launch writes is read here.
TLMM_DEV int tlmm_load(const void* p) {
  int v; asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
TLMM_DEV float tlmm_load_f32(const void* p) {
  float v; asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
TLMM_DEV void tlmm_add_release(void* p, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
TLMM_DEV int tlmm_fetch_add(void* p, int v) {
  int o; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
TLMM_DEV void tlmm_bar(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
// Full proxy fence (TileLang's is .shared::cta only): generic stores before it are seen by TMA after it.
TLMM_DEV void tlmm_fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// A timed-out wait fills the slot of its tag and lingers before it ends the launch, so that every wait that is stuck
// reports: the host names the earliest phase, the others are its consequences.
TLMM_DEV void tlmm_check_timeout(unsigned long long start, int timeout_ms, long long report, int tag, int rank,
                                 int info, int have, int want) {
  unsigned long long bound = 1000000ull * (unsigned)timeout_ms;
  if (tlmm_now() - start <= bound) return;
  volatile int* r = (int*)report + 8 * tag;
  r[1] = rank; r[2] = (int)blockIdx.x; r[3] = (int)threadIdx.x; r[4] = info; r[5] = have; r[6] = want;
  asm volatile("fence.acq_rel.sys;" ::: "memory"); r[0] = tag;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  while (tlmm_now() - start <= bound + 100000000ull) {}
  asm volatile("st.global.u32 [%0], %1;" :: "l"(0ull), "r"(tag) : "memory"); }
TLMM_DEV void tlmm_wait_equal(const void* p, int want, long long report, int timeout_ms, int tag, int rank, int info) {
  int v = tlmm_load_acquire(p); if (v == want) return;
  unsigned long long start = tlmm_now(); int spin = 0;
  while ((v = tlmm_load_acquire(p)) != want)
    if ((++spin & 1023) == 0) tlmm_check_timeout(start, timeout_ms, report, tag, rank, info, v, want); }
// Grid barrier that is never reset: block 0 adds 2**31 - (n - 1), the others 1, so that all arrivals together
// flip the top bit. The sum does not depend on n: launches with different grids may share the counter.
TLMM_DEV void tlmm_grid_sync(void* p, int n, long long report, int timeout_ms, int tag, int rank) {
  unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(n - 1) : 1u, old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(add) : "memory");
  unsigned long long start = tlmm_now(); int spin = 0; unsigned v;
  while ((((v = (unsigned)tlmm_load_acquire(p)) ^ old) & 0x80000000u) == 0)
    if ((++spin & 1023) == 0) tlmm_check_timeout(start, timeout_ms, report, tag, rank, 0, (int)(v & 0x7fffffffu), n); }
"""


def sync(barrier: int, threads: int):
    """Wait until `threads` threads have reached `barrier`; orders memory among them."""
    return T.call_extern("handle", "tlmm_bar", barrier, threads)


def fence_async():
    """Order generic-proxy accesses of this thread before later async-proxy (TMA) accesses."""
    return T.call_extern("handle", "tlmm_fence_async")


def load(tensor, *index):
    """A 4-byte integer another block may have written in this launch."""
    return T.call_extern("int32", "tlmm_load", T.address_of(tensor[index]))


def load_f32(tensor, *index):
    """A float another block may have written in this launch."""
    return T.call_extern("float32", "tlmm_load_f32", T.address_of(tensor[index]))


def add_release(tensor, index, value):
    """Add at gpu scope; this thread's earlier writes are visible to whoever acquires the sum."""
    return T.call_extern("handle", "tlmm_add_release", T.address_of(tensor[index]), value)


def fetch_add(tensor, index, value):
    """Relaxed atomic add at gpu scope; the old value."""
    return T.call_extern("int32", "tlmm_fetch_add", T.address_of(tensor[index]), value)


def wait_equal(p: Params, index, want: int, tag: int, info):
    """Acquire workspace[index] == want, bounded."""
    return T.call_extern(
        "handle",
        "tlmm_wait_equal",
        T.address_of(p.workspace[index]),
        want,
        p.report_address,
        p.timeout_ms,
        tag,
        p.rank,
        info,
    )


def grid_sync(plan: Plan, p: Params, name: str, tag: int):
    """Barrier of all blocks, by one thread of each; `name` is a counter of the workspace."""
    return T.call_extern(
        "handle",
        "tlmm_grid_sync",
        T.address_of(p.workspace[plan.counter(name)]),
        plan.schedule.num_sms,
        p.report_address,
        p.timeout_ms,
        tag,
        p.rank,
    )
