"""What L2 keeps: priorities of weights, and lines that are dropped (`Schedule.evict_first`).

L2 gives up the line that was not used for longest. Weights stream through it at the memory's rate,
so that nothing stays for more than some 10 us: rows in the pool, the intermediate and
`combine_acts` are written to memory and read back, although they would fit. With the weights given
up first they stay. But then nothing pushes them out, and lines that no launch reads again fill L2
until the weights on their way find no place: so what only the launch itself reads is dropped at its
end, which also saves writing it to memory.

Weights of an expert with several pool blocks are read by all of them, a while apart: those keep the
normal priority. results/notes.md has the measurements.
"""

from __future__ import annotations

import tilelang.language as T

from .plan import Params, Plan

DROPPED_BYTES = 32 << 20
"""Pools up to this size are dropped: of larger ones L2, of 50 MB, holds little at the end."""
LINE_BYTES = 128
L2_CUDA = r"""
// `tlmm_load_bulk`; with `once`, lines that L2 gives up before all others.
TLMM_DEV void tlmm_load_weights(void* s, const void* from, unsigned n, void* bar, bool once) {
  if (!once) { tlmm_load_bulk(s, from, n, bar); return; }
  unsigned long long first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
    :: "r"(tlmm_smem(s)), "l"(from), "r"(n), "r"(tlmm_smem(bar)), "l"(first) : "memory"); }
// A line that nobody reads again before it is written anew: L2 need not write it to memory.
TLMM_DEV void tlmm_drop_line(const void* at) { asm volatile("discard.global.L2 [%0], 128;" :: "l"(at) : "memory"); }
// Thread `thread` of `threads` drops its share of the first `bytes` bytes.
TLMM_DEV void tlmm_drop(const void* at, int bytes, int thread, int threads) {
  for (int i = thread * 128; i < bytes; i += threads * 128) tlmm_drop_line((const char*)at + i); }
"""


def reads_once(p: Params, shared, expert):
    """Whether to treat an expert's weights as read once, traced."""
    blocks = shared.first_block[expert + 1] - shared.first_block[expert]
    return (p.evict_first == 1) & (blocks == 1)


def copy_weights(to, source, num_bytes: int, barrier, once):
    """Start a bulk copy of contiguous weights into a stage."""
    return T.call_extern(
        "handle",
        "tlmm_load_weights",
        T.address_of(to),
        T.address_of(source),
        num_bytes,
        T.address_of(barrier),
        once,
    )


def drop_line(at):
    """Drop the line that begins at an element of a tensor."""
    return T.call_extern("handle", "tlmm_drop_line", T.address_of(at))


@T.macro
def drop_pools(plan: Plan, p: Params, shared, thread, threads: int):
    """Drop the pool blocks of this launch, behind its last barrier; thread `thread` of `threads`."""
    problem, s = plan.problem, plan.schedule
    rows = T.alloc_var("int32")
    rows = T.min(shared.first_block[problem.num_local_experts], plan.ring_blocks) * s.block_m
    if (p.evict_first == 1) & (rows <= DROPPED_BYTES // (problem.hidden + problem.intermediate)):
        pooled = T.if_then_else(plan.is_few(p), 0, rows) if plan.gathers else rows
        for acts, num_bytes in (
            (p.l1_acts[0, 0], pooled * problem.hidden),
            (p.l2_acts[0, 0, 0, 0], rows * problem.intermediate),
        ):
            T.call_extern("handle", "tlmm_drop", T.address_of(acts), num_bytes, thread, threads)
