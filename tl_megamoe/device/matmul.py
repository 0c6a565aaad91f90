"""The scaled FP8 matrix product that linear1 and linear2 share.

A unit is 64 rows of A times 128 rows of B: one WGMMA tile of one warpgroup, kept as two 64 x 64
FP32 accumulators (`left`, `right`: gate and up of linear1, column halves of linear2). Each K block
is multiplied into `raw` and then promoted: accumulator += raw * (row scale * weight scale).

split of the warpgroups     units of a warpgroup            A rows of unit q     B rows
columns (block_n 256)       block_m / 64, one K loop        64 q                 128 by warpgroup
rows (block_n 128)          one a K loop                    64 by warpgroup      all 128

One raw accumulator: with two in flight in one warpgroup ptxas serialises WGMMA (C7514).
"""

from __future__ import annotations

import tilelang.language as T

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
"""


@T.meta_class
class Accumulators:
    """Registers of one math warpgroup: `MAX_UNITS` units, the raw product, the row scales.

    The layout of `left` and `right` is inferred from a half of `raw`: 64 values a thread, of which
    the first 32 exist. `T.reduce_absmax` would read all 64 (TileLang 0.1.15), hence `row_maxima`.
    """

    def __init__(self, units: int):
        self.raw = T.alloc_fragment((64, 128), "float32")
        self.left = tuple(T.alloc_fragment((64, 64), "float32") for _ in range(units))
        self.right = tuple(T.alloc_fragment((64, 64), "float32") for _ in range(units))
        self.row_sf = T.alloc_fragment((64,), "float32")


def row_maxima(half, amax):
    """amax <- largest magnitude of each row of an accumulator half; NaN is left out."""
    return T.call_extern("handle", "tlmm_row_maxima", half.data, amax.data)


@T.macro
def scaled_k_loop(ring, cursor, acc, units, a_rows, b_row, num_k, w_sf, at, on_first_k):
    """Multiply one tile's K blocks and promote them. Role: math (128 threads).

    Args:
        ring: operands, filled by the load role in the same order.
        cursor: this role's place in the ring.
        acc: accumulators; those of `units` are overwritten.
        units: unit indices computed from each K block (Python tuple).
        a_rows: first A row of each unit.
        b_row: first B row of this warpgroup.
        num_k: K blocks.
        w_sf: weight scales (expert, N/128, K/128).
        at: (expert, scale row of the left accumulators, of the right ones or None when equal).
        on_first_k: its `fetch()` is emitted under the first K block's product; or None.
    """
    expert, left_row, right_row = at
    left_sf = T.alloc_var("float32")
    right_sf = T.alloc_var("float32")
    next_left_sf = T.alloc_var("float32")
    next_right_sf = T.alloc_var("float32")
    next_left_sf = w_sf[expert, left_row, 0]
    if right_row is not None:
        next_right_sf = w_sf[expert, right_row, 0]
    for q in units:
        T.clear(acc.left[q])
        T.clear(acc.right[q])
    for k in T.serial(num_k):
        left_sf = next_left_sf
        right_sf = left_sf if right_row is None else next_right_sf
        ring.wait(cursor)
        for q in units:
            T.wgmma_gemm(
                ring.a[cursor.stage[0], a_rows[q] : a_rows[q] + 64, :],
                ring.b[cursor.stage[0], b_row : b_row + 128, :],
                acc.raw,
                transpose_B=True,
                clear_accum=True,
            )
            for i in T.Parallel(64):
                acc.row_sf[i] = ring.a_sf[cursor.stage[0], a_rows[q] + i]
            if q == units[0]:
                # The next K block's weight scales, under this product.
                next_left_sf = w_sf[expert, left_row, T.min(k + 1, num_k - 1)]
                if right_row is not None:
                    next_right_sf = w_sf[expert, right_row, T.min(k + 1, num_k - 1)]
                if on_first_k is not None:
                    if k == 0:
                        on_first_k.fetch()
            T.wait_wgmma(0)
            if q == units[-1]:
                ring.release(cursor)
            for i, j in T.Parallel(64, 64):
                acc.left[q][i, j] += acc.raw[i, j] * (acc.row_sf[i] * left_sf)
            for i, j in T.Parallel(64, 64):
                acc.right[q][i, j] += acc.raw[i, j + 64] * (acc.row_sf[i] * right_sf)
        cursor.advance()
