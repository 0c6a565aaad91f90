"""Named barriers, barriers of the grid and of all ranks, and bounded waits.

TileLang's own thread barriers carry no memory clobber and pick ids from 3 up, so every barrier here
is placed by hand (the program disables `thread_storage_sync`) and goes through these helpers.

id                       threads              meaning
BLOCK                    all 384              the roles meet: routing steps, counts known, (of a
                                              phase alone) this block done, all blocks done
MATH                     256                  all tiles of this block are done
MULTIPLY + warpgroup     256 (128 arrive)     pingpong: the other warpgroup's products are issued
FINISH + warpgroup       256 (128 arrive)     pingpong: the other warpgroup's tile is written
AMAX                     256                  both math warpgroups have written their row maxima
STAGING + warpgroup      128                  the warpgroup's staging is free, or filled

A barrier of all ranks is a grid barrier whose last block tells the peers: every rank keeps a word a
peer, in which that peer counts its launches (system scope, over NVLink), and waits until all of
them have reached its own. A word a peer, so that a timeout can name the one that is missing; a word
a barrier, so that a fast peer's second signal cannot stand in for a slow peer's first.

Waits for other blocks are bounded: one longer than `timeout_ms` fills its tag's slot of pinned host
memory (`REPORT_FIELDS` in timeouts.py) and, 200 to 300 ms later, stores to address 0, which ends the
launch with an illegal-address error.
`__trap()` would make ptxas give the math branch 168 registers and spill in its K loop, and any printf
would serialise WGMMA (C7510), so neither is used.
"""

from __future__ import annotations

import tilelang.language as T

from .plan import Params, Plan

BLOCK = 2
MATH = 5
MULTIPLY = 6
FINISH = 8
AMAX = 10
STAGING = 11

TAG_DISPATCH_SYNC = 1
TAG_DISPATCH_PEER = 2
TAG_POOL_RING = 3
TAG_TOKENS = 4
TAG_LINEAR1 = 5
TAG_COMBINE_SYNC = 6
TAG_COMBINE_PEER = 7
TAG_INTERMEDIATE_RING = 8

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
TLMM_DEV int tlmm_load_acquire_sys(const void* p) {
  int v; asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
TLMM_DEV void tlmm_store_sys(long long p, int v) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
TLMM_DEV void tlmm_bar(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
TLMM_DEV void tlmm_bar_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory"); }
// Full proxy fence (TileLang's is .shared::cta only): generic stores before it are seen by TMA after it.
TLMM_DEV void tlmm_fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Of the waits of a tag that time out within 50 ms, on a GPU, one for the lowest pool block fills the tag's slot:
// others may wait for a tile of a block that is stuck on it. Every wait claims the slot within 150 ms, and none ends
// the launch before 200, so that the first to time out is sure to find it filled or fill it.
// All linger before they end the launch, so that every tag that is stuck reports: the host names the cause among
// them, the others are its consequences. Claims are never given back: the context is lost.
static __device__ unsigned tlmm_lowest[16], tlmm_claims[16];
TLMM_DEV void tlmm_linger(unsigned long long ns) { unsigned long long start = tlmm_now(); while (tlmm_now() - start <= ns) {} }
TLMM_DEV void tlmm_check_timeout(unsigned long long start, int timeout_ms, long long report, int tag, int rank,
                                 int peer, int block, int expert, int tile, int have, int want) {
  unsigned long long bound = 1000000ull * (unsigned)timeout_ms;
  if (tlmm_now() - start <= bound) return;
  atomicMax(&tlmm_lowest[tag], ~(unsigned)block);  // the complement: the slots are zero at first
  tlmm_linger(50000000ull);
  bool lowest = atomicMax(&tlmm_lowest[tag], 0u) == ~(unsigned)block;
  if (!lowest) tlmm_linger(100000000ull);  // a lower block that came meanwhile tells, unless a still lower one came
  if (atomicExch(&tlmm_claims[tag], 1u) == 0u) {
    volatile int* r = (int*)report + 16 * tag;
    r[1] = rank; r[2] = (int)blockIdx.x; r[3] = (int)threadIdx.x; r[4] = peer; r[5] = block; r[6] = expert;
    r[7] = tile; r[8] = have; r[9] = want;
    asm volatile("fence.acq_rel.sys;" ::: "memory"); r[0] = tag;
    asm volatile("fence.acq_rel.sys;" ::: "memory"); }
  tlmm_linger(150000000ull);
  asm volatile("st.global.u32 [%0], %1;" :: "l"(0ull), "r"(tag) : "memory");
  for (;;) asm volatile("nanosleep.u32 1000;" ::: "memory"); }  // never back: no register has to outlive this
TLMM_DEV void tlmm_wait_equal(const void* p, int want, long long report, int timeout_ms, int tag, int rank,
                              int block, int expert, int tile) {
  int v = tlmm_load_acquire(p); if (v == want) return;
  unsigned long long start = tlmm_now(); int spin = 0;
  while ((v = tlmm_load_acquire(p)) != want)
    if ((++spin & 1023) == 0)
      tlmm_check_timeout(start, timeout_ms, report, tag, rank, -1, block, expert, tile, v, want); }
// Grid barrier that is never reset: block 0 adds 2**31 - (n - 1), the others 1, so that all arrivals together
// flip the top bit. The sum does not depend on n: launches with different grids may share the counter.
TLMM_DEV unsigned tlmm_grid_arrive(void* p, int n, unsigned* old) {
  unsigned add = blockIdx.x == 0 ? 0x80000000u - (unsigned)(n - 1) : 1u;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(*old) : "l"(p), "r"(add) : "memory");
  return *old + add; }
TLMM_DEV void tlmm_grid_sync(void* p, int n, long long report, int timeout_ms, int tag, int rank) {
  unsigned old, v; tlmm_grid_arrive(p, n, &old);
  unsigned long long start = tlmm_now(); int spin = 0;
  while ((((v = (unsigned)tlmm_load_acquire(p)) ^ old) & 0x80000000u) == 0)
    if ((++spin & 1023) == 0) {
      int low = (int)(v & 0x7fffffffu), have = low < 0x40000000 ? low : low - 0x7fffffff - 1 + n;
      tlmm_check_timeout(start, timeout_ms, report, tag, rank, -1, -1, -1, -1, have, n); } }
// Barrier of all blocks of all ranks, by one warp of each block. `signal` is this rank's word of each peer, also at
// byte `signal_at` of every peer's buffer. The block that completes the grid (its arrival flips the top bit) first
// sends the counts in `send` for each peer's `experts` experts, if there are any, to row `rank` of what lies at its
// byte `recv_at`. The release at system scope is cumulative: it covers what all blocks of this rank wrote to peers.
TLMM_DEV void tlmm_rank_sync(void* grid, int n, const void* signal, const void* peers, long long signal_at, int ranks,
                             int rank, const void* send, long long recv_at, int experts, long long report,
                             int timeout_ms, int tag) {
  // Read by volatile assembly: else an address made from it is kept from one barrier to the next, and spilled.
  int lane, last = 0; asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const long long* base = (const long long*)peers;
  // Our own word is the number of launches before this one: nobody adds to it before this block has arrived.
  int want = tlmm_load_acquire_sys((const int*)signal + rank) + 1;
  __syncwarp();
  if (lane == 0) { unsigned old, now = tlmm_grid_arrive(grid, n, &old); last = (int)((now ^ old) >> 31); }
  __syncwarp();  // lane 0 has acquired what the other blocks counted; the other lanes read it
  if (__shfl_sync(0xffffffffu, last, 0)) {
    if (experts)
      for (int i = lane; i < ranks * experts; i += 32)
        tlmm_store_sys(base[i / experts] + recv_at + 4ll * (rank * experts + i % experts), tlmm_load((const int*)send + i));
    __syncwarp();
    if (lane < ranks) {
      asm volatile("fence.acq_rel.sys;" ::: "memory");
      asm volatile("red.release.sys.global.add.s32 [%0], 1;" :: "l"(base[lane] + signal_at + 4ll * rank) : "memory"); } }
  if (lane < ranks) {
    unsigned long long start = tlmm_now(); int spin = 0, v;
    while ((int)((unsigned)(v = tlmm_load_acquire_sys((const int*)signal + lane)) - (unsigned)want) < 0)
      if ((++spin & 1023) == 0)
        tlmm_check_timeout(start, timeout_ms, report, tag, rank, lane, -1, -1, -1, v, want); }
  __syncwarp(); }
"""


def sync(barrier: int, threads: int):
    """Wait until `threads` threads have reached `barrier`; orders memory among them."""
    return T.call_extern("handle", "tlmm_bar", barrier, threads)


def arrive(barrier: int, threads: int):
    """Count this thread at `barrier` without waiting; the others of `threads` wait there."""
    return T.call_extern("handle", "tlmm_bar_arrive", barrier, threads)


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


def wait_equal(p: Params, index, want: int, tag: int, block, expert, tile):
    """Acquire workspace[index] == want, bounded; the rest says in a timeout what it was for."""
    return T.call_extern(
        "handle",
        "tlmm_wait_equal",
        T.address_of(p.workspace[index]),
        want,
        p.report_address,
        p.timeout_ms,
        tag,
        p.rank,
        block,
        expert,
        tile,
    )


def grid_sync(plan: Plan, p: Params, name: str, tag: int):
    """Barrier of all blocks of one rank, by one thread of each; `name` is a counter."""
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


def rank_sync(plan: Plan, p: Params, name: str, tag: int, *, send_counts: bool):
    """Barrier of all blocks of all ranks, by one warp of each; `name` is `dispatch` or `combine`.

    With `send_counts` every rank's `expert_send_count` has reached the `expert_recv_count` of its
    experts' ranks behind it.
    """
    offset = plan.offset("workspace")
    return T.call_extern(
        "handle",
        "tlmm_rank_sync",
        T.address_of(p.workspace[plan.counter(f"{name}_sync")]),
        plan.schedule.num_sms,
        T.address_of(p.workspace[plan.counter(f"{name}_signal")]),
        T.address_of(p.peers[0]),
        T.int64(offset + 4 * plan.counter(f"{name}_signal")),
        plan.problem.num_ranks,
        p.rank,
        T.address_of(p.workspace[plan.counter("expert_send_count")]),
        T.int64(offset + 4 * plan.counter("expert_recv_count")),
        plan.problem.num_local_experts if send_counts else 0,
        p.report_address,
        p.timeout_ms,
        tag,
    )
