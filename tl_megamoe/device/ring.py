"""The operand ring and the other shared memory of a block.

buffer       arrivals on its barriers            who fills, who reads
ring.full    one a load warp, plus TMA bytes;    load warps; both math warpgroups
             of gathered rows 32 more, each
             of which adds itself first
ring.empty   one a math warp of a tile           math warps, after their scale reads; load warps
row_bars     1, plus bulk-copy bytes             a lane of a dispatch warp, for itself

`empty` counts warps, not warpgroups: a warp that is done must not free a stage whose row scales
another warp of its warpgroup may still read.
"""

from __future__ import annotations

from itertools import count
from math import prod

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from ..layout import ITEM_BYTES
from ..schedule import BLOCK_K
from ..shared_memory import CLAIM_SLOTS, whole_kib
from . import l2
from .plan import FP8, Plan
from .tasks import Tasks

RING_CUDA = r"""
// Lane 0's value, which the compiler then knows to be the same in all lanes.
TLMM_DEV int tlmm_uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }
TLMM_DEV unsigned tlmm_uniform_address(const void* p) {
  return __shfl_sync(0xffffffffu, tlmm_smem(p), 0); }
TLMM_DEV float tlmm_load_shared(unsigned at) {
  float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v; }
// A phase of a barrier: looked at once, and waited for.
TLMM_DEV int tlmm_is_full(unsigned bar, int parity) {
  int ok;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
    "selp.s32 %0, 1, 0, p;}"
    : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  return ok; }
TLMM_DEV void tlmm_wait_full(unsigned bar, int parity) {
  asm volatile("{.reg .pred p;\n"
    "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;}"
    :: "r"(bar), "r"(parity) : "memory"); }
TLMM_DEV void tlmm_free(unsigned bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
"""


@T.meta_class
class Cursor:
    """Where a role stands in the ring: stage and parity.

    Carried, not derived from a step count: in the K loop a modulo by a stage count that is no power
    of two costs as much as several of its instructions.
    """

    def __init__(self, stages: int, parity: int):
        self.stages = stages
        self.stage = T.alloc_var("int32", init=0)
        self.parity = T.alloc_var("int32", init=parity)

    @T.inline
    def advance(self):
        self.parity[0] = T.if_then_else(
            self.stage[0] == self.stages - 1, self.parity[0] ^ 1, self.parity[0]
        )
        self.stage[0] = T.if_then_else(self.stage[0] == self.stages - 1, 0, self.stage[0] + 1)

    @T.inline
    def skip(self, count):
        """Pass over `count` K blocks that another role handles; a Python int."""
        self.stage[0] = self.stage[0] + count % self.stages
        self.parity[0] = T.if_then_else(
            self.stage[0] >= self.stages,
            self.parity[0] ^ (1 - count // self.stages % 2),
            self.parity[0] ^ (count // self.stages % 2),
        )
        self.stage[0] = T.if_then_else(
            self.stage[0] >= self.stages, self.stage[0] - self.stages, self.stage[0]
        )


def alloc_kib(shape: tuple[int, ...], dtype: str):
    """Shared memory of at least this shape, a multiple of 1 KiB; the first dimension is extended.

    TileLang aligns a buffer that its own TMA and WGMMA calls take, and packs the others, in an
    order of its own. One of 768 bytes before the weights' ring would move it off the multiple of
    1 KiB that a 128-byte swizzle needs.
    """
    item = ITEM_BYTES[dtype]
    row = item * prod(shape[1:])
    first = next(n for n in count(shape[0]) if n * row % 1024 == 0)
    assert first * row == whole_kib(shape[0] * row)
    return T.alloc_shared((first, *shape[1:]), dtype)


@T.meta_class
class Ring:
    """Staged operand tiles with a full and an empty barrier a stage.

    Attributes:
        a: of linear1, rows of 128 bytes; of linear2, for every 64 rows two blocks of 64 rows x 64
            bytes, as they lie in memory.
        b: 128-row blocks of weights, rows of 128 bytes, as they lie in memory.
        a_sf: scales of the rows of `a`.
    """

    def __init__(self, plan: Plan):
        s = plan.schedule
        self.stages = s.stages
        self.a = T.alloc_shared((s.stages, s.block_m, BLOCK_K), FP8)
        self.b_blocks = s.max_block_n // BLOCK_K
        # Of words: with bytes, the index of a stage is a multiple of 32768, which TVM takes for
        # the lanes of a vector, as an int16.
        self.b = T.alloc_shared((s.stages * s.max_block_n * BLOCK_K // 4,), "uint32")
        self.a_sf = alloc_kib((s.stages, plan.recipe.scales_per_k_block, s.block_m), "float32")
        self.full = T.alloc_barrier([s.load_warps] * s.stages)
        self.empty = T.alloc_barrier([s.tile_warps] * s.stages)
        # What WGMMA reads, and TMA therefore writes: 16-byte chunks swizzled by row.
        T.annotate_layout({self.a: make_full_bank_swizzled_layout(self.a)})

    def b_at(self, cursor, block):
        """Where a 128-row block of weights of the stage begins in `b`."""
        return (cursor.stage[0] * self.b_blocks + block) * (BLOCK_K * BLOCK_K // 4)

    def is_full(self, cursor):
        """1 if the cursor's stage is full, 0 if not; orders what it brings as a wait does."""
        return T.call_extern(
            "int32",
            "tlmm_is_full",
            T.call_extern("uint32", "tlmm_smem", T.address_of(self.full[cursor.stage[0]])),
            cursor.parity[0],
        )

    @T.inline
    def acquire(self, cursor):
        T.mbarrier_wait_parity(self.empty[cursor.stage[0]], cursor.parity[0])

    @T.inline
    def commit(self, cursor):
        if T.shuffle_elect(32):
            T.mbarrier_arrive(self.full[cursor.stage[0]])

    @T.inline
    def wait(self, cursor):
        T.mbarrier_wait_parity(self.full[cursor.stage[0]], cursor.parity[0])


def thread_row(tx, first=0):
    """The lower of the two rows, of 64 from `first` on, that thread `tx` of a math warpgroup has of
    a WGMMA tile."""
    return first + tx % 128 // 32 * 16 + tx % 32 // 4


@T.meta_class
class Operands:
    """The ring as a math warpgroup reads it, in one K loop.

    All addresses are a base and a stage. Stage, parity and the bases, but that of the scales, are
    read through lane 0 once a loop, so that the compiler knows them to be uniform: then each
    address of a K block is one instruction that no warp waits for. From `T.address_of` a barrier's
    address alone is five, with a special register among them.

    Attributes:
        a_row: first row of A that the warpgroup multiplies.
        groups: scales of a row in a K block.
        full: whether the stage was full when it was looked at; 0 where nobody looked.
        a_at, b_at: descriptors of the stage's operands (device/matmul.py).
        row_sf: scales of a thread's two rows, by group and row half.
    """

    def __init__(self, ring: Ring, a_row, groups: int):
        self.ring = ring
        self.a_row = a_row
        self.groups = groups
        self.block_m = ring.a.shape[1]
        # Of linear2, even where the K loop is linear1's, which has one scale a row.
        self.sf_bytes = prod(ring.a_sf.shape[1:]) * ITEM_BYTES["float32"]
        self.full = T.alloc_var("int32")
        self.a_at = T.alloc_var("uint32")
        self.b_at = T.alloc_var("uint32")
        self.row_sf = self.alloc_scales()
        self.left = T.alloc_var("int32")
        self.a_base = T.alloc_var("uint32")
        self.b_base = T.alloc_var("uint32")
        self.full_base = T.alloc_var("uint32")
        self.empty_base = T.alloc_var("uint32")
        self.sf_base = T.alloc_var("uint32")

    def alloc_scales(self):
        return T.alloc_local((2 * self.groups,), "float32")

    def first_scale(self):
        """Where a thread's scales begin among those of a group."""
        return thread_row(T.get_thread_binding(), self.a_row)

    @T.inline
    def enter(self, cursor):
        """Begin at the cursor's stage, of which nothing is known."""
        ring = self.ring
        self.full[0] = 0
        cursor.stage[0] = T.call_extern("int32", "tlmm_uniform", cursor.stage[0])
        cursor.parity[0] = T.call_extern("int32", "tlmm_uniform", cursor.parity[0])
        self.a_base[0] = T.call_extern(
            "uint32", "tlmm_descriptor", T.address_of(ring.a[0, 0, 0])
        ) + T.Cast("uint32", self.a_row * (BLOCK_K // 16))
        self.b_base[0] = T.call_extern("uint32", "tlmm_descriptor", T.address_of(ring.b[0]))
        self.full_base[0] = T.call_extern(
            "uint32", "tlmm_uniform_address", T.address_of(ring.full[0])
        )
        self.empty_base[0] = T.call_extern(
            "uint32", "tlmm_uniform_address", T.address_of(ring.empty[0])
        )
        self.sf_base[0] = T.call_extern(
            "uint32", "tlmm_smem", T.address_of(ring.a_sf[0, 0, 0])
        ) + T.Cast("uint32", self.first_scale() * 4)
        self.place(cursor)

    @T.inline
    def place(self, cursor):
        self.a_at[0] = _in_stage(self.a_base, cursor.stage, self.block_m * (BLOCK_K // 16))
        self.b_at[0] = _in_stage(
            self.b_base, cursor.stage, self.ring.b_blocks * (BLOCK_K * BLOCK_K // 16)
        )

    @T.inline
    def wait(self, cursor):
        """Wait until the stage is full."""
        T.call_extern(
            "handle", "tlmm_wait_full", _in_stage(self.full_base, cursor.stage, 8), cursor.parity[0]
        )

    @T.inline
    def read_scales(self, cursor):
        """Read the row scales of the stage, which is full."""
        for group in tuple(range(self.groups)):
            for h in (0, 1):
                self.row_sf[group * 2 + h] = T.call_extern(
                    "float32",
                    "tlmm_load_shared",
                    self.scales_at(cursor, group) + T.uint32(h * 32),
                )

    @T.inline
    def advance(self, cursor):
        """Move on to the next stage, of which nothing is known."""
        self.left[0] = cursor.stage[0]
        cursor.advance()
        self.place(cursor)
        self.full[0] = 0

    @T.inline
    def test(self, cursor):
        """See whether the stage is full, without waiting."""
        self.full[0] = T.call_extern(
            "int32", "tlmm_is_full", _in_stage(self.full_base, cursor.stage, 8), cursor.parity[0]
        )

    @T.inline
    def look(self, cursor):
        """See whether the stage is full, without waiting, and if so read its scales."""
        self.test(cursor)
        if self.full[0] == 1:
            self.read_scales(cursor)

    def scales_at(self, cursor, group: int):
        """Address of a thread's scales in the stage."""
        return _in_stage(self.sf_base, cursor.stage, self.sf_bytes) + T.uint32(
            group * self.block_m * 4
        )

    @T.inline
    def release(self):
        """Free the stage before. One warp, whose lanes have all read their row scales."""
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.call_extern("handle", "tlmm_free", _in_stage(self.empty_base, self.left, 8))


def cluster_rank():
    """The block's number in its cluster, traced."""
    return T.call_extern("int32", "tlmm_cluster_rank")


def _in_stage(base, stage, size: int):
    """An address within a stage, from that within the first; `size` is a stage's."""
    return base[0] + T.Cast("uint32", stage[0]) * T.uint32(size)


def expect(ring, cursor, num_bytes: int, arrive: bool):
    """Add to the bytes that the stage waits for; with `arrive`, this warp brings no more."""
    name = "tlmm_arrive_expect" if arrive else "tlmm_expect"
    return T.call_extern("handle", name, T.address_of(ring.full[cursor.stage[0]]), num_bytes)


def copy(ring, cursor, to, source, num_bytes: int):
    """Start a bulk copy of contiguous bytes into the stage."""
    return T.call_extern(
        "handle",
        "tlmm_load_bulk",
        T.address_of(to),
        T.address_of(source),
        num_bytes,
        T.address_of(ring.full[cursor.stage[0]]),
    )


def _first_row(cursor, num_k: int):
    """0. With one K block it must not be known to be: the whole index would be a multiple of 32768,
    which TVM takes for the lanes of a vector, as an int16."""
    return T.min(cursor.stage[0], 0) if num_k == 1 else 0


@T.macro
def load_weights(ring, cursor, ahead, weights, at, k, num_k):
    """Start the copies of K block `k` of a tile's weights; arguments as of `fill`."""
    expert, first_block, num_blocks = at
    if T.shuffle_elect(32):
        expect(ring, cursor, num_blocks * BLOCK_K * BLOCK_K, not ahead.loads_rows)
        for b in tuple(range(num_blocks)):
            l2.copy_weights(
                ring.b[ring.b_at(cursor, b)],
                weights[expert, first_block + b, k, _first_row(cursor, num_k), 0],
                BLOCK_K * BLOCK_K,
                ring.full[cursor.stage[0]],
                ahead.once[0],
            )


@T.macro
def load_half(ring, cursor, ahead, weights, at, k, num_k):
    """The same of a tile whose weights the cluster shares: one half, into both blocks' stages, when
    both are free."""
    expert, first_block, num_blocks = at
    half = num_blocks // 2
    ahead.pair.meet(cursor.stage[0])
    if T.shuffle_elect(32):
        expect(ring, cursor, num_blocks * BLOCK_K * BLOCK_K, not ahead.loads_rows)
        for b in tuple(range(half)):
            ahead.pair.load(
                ring.b[ring.b_at(cursor, cluster_rank() * half + b)],
                weights[
                    expert,
                    first_block + cluster_rank() * half + b,
                    k,
                    _first_row(cursor, num_k),
                    0,
                ],
                BLOCK_K * BLOCK_K,
                ring.full[cursor.stage[0]],
            )


@T.macro
def fill(ring, cursor, ahead, acts, acts_sf, rows, weights, at, num_k, part):
    """Fill the ring with the K blocks of one tile. Role: load, one warp.

    Args:
        ring: where the operands go.
        cursor: this warp's place in the ring.
        ahead: the warp's `Lookahead`: what it loads, and what it does beside.
        acts: its `start(ring, cursor, row, num_rows, k)` starts the copies of the rows.
        acts_sf: their scales (K/128 x scales of a K block, rows) float32; None where `acts` brings
            them.
        rows: (first row of the tile in memory, number of rows, scales of a K block).
        weights: pre-tiled (experts, N/128, K/128, 128, 128) e4m3.
        at: (expert, first block of 128 weight rows, number of such blocks).
        num_k: K blocks.
        part: 0 in the first loop over a tile's K blocks.
    """
    with_a, with_b = ahead.loads_rows, ahead.loads_weights
    row, num_rows, scales = rows
    for k in T.serial(num_k):
        if part == 0:
            ahead.hold_back(k)
        ring.acquire(cursor)
        if with_a:
            acts.start(ring, cursor, row, num_rows, k)
            if acts_sf is not None:
                if T.shuffle_elect(32):
                    expect(ring, cursor, scales * num_rows * 4, False)
                    for group in tuple(range(scales)):
                        copy(
                            ring,
                            cursor,
                            ring.a_sf[cursor.stage[0], group, 0],
                            acts_sf[k * scales + group, row],
                            num_rows * 4,
                        )
        if with_b:
            if ahead.pair is None:
                load_weights(ring, cursor, ahead, weights, at, k, num_k)
            else:
                if ahead.pair.shares[0] == 1:
                    load_half(ring, cursor, ahead, weights, at, k, num_k)
                else:
                    load_weights(ring, cursor, ahead, weights, at, k, num_k)
        if with_a:
            ring.commit(cursor)
        cursor.advance()
        if part == 0:
            ahead.beside(k, num_k)


class Table:
    """A run of the shared table: `table[i]` reads, `shared.tables[table.at(i)] = v` writes.

    Every shared buffer is a multiple of 1 KiB, so small tables share one.
    """

    def __init__(self, tables, offset: int):
        self.tables = tables
        self.offset = offset

    def at(self, index):
        return self.offset + index

    def __getitem__(self, index):
        return self.tables[self.at(index)]


@T.meta_class
class Shared:
    """Everything a block keeps in shared memory; Schedule.smem_buffers counts the same.

    Attributes:
        staging: 8 KiB a math warpgroup: codes of a linear1 tile, then rows of a linear2 tile;
            before all tiles, what few routes are counted in (dispatch.py).
        amax: row maxima that the math warpgroups exchange, of a tile of 64 rows; of swapped
            operands by warp, of `block_m` rows.
        inverse: of swapped operands, by warpgroup, what the rows of a tile are multiplied by.
        scales: of a linear1 tile, by warpgroup, on their way to memory.

    table          entries               holds
    tasks          4 a slot              tiles on their way to the math warpgroups
    stored         2                     linear1 tiles of each warpgroup that have left the block
    counts         experts               this block's routes, then received counts by source rank
    total          local experts         rows received
    first_block    local experts + 1     first pool block, number of blocks at the end
    first_row      local experts + 1     first received row, number of rows at the end
    routes         few routes            of few routes (dispatch.py), the entry of a received row
    claims         4 in a cluster        tasks that its first block has claimed for its second
    """

    def __init__(self, plan: Plan):
        problem, s = plan.problem, plan.schedule
        local = problem.num_local_experts
        self.ring = Ring(plan)
        self.staging = T.alloc_shared((128, 64), "bfloat16")
        if s.swapped:
            self.amax = alloc_kib((2, s.tile_warps, s.block_m), "float32")
            self.inverse = alloc_kib((2, s.block_m), "float32")
        else:
            self.amax = alloc_kib((2, 2, 64), "float32")
        self.scales = alloc_kib((2, plan.recipe.scales_per_k_block, s.block_m), "float32")
        if s.cluster_size == 2:
            self.meet = T.alloc_barrier([1] * s.stages)
            self.begun = T.alloc_barrier([1])
            self.claim_full = T.alloc_barrier([1] * CLAIM_SLOTS)
            self.claim_free = T.alloc_barrier([1] * CLAIM_SLOTS)
        self.rows = alloc_kib((s.row_slots * plan.row_chunk,), FP8)
        self.row_bars = T.alloc_barrier([1] * s.row_slots)
        first = 4 * s.task_slots + 2
        routes = first + problem.num_experts + 3 * local + 2
        few = s.few_routes(problem, plan.recipe)
        claims = CLAIM_SLOTS if s.cluster_size == 2 else 0
        self.tables = alloc_kib((routes + few + claims,), "int32")
        self.claims = Table(self.tables, routes + few)
        self.tasks = Tasks(s.task_slots, self.tables, 0)
        self.stored = Table(self.tables, first - 2)
        self.counts = Table(self.tables, first)
        self.total = Table(self.tables, first + problem.num_experts)
        self.first_block = Table(self.tables, first + problem.num_experts + local)
        self.first_row = Table(self.tables, first + problem.num_experts + 2 * local + 1)
        self.routes = Table(self.tables, routes)
