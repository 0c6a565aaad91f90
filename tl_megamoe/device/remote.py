"""Bulk copies of rows between ranks' buffers and shared memory, and cache hints.

TMA descriptors must be kernel parameters, so rows of a peer are addressed through the peer table and
pulled with plain bulk copies (`cp.async.bulk`), which take any global address.
"""

from __future__ import annotations

import tilelang.language as T

from .plan import Plan

REMOTE_CUDA = r"""
TLMM_DEV unsigned tlmm_smem(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
// One row chunk to shared memory; completes on `bar` (one arrival, `n` bytes).
TLMM_DEV void tlmm_pull(void* s, long long from, void* bar, unsigned n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(tlmm_smem(bar)), "r"(n) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(tlmm_smem(s)), "l"(from), "r"(n), "r"(tlmm_smem(bar)) : "memory"); }
// One row chunk from shared memory into the pool: starts; `tlmm_wait_put` returns when it is written and the chunk
// may be reused.
TLMM_DEV void tlmm_put(void* pool, long long byte, const void* s, unsigned n) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
    :: "l"((char*)pool + byte), "r"(tlmm_smem(s)), "r"(n) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
TLMM_DEV void tlmm_wait_put() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Bytes for a barrier, and a copy that brings some of them.
TLMM_DEV void tlmm_expect(void* bar, unsigned n) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(tlmm_smem(bar)), "r"(n) : "memory"); }
TLMM_DEV void tlmm_arrive_expect(void* bar, unsigned n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(tlmm_smem(bar)), "r"(n) : "memory"); }
TLMM_DEV void tlmm_load_bulk(void* s, const void* from, unsigned n, void* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(tlmm_smem(s)), "l"(from), "r"(n), "r"(tlmm_smem(bar)) : "memory"); }
// A warp asks for `pieces` neighbouring pieces of `bytes` bytes each to be brought to L2.
TLMM_DEV void tlmm_prefetch(const void* base, long long offset, int pieces, int bytes) {
  if (bytes <= 0) return;
  for (int i = (int)(threadIdx.x & 31); i < pieces; i += 32)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
      :: "l"((const char*)base + offset + (long long)i * bytes), "r"(bytes) : "memory"); }
TLMM_DEV void tlmm_touch(const void* base, long long offset, int bytes) {
  for (int o = (int)(threadIdx.x & 31) * 128; o < bytes; o += 4096)
    asm volatile("prefetch.global.L2 [%0];" :: "l"((const char*)base + offset + o) : "memory"); }
"""


def peer_tensor(plan: Plan, peers, rank, section: str, shape: tuple[int, ...]):
    """A section of a rank's buffer as a tensor: its base address from the peer table, our offset."""
    dtype = plan.layout.sections[section].dtype
    return T.make_tensor_from_addr(peers[rank] + plan.offset(section), shape, dtype)


def pull(chunk, from_address, barrier, num_bytes: int):
    """Start one bulk copy from global to shared memory."""
    return T.call_extern(
        "handle", "tlmm_pull", T.address_of(chunk), from_address, T.address_of(barrier), num_bytes
    )


def put(pool, byte_offset, chunk, num_bytes: int):
    """Start to write one chunk to `pool` at a 64-bit byte offset."""
    return T.call_extern(
        "handle",
        "tlmm_put",
        T.address_of(pool[0, 0]),
        byte_offset,
        T.address_of(chunk),
        num_bytes,
    )


def wait_put():
    """Wait until what this thread has put is in the pool."""
    return T.call_extern("handle", "tlmm_wait_put")
