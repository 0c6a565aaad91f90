"""The scaled FP8 matrix product that linear1 and linear2 share.

A unit is 64 rows of A times 128 rows of B: one WGMMA tile of one warpgroup. Each K block is
multiplied into `raw` and then promoted: total += raw * (row scale * weight scale). With 64 columns
an activation scale, a K block is two such products. The first 64 of the 128 columns are gate in
linear1 and the left half of the columns in linear2, the others are up and the right half.

tile          units of a warpgroup         A rows of its units   128-row block of B of unit q
128 x 256     2, one K loop                64 by warpgroup       q
 64 x 256     1                            all 64                the warpgroup's
128 x 128     1 a K loop                   64 by warpgroup       the only one
pingpong      2, one K loop, own tile      all 64                q

A block of 128 rows that holds at most 64 is multiplied as a tile of 64 rows, where block_n is 256.

Accumulators are plain arrays in WGMMA's register order and the product is a helper, not
`T.wgmma_gemm`, whose descriptors are taken apart and together again for each of the eight WGMMAs of
a K block. One raw accumulator: a second one would need registers that the totals have.

While a warpgroup promotes, the tensor cores have only the other one's product to work on, and an
instruction that a warp waits for costs both. So a K block holds little beside its products and
promotions (DESIGN.md, "Tiles"): addresses are sums in uniform registers (`ring.Operands`), the
next K block's barrier is looked at, and its scales are read, under the last product of this one,
and consecutive promotions share their scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from ..schedule import Schedule
from .plan import Plan
from .ring import Operands

MAX_UNITS = 2
RAW = 64
"""Values a thread holds of a 64 x 128 product."""


def operand_names(n: int) -> str:
    """%0 .. of `n` operands of an assembly."""
    return ", ".join(f"%{i}" for i in range(n))


def in_out(name: str, n: int) -> str:
    """The constraints of `n` values that an assembly reads and writes."""
    return ", ".join(f'"+f"({name}[{i}])' for i in range(n))


MATMUL_CUDA = (
    r"""
// The lower half of a WGMMA descriptor: address / 16, and 1 where swizzled layouts have no stride. Read through lane
// 0, so that the compiler knows it to be uniform and keeps its arithmetic off the vector registers.
TLMM_DEV unsigned tlmm_descriptor(const void* p) {
  return __shfl_sync(0xffffffffu, (tlmm_smem(p) >> 4 & 0x3fff) | 0x10000, 0); }
// One WGMMA: raw (64 x 128) = or += 32 columns of A times 32 of B. `high` holds stride and swizzle (PTX ISA,
// "Matrix descriptor format"): 8 rows of 128 bytes, or of 64.
#define TLMM_ROWS_128B 0x40000040u
#define TLMM_ROWS_64B 0x80000020u
template <bool ADD, unsigned HIGH_A>
TLMM_DEV void tlmm_wgmma(float* raw, unsigned a, unsigned b) {
  unsigned long long da = (unsigned long long)HIGH_A << 32 | a;
  unsigned long long db = (unsigned long long)TLMM_ROWS_128B << 32 | b;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"""
    + operand_names(RAW)
    + r"""}, %64, %65, p, 1, 1;}"
    : """
    + in_out("raw", RAW)
    + r""" : "l"(da), "l"(db), "n"(ADD)); }
// raw = COUNT WGMMAs from the FIRST on of the 4 of a K block. A lies in rows of 128 bytes, or as two blocks of 64
// rows of 64 bytes (NARROW).
template <int FIRST, int COUNT, bool NARROW>
TLMM_DEV void tlmm_product(float* raw, unsigned a, unsigned b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; i++) {
    unsigned at = a + (NARROW ? (i >> 1) * 256 + (i & 1) * 2 : i * 2);
    if (i == FIRST) tlmm_wgmma<false, NARROW ? TLMM_ROWS_64B : TLMM_ROWS_128B>(raw, at, b + i * 2);
    else tlmm_wgmma<true, NARROW ? TLMM_ROWS_64B : TLMM_ROWS_128B>(raw, at, b + i * 2); }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// total += raw * scale, the scales of the left and right 64 columns by row half. FFMAs and WGMMAs share the register
// file, and FFMAs of the same scale in a row read it once; the compiler's order is another in each kernel.
TLMM_DEV void tlmm_promote(float* total, const float* raw, float left_low, float left_high, float right_low,
                           float right_high) {
  #pragma unroll
  for (int half = 0; half < 2; half++)
    #pragma unroll
    for (int v = 0; v < 64; v++)
      if ((v >> 1 & 1) == half)
        asm volatile("fma.rn.ftz.f32 %0, %1, %2, %0;" : "+f"(total[v])
          : "f"(raw[v]), "f"(v < 32 ? (half ? left_high : left_low) : (half ? right_high : right_low))); }
TLMM_DEV float tlmm_lane_value(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane & 31); }
// The product is in `raw`: named as operands, else the compiler reads them before the wait.
TLMM_DEV void tlmm_wait_product(float* raw) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : """
    + in_out("raw", RAW)
    + r""" :: "memory"); }
// Largest magnitudes of the two rows a thread holds of 64 columns (PTX ISA: value v of a thread is in row half
// v / 2 % 2; the 4 lanes of a quad share their rows). fmaxf drops NaN.
TLMM_DEV void tlmm_row_maxima(const float* half, float* amax) {
  float low = 0.0f, high = 0.0f;
  #pragma unroll
  for (int v = 0; v < 32; v += 4) {
    low = fmaxf(low, fmaxf(fabsf(half[v]), fabsf(half[v + 1])));
    high = fmaxf(high, fmaxf(fabsf(half[v + 2]), fabsf(half[v + 3]))); }
  #pragma unroll
  for (int lane = 1; lane < 4; lane <<= 1) {
    low = fmaxf(low, __shfl_xor_sync(0xffffffffu, low, lane));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, lane)); }
  amax[0] = low; amax[1] = high; }
// Below, and at the edges of a tile, lane and thread are read by volatile assembly: from threadIdx the compiler
// computes addresses once for all tiles, keeps them under the K loops and spills (10 registers in pingpong mode).
TLMM_DEV int tlmm_thread() { int thread; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread)); return thread; }
TLMM_DEV unsigned tlmm_lane() { unsigned lane; asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); return lane; }
// The 16 rows x 64 columns of a warp as e4m3 into 1 KiB: rows of 64 bytes, whose 16-byte chunks are swizzled by row
// pair, as a WGMMA operand wants them.
TLMM_DEV void tlmm_stage_codes(const float* half, void* staging) {
  unsigned lane = tlmm_lane(), row = lane >> 2, quad = lane & 3, turn = row >> 1 & 3;
  char* s = (char*)staging + row * 64 + quad * 2;
  #pragma unroll
  for (int v = 0; v < 32; v += 4) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(half[v + 1]), "f"(half[v]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(half[v + 3]), "f"(half[v + 2]));
    unsigned at = ((v >> 3 ^ turn) << 4) + (v >> 2 & 1) * 8;
    *(unsigned short*)(s + at) = low;
    *(unsigned short*)(s + 512 + at) = high; } }
// 16 rows x 64 columns of a warp as BF16 into 2 KiB, 16-byte chunks swizzled by row: four 8 x 8 matrices a store.
template <int FIRST>
TLMM_DEV void tlmm_stage_rows(const float* total, void* staging) {
  const float* half = total + FIRST;
  unsigned lane = tlmm_lane(), row = lane & 15, side = lane >> 4;
  unsigned s = tlmm_smem(staging) + row * 128;
  #pragma unroll
  for (int v = 0; v < 32; v += 8) {
    unsigned r[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(half[v + 2 * i + 1]), "f"(half[v + 2 * i]));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(s + (((v >> 2) + side ^ row & 7) << 4)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); }
  __syncwarp(); }
// 16 staged rows, 8 lanes a row and 4 rows at a time: row 4 s + lane / 8 to byte `offset` of to[s], if that is not null.
TLMM_DEV void tlmm_store_rows(const int64_t* to, const void* staging, int offset) {
  unsigned lane = tlmm_lane(), chunk = lane & 7, row = lane >> 3;
  uint4 piece[4];
  #pragma unroll
  for (int s = 0; s < 4; s++, row += 4)
    piece[s] = *(const uint4*)((const char*)staging + row * 128 + ((chunk ^ row & 7) << 4));
  #pragma unroll
  for (int s = 0; s < 4; s++)
    if (to[s]) *(uint4*)(to[s] + offset + chunk * 16) = piece[s];
  __syncwarp(); }
"""
)


@dataclass(frozen=True, slots=True)
class Share:
    """What one math warpgroup computes of a tile.

    Attributes:
        loops: units of each K loop.
        a_row: first A row of its units, also their first row within the tile.
        b_block: 128-row block of B of each unit.
        half: which half of the tile's columns each unit holds.
        splits_columns: whether the other warpgroup holds the other columns of the same rows.
    """

    loops: tuple[tuple[int, ...], ...]
    a_row: Any
    b_block: tuple[Any, ...]
    half: tuple[Any, ...]
    splits_columns: bool

    @classmethod
    def of(cls, schedule: Schedule, linear: int, wg: Any, rows: int) -> Share:
        """The share of warpgroup `wg` (a number, or an expression of one) in a tile of `rows` rows
        of linear1 or linear2 (`linear` is 1 or 2)."""
        if schedule.pingpong:
            return cls(((0, 1),), 0, (0, 1), (0, 1), False)
        block_n = schedule.linear1_block_n if linear == 1 else schedule.linear2_block_n
        if block_n == 256 and rows == 64:
            return cls(((0,),), 0, (wg,), (wg,), True)
        if block_n == 256:
            return cls(((0, 1),), wg * 64, (0, 1), (0, 1), False)
        # A linear1 tile holds a whole scale group of 128 columns: two K loops of 64 gate and 64 up.
        loops = ((0,), (1,)) if linear == 1 else ((0,),)
        return cls(loops, wg * 64, (0, 0), (0, 1), False)

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(q for loop in self.loops for q in loop)


def shares(plan: Plan, linear: int, wg: Any) -> tuple[Share, ...]:
    """The shares of warpgroup `wg` in tiles of linear1 or linear2, by `Plan.tile_rows`."""
    return tuple(Share.of(plan.schedule, linear, wg, rows) for rows in plan.tile_rows(linear))


def first_unit_row(plan: Plan, linear: int, wg, valid):
    """The first row, within a tile of a block with `valid` rows, that warpgroup `wg` computes."""
    found = tuple(share.a_row for share in shares(plan, linear, wg))
    return found[0] if len(found) == 1 else T.if_then_else(plan.takes(linear, 64, valid), *found)


@T.meta_class
class Accumulators:
    """Registers of one math warpgroup, in WGMMA's order: value v of a thread is in row
    `lane // 4 + 8 * (v // 2 % 2)` of its warp's 16 and in column `8 * (v // 4) + 2 * (lane % 4) + v % 2`.

    Attributes:
        raw: the product of one K block.
        total: sums of a unit each.
    """

    def __init__(self, units: int):
        self.raw = T.alloc_local((RAW,), "float32")
        self.total = tuple(T.alloc_local((RAW,), "float32") for _ in range(units))


LEFT, RIGHT = 0, RAW // 2
"""First value of the first and last 64 columns of a unit: gate and up of linear1."""


def row_maxima(total, amax):
    """amax <- largest magnitudes of a thread's two rows over the left 64 columns; NaN is left out."""
    return T.call_extern("handle", "tlmm_row_maxima", total.data, amax.data)


def stage_codes(total, staging):
    """A warp's 16 rows x left 64 columns as e4m3 into 1 KiB.

    Args:
        total: of a unit, scaled to the range of e4m3 already.
        staging: address of 1 KiB that only this warp uses.
    """
    return T.call_extern("handle", "tlmm_stage_codes", total.data, staging)


def stage_rows(total, first: int, staging):
    """A warp's 16 rows x 64 columns (`LEFT` or `RIGHT`) as BF16 into 2 KiB of its own staging."""
    return T.call_extern("handle", f"tlmm_stage_rows<{first}>", total.data, staging)


def store_rows(to, staging, offset):
    """What `stage_rows` staged to byte `offset` of its rows: lane l stores a piece of row
    `4 s + l // 8` to address `to[s]`, s < 4, and nothing where that is 0."""
    return T.call_extern("handle", "tlmm_store_rows", to.data, staging, offset)


def thread_here():
    """The thread's index, read at this place: what is computed from it is not kept between tiles."""
    return T.call_extern("int32", "tlmm_thread")


@T.macro
def scaled_k_loop(plan: Plan, ring, cursor, acc, share, units, num_k, w_sf, at, beside):
    """Multiply one tile's K blocks and promote them. Role: math (128 threads).

    Args:
        plan: the program's.
        ring: operands, filled by the load role in the same order.
        cursor: this role's place in the ring.
        acc: accumulators; the totals of `units` are overwritten.
        share: where the units' operands lie in a stage.
        units: unit indices computed from each K block (Python tuple).
        num_k: (K blocks, activation scales of a row in each, whether A is `NARROW`).
        w_sf: weight scales (expert, N/128, K/128).
        at: (expert, scale rows, (row of the left, row of the right columns) for each unit, as
            positions in `scale rows`).
        beside: its `under_product()` is emitted under the first product of the second K block, or
            of the only one.
    """
    expert, sf_rows, sf_of = at
    num_blocks, groups, narrow = num_k
    wgmmas = 4 // groups
    columns = tuple(range(len(sf_rows)))
    lane = T.get_thread_binding() % 32
    # Lane l holds the weight scales of K block l; 32 K blocks on the next ones are loaded.
    lane_sf = tuple(T.alloc_var("float32") for _ in columns)
    sf = tuple(T.alloc_var("float32") for _ in columns)
    scale = T.alloc_local((groups * len(columns) * 2,), "float32")
    for c in columns:
        lane_sf[c][0] = w_sf[expert, sf_rows[c], T.min(lane, num_blocks - 1)]
    for q in units:
        for v in T.unroll(RAW):
            acc.total[q][v] = 0.0
    operands = Operands(ring, share.a_row, groups)
    operands.enter(cursor)
    for c in columns:
        sf[c][0] = T.call_extern("float32", "tlmm_lane_value", lane_sf[c][0], 0)
    for k in T.serial(num_blocks):
        if operands.full[0] == 0:
            operands.wait(cursor)
            operands.read_scales(cursor)
        for group in tuple(range(groups)):
            for c in columns:
                for h in (0, 1):
                    scale[(group * len(columns) + c) * 2 + h] = (
                        operands.row_sf[group * 2 + h] * sf[c][0]
                    )
        for q in units:
            for group in tuple(range(groups)):
                T.call_extern(
                    "handle",
                    f"tlmm_product<{group * wgmmas}, {wgmmas}, {'true' if narrow else 'false'}>",
                    acc.raw.data,
                    operands.a_at[0],
                    operands.b_at[0] + T.Cast("uint32", share.b_block[q] * 1024),
                )
                if (q, group) == (units[0], 0):
                    if k == min(1, num_blocks - 1):
                        beside.under_product()
                if (q, group) == (units[-1], groups - 1):
                    operands.advance(cursor)
                    if k + 1 < num_blocks:
                        operands.look(cursor)
                    for c in columns:
                        sf[c][0] = T.call_extern("float32", "tlmm_lane_value", lane_sf[c][0], k + 1)
                    if num_blocks > 32:
                        if k % 32 == 30:
                            for c in columns:
                                lane_sf[c][0] = w_sf[
                                    expert, sf_rows[c], T.min(k + 2 + lane, num_blocks - 1)
                                ]
                T.call_extern("handle", "tlmm_wait_product", acc.raw.data)
                if (q, group) == (units[-1], groups - 1):
                    operands.release()
                left, right = (2 * (group * len(columns) + c) for c in sf_of[q])
                T.call_extern(
                    "handle",
                    "tlmm_promote",
                    acc.total[q].data,
                    acc.raw.data,
                    scale[left],
                    scale[left + 1],
                    scale[right],
                    scale[right + 1],
                )
