"""The scaled FP8 matrix product that linear1 and linear2 share.

A unit is 64 rows of A times 128 rows of B: one WGMMA tile of one warpgroup, kept as two 64 x 64
FP32 accumulators (`left`, `right`: gate and up of linear1, column halves of linear2). Each K block
is multiplied into `raw` and then promoted: accumulator += raw * (row scale * weight scale). With 64
columns an activation scale, a K block is two such products.

warpgroups        units of a warpgroup            A rows of unit q     128-row block of B
columns split     block_m / 64, one K loop        64 q                 the warpgroup's
rows split        one a K loop                    64 by warpgroup      the only one
pingpong          2, one K loop, own tile         all 64               q

One raw accumulator: with two in flight in one warpgroup ptxas serialises WGMMA (C7514).
"""

from __future__ import annotations

from dataclasses import dataclass

import tilelang.language as T

from ..schedule import Schedule
from .plan import Plan

MAX_UNITS = 2

MATMUL_CUDA = r"""
// Largest magnitudes of the two rows a thread holds of a 64 x 64 half of a WGMMA accumulator (PTX ISA: value
// v of a thread is in row half v / 2 % 2; the 4 lanes of a quad share their rows). fmaxf drops NaN.
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
// Below, the lane is read by volatile assembly: from threadIdx the compiler computes the staging addresses once for
// all tiles, keeps them under the K loops and spills (10 registers in pingpong mode).
TLMM_DEV unsigned tlmm_lane() { unsigned lane; asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); return lane; }
// The 16 rows x 64 columns of a warp's half of an accumulator as e4m3 into 1 KiB of its own staging. The 16-byte
// chunks of a staged row are swizzled by its row pair, else every second row would share banks.
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
// Staged codes to rows `stride` bytes apart: 16-byte stores, 4 lanes a row.
TLMM_DEV void tlmm_store_codes(const void* staging, void* out, long long stride) {
  unsigned lane = tlmm_lane(), row = lane >> 2, quad = lane & 3, turn = row >> 1 & 3;
  const char* s = (const char*)staging + row * 64 + ((quad ^ turn) << 4);
  #pragma unroll
  for (int step = 0; step < 2; step++)
    *(uint4*)((char*)out + (step * 8 + row) * stride + quad * 16) = *(const uint4*)(s + step * 512); }
// The same rows as BF16 into 2 KiB of the warp's staging, 16-byte chunks swizzled by row.
TLMM_DEV void tlmm_stage_rows(const float* half, void* staging) {
  unsigned lane = tlmm_lane(), row = lane >> 2, quad = lane & 3;
  char* s = (char*)staging + row * 128 + quad * 4;
  #pragma unroll
  for (int v = 0; v < 32; v += 4) {
    unsigned low, high;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(half[v + 1]), "f"(half[v]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(half[v + 3]), "f"(half[v + 2]));
    *(unsigned*)(s + ((v >> 2 ^ row) << 4)) = low;
    *(unsigned*)(s + 1024 + ((v >> 2 ^ row) << 4)) = high; }
  __syncwarp(); }
// One staged row to `to`, 8 lanes a row: this lane's 16 bytes of row `row`.
TLMM_DEV void tlmm_store_row(long long to, const void* staging, int row) {
  unsigned chunk = tlmm_lane() & 7;
  *(uint4*)(to + chunk * 16) = *(const uint4*)((const char*)staging + row * 128 + ((chunk ^ (row & 7)) << 4)); }
"""


@dataclass(frozen=True, slots=True)
class Share:
    """What one math warpgroup computes of a tile.

    Attributes:
        loops: units of each K loop.
        a_row: first A row of each unit, also its first row within the tile.
        b_block: 128-row block of B of each unit.
        half: which half of the tile's columns each unit holds.
        splits_columns: whether the other warpgroup holds the other columns of the same rows.
    """

    loops: tuple[tuple[int, ...], ...]
    a_row: tuple[int, int]
    b_block: tuple[int, int]
    half: tuple[int, int]
    splits_columns: bool

    @classmethod
    def of(cls, schedule: Schedule, linear: int, wg: int) -> Share:
        """The share of warpgroup `wg` in a tile of linear1 or linear2 (`linear` is 1 or 2)."""
        if schedule.pingpong:
            return cls(((0, 1),), (0, 0), (0, 1), (0, 1), False)
        block_n = schedule.linear1_block_n if linear == 1 else schedule.linear2_block_n
        if block_n == 256:
            units = tuple(range(schedule.m_halves))
            return cls((units,), (0, 64), (wg, wg), (wg, wg), True)
        # A linear1 tile holds a whole scale group of 128 columns: two K loops of 64 gate and 64 up.
        loops = ((0,), (1,)) if linear == 1 else ((0,),)
        return cls(loops, (wg * 64, wg * 64), (0, 0), (0, 1), False)

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(q for loop in self.loops for q in loop)


@T.meta_class
class Accumulators:
    """Registers of one math warpgroup: `MAX_UNITS` units, the raw product, the row scales.

    The layout of `left` is inferred from the first half of `raw`: 64 values a thread, of which the
    first 32 exist, in WGMMA's order (`T.reduce_absmax` would read all 64, TileLang 0.1.15). The
    helpers below that take a half's registers rely on that order; `right` has another one.
    """

    def __init__(self, units: int):
        self.raw = T.alloc_fragment((64, 128), "float32")
        self.left = tuple(T.alloc_fragment((64, 64), "float32") for _ in range(units))
        self.right = tuple(T.alloc_fragment((64, 64), "float32") for _ in range(units))
        self.row_sf = T.alloc_fragment((64,), "float32")


def row_maxima(half, amax):
    """amax <- largest magnitude of each row of an accumulator half; NaN is left out."""
    return T.call_extern("handle", "tlmm_row_maxima", half.data, amax.data)


def stage_codes(half, staging):
    """A warp's 16 rows of an accumulator half as e4m3 into 1 KiB of its own staging.

    Args:
        half: (64, 64) float32 accumulators, scaled to the range of e4m3 already.
        staging: address of 1 KiB that only this warp uses.
    """
    return T.call_extern("handle", "tlmm_stage_codes", half.data, staging)


def store_codes(staging, out, stride: int):
    """What `stage_codes` staged (16 rows of 64 columns) to global memory, behind a `sync_warp`.

    Args:
        staging: as there.
        out: address of the first row's first column.
        stride: bytes from row to row.
    """
    return T.call_extern("handle", "tlmm_store_codes", staging, out, T.int64(stride))


def stage_rows(half, staging):
    """A warp's 16 rows of an accumulator half as BF16 into 2 KiB of its own staging."""
    return T.call_extern("handle", "tlmm_stage_rows", half.data, staging)


def store_row(to_address, staging, row):
    """Row `row` of what `stage_rows` staged (64 columns) to a global address; 8 lanes a row."""
    return T.call_extern("handle", "tlmm_store_row", to_address, staging, row)


@T.macro
def scaled_k_loop(plan: Plan, ring, cursor, acc, share, units, num_k, w_sf, at, on_first_k):
    """Multiply one tile's K blocks and promote them. Role: math (128 threads).

    Args:
        plan: the program's.
        ring: operands, filled by the load role in the same order.
        cursor: this role's place in the ring.
        acc: accumulators; those of `units` are overwritten.
        share: where the units' operands lie in a stage.
        units: unit indices computed from each K block (Python tuple).
        num_k: (K blocks, activation scales of a row in each).
        w_sf: weight scales (expert, N/128, K/128).
        at: (expert, scale rows, (row of the left, row of the right accumulators) for each unit, as
            positions in `scale rows`).
        on_first_k: its `fetch()` is emitted under the first K block's product; or None.
    """
    expert, sf_rows, sf_of = at
    num_blocks, groups = num_k
    width = 128 // groups
    sf = tuple(T.alloc_var("float32") for _ in sf_rows)
    next_sf = tuple(T.alloc_var("float32") for _ in sf_rows)
    for r in tuple(range(len(sf_rows))):
        next_sf[r][0] = w_sf[expert, sf_rows[r], 0]
    for q in units:
        T.clear(acc.left[q])
        T.clear(acc.right[q])
    for k in T.serial(num_blocks):
        for r in tuple(range(len(sf_rows))):
            sf[r][0] = next_sf[r][0]
        ring.wait(cursor)
        for q in units:
            for group in tuple(range(groups)):
                first, last = group * width, (group + 1) * width
                T.wgmma_gemm(
                    ring.a[cursor.stage[0], share.a_row[q] : share.a_row[q] + 64, first:last],
                    ring.b[cursor.stage[0], share.b_block[q], :, first:last],
                    acc.raw,
                    transpose_B=True,
                    clear_accum=True,
                )
                for i in T.Parallel(64):
                    acc.row_sf[i] = ring.a_sf[cursor.stage[0], group, share.a_row[q] + i]
                if (q, group) == (units[0], 0):
                    # The next K block's weight scales, under this product.
                    for r in tuple(range(len(sf_rows))):
                        next_sf[r][0] = w_sf[expert, sf_rows[r], T.min(k + 1, num_blocks - 1)]
                    if on_first_k is not None:
                        if k == 0:
                            on_first_k.fetch()
                T.wait_wgmma(0)
                if (q, group) == (units[-1], groups - 1):
                    ring.release(cursor)
                for i, j in T.Parallel(64, 64):
                    acc.left[q][i, j] += acc.raw[i, j] * (acc.row_sf[i] * sf[sf_of[q][0]][0])
                for i, j in T.Parallel(64, 64):
                    acc.right[q][i, j] += acc.raw[i, j + 64] * (acc.row_sf[i] * sf[sf_of[q][1]][0])
        cursor.advance()
