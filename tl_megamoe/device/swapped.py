"""The scaled FP8 product with swapped operands: weights are WGMMA's M operand, rows its N operand.

A tile is that of cooperative mode, 256 rows of weights and the rows of a pool block, but a
warpgroup takes 128 rows of weights as two units of 64, and all rows of the block, in multiples of
16: `rows` of a tile follow what its block holds, so that a block of 3 rows costs 16, not 64.

unit   linear1                        linear2
0      gate, 64 of the tile's 128     output columns 0 .. 63 of the warpgroup's 128
1      the matching 64 up             output columns 64 .. 127

A thread's values are of many rows, two each in a unit, where a plain product has many columns of
two rows. So the row scales of a K block are `rows / 4` values, read and multiplied by the weight
scale under the product; maxima of a row are collected from all warps; and codes and BF16 rows are
transposed on their way to shared memory (stmatrix.trans).
"""

from __future__ import annotations

import tilelang.language as T

from ..schedule import ROW_STEP
from ..validity import SWAPPED_ROWS
from .matmul import in_out, operand_names
from .plan import Plan
from .report import fence_shared
from .ring import Operands

UNITS = (0, 1)


def _by_rows(statement) -> str:
    """`statement(rows)` for the template parameter N, of all values that it may have; no other
    compiles."""
    cases = [
        f"if constexpr (N == {n}) {statement(n)}"
        for n in range(ROW_STEP, SWAPPED_ROWS + 1, ROW_STEP)
    ]
    return "\n  else ".join((*cases, 'static_assert(N == 0, "rows of a tile");'))


def _wgmma(n: int) -> str:
    v = n // 2
    return (
        rf'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{v + 2}, 0;\n"'
        rf'"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{operand_names(v)}}}, '
        rf'%{v}, %{v + 1}, p, 1, 1;}}" : {in_out("raw", v)} : "l"(a), "l"(b), "n"(ADD));'
    )


def _wait(n: int) -> str:
    return (
        f'asm volatile("wgmma.wait_group.sync.aligned 0;" : {in_out("raw", n // 2)} :: "memory");'
    )


SWAPPED_CUDA = (
    r"""
// raw (64 x N) = or += 32 columns of 64 rows of weights times 32 of N rows.
template <int N, bool ADD>
TLMM_DEV void tlmm_wgmma_columns(float* raw, unsigned long long a, unsigned long long b) {
  """
    + _by_rows(_wgmma)
    + r""" }
// As tlmm_wait_product.
template <int N>
TLMM_DEV void tlmm_wait_columns(float* raw) {
  """
    + _by_rows(_wait)
    + r""" }
// raw = COUNT WGMMAs from the FIRST on of the 4 of a K block. The rows lie in rows of 128 bytes, or, where NARROW is not
// 0, as two blocks of rows of 64 bytes, NARROW x 16 bytes apart.
template <int N, int FIRST, int COUNT, int NARROW>
TLMM_DEV void tlmm_product_columns(float* raw, unsigned weights, unsigned rows) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; i++) {
    unsigned long long a = (unsigned long long)TLMM_ROWS_128B << 32 | (weights + i * 2);
    unsigned long long b = (unsigned long long)(NARROW ? TLMM_ROWS_64B : TLMM_ROWS_128B) << 32
      | (rows + (NARROW ? (i >> 1) * NARROW + (i & 1) * 2 : i * 2));
    if (i == FIRST) tlmm_wgmma_columns<N, false>(raw, a, b);
    else tlmm_wgmma_columns<N, true>(raw, a, b); }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Row scales of a thread's rows among N, from `at` on.
template <int N>
TLMM_DEV void tlmm_load_scales(float* row_sf, unsigned at) {
  #pragma unroll
  for (int i = 0; i < N / 4; i += 2)
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
      : "=f"(row_sf[i]), "=f"(row_sf[i + 1]) : "r"(at + i * 16) : "memory"); }
// scale = row scale * weight scale.
template <int N>
TLMM_DEV void tlmm_weigh_scales(float* scale, const float* row_sf, float weight_sf) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++)
    asm volatile("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(scale[i]) : "f"(row_sf[i]), "f"(weight_sf)); }
// Ends a basic block, by a branch that is never taken (a grid has blocks): ptxas would move what is to be done under a
// product between its WGMMAs, or behind the wait for it.
TLMM_DEV void tlmm_end_block() {
  asm volatile("{.reg .pred p; .reg .u32 n;\nagain: mov.u32 n, %nctaid.x; setp.eq.u32 p, n, 0;\n@p bra again;}"
    ::: "memory"); }
// total += raw * scale. Values 4 i + s and 4 i + 2 + s are of one row.
template <int N>
TLMM_DEV void tlmm_promote_columns(float* total, const float* raw, const float* scale) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      int v = (i >> 1) * 4 + (i & 1) + half * 2;
      asm volatile("fma.rn.ftz.f32 %0, %1, %2, %0;" : "+f"(total[v]) : "f"(raw[v]), "f"(scale[i])); } }
// values *= of[row] for the N rows.
template <int N>
TLMM_DEV void tlmm_scale_columns(float* values, const float* of) {
  #pragma unroll
  for (int i = 0; i < N / 8; i++) {
    float2 s = *(const float2*)(of + i * 8 + (tlmm_lane() & 3) * 2);
    values[4 * i] *= s.x; values[4 * i + 1] *= s.y; values[4 * i + 2] *= s.x; values[4 * i + 3] *= s.y; } }
// One step of a maximum over lanes: of LEFT rows that lanes `BIT` apart share, each keeps half, or all where they are odd.
// Returns the first that is left.
template <int LEFT, int BIT>
TLMM_DEV unsigned tlmm_halve(float* m) {
  bool upper = tlmm_lane() & BIT;
  const int half = LEFT / 2;
  if constexpr (LEFT % 2 == 0) {
    #pragma unroll
    for (int i = 0; i < half; i++) {
      float keep = upper ? m[i + half] : m[i], give = upper ? m[i] : m[i + half];
      m[i] = fmaxf(keep, __shfl_xor_sync(0xffffffffu, give, BIT)); }
    return upper ? half : 0;
  } else {
    #pragma unroll
    for (int i = 0; i < LEFT; i++) m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], BIT));
    return 0; } }
// Largest magnitudes of the N rows over a warp's 16 columns, to maxima[row]. Lanes whose numbers differ by multiples of
// 4 hold the same rows. fmaxf drops NaN.
template <int N>
TLMM_DEV void tlmm_column_maxima(const float* values, float* maxima) {
  unsigned lane = tlmm_lane();
  float m[N / 4];
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int v = (i >> 1) * 4 + (i & 1);
    m[i] = fmaxf(fabsf(values[v]), fabsf(values[v + 2])); }
  unsigned first = tlmm_halve<N / 4, 16>(m);
  first += tlmm_halve<N / 8, 8>(m);
  first += tlmm_halve<N / 16, 4>(m);
  const bool odd = N / 16 % 2;
  if (!odd || (lane & 4) == 0)
    #pragma unroll
    for (int i = 0; i < (odd ? N / 16 : N / 32); i++) {
      unsigned at = first + i;
      maxima[(at >> 1) * 8 + (lane & 3) * 2 + (at & 1)] = m[i]; } }
// The largest of COUNT warps' maxima of a row, `stride` apart.
template <int COUNT>
TLMM_DEV float tlmm_largest(const float* maxima, int stride) {
  float largest = 0.0f;
  #pragma unroll
  for (int warp = 0; warp < COUNT; warp++) largest = fmaxf(largest, maxima[warp * stride]);
  return largest; }
// N rows x 16 columns of a warp, times of[row], as e4m3 into its chunk of rows of 64 bytes, whose chunks are swizzled by
// row pair, as a WGMMA operand wants them. A store transposes pairs of bytes, columns c and c + 8; then they are parted.
template <int N>
TLMM_DEV void tlmm_stage_columns(const float* values, const float* of, void* staging) {
  unsigned lane = tlmm_lane(), warp = (unsigned)tlmm_thread() / 32 % 4, base = tlmm_smem(staging);
  #pragma unroll
  for (int i = 0; i < N / 16; i++) {
    unsigned r[2];
    #pragma unroll
    for (int side = 0; side < 2; side++) {
      const float* v = values + i * 8 + side * 4;
      float2 s = *(const float2*)(of + i * 16 + side * 8 + (lane & 3) * 2);
      unsigned short even, odd;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(even) : "f"(v[2] * s.x), "f"(v[0] * s.x));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(odd) : "f"(v[3] * s.y), "f"(v[1] * s.y));
      r[side] = even | (unsigned)odd << 16; }
    unsigned row = i * 16 + (lane & 15);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
      :: "r"(base + row * 64 + ((warp ^ row >> 1 & 3) << 4)), "r"(r[0]), "r"(r[1]) : "memory"); }
  __syncwarp();
  #pragma unroll
  for (int i = 0; i < N; i += 32) {
    unsigned row = i + lane;
    if (row < N) {
      uint4* chunk = (uint4*)((char*)staging + row * 64 + ((warp ^ row >> 1 & 3) << 4));
      uint4 p = *chunk;
      *chunk = make_uint4(__byte_perm(p.x, p.y, 0x6420), __byte_perm(p.z, p.w, 0x6420),
                          __byte_perm(p.x, p.y, 0x7531), __byte_perm(p.z, p.w, 0x7531)); } } }
// N rows x 16 columns of a warp as BF16 into its two chunks of rows of 128 bytes, whose chunks are swizzled by row.
template <int N>
TLMM_DEV void tlmm_stage_outputs(const float* total, void* staging) {
  unsigned lane = tlmm_lane(), warp = (unsigned)tlmm_thread() / 32 % 4, base = tlmm_smem(staging);
  #pragma unroll
  for (int i = 0; i < N / 16; i++) {
    const float* v = total + i * 8;
    unsigned r[4];
    #pragma unroll
    for (int m = 0; m < 4; m++)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[m]) : "f"(v[2 * m + 1]), "f"(v[2 * m]));
    unsigned row = i * 16 + (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(base + row * 128 + ((chunk ^ row & 7) << 4)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); } }
// Staged rows of 128 bytes, 8 lanes a row: row 16 s + 4 warp + lane / 8 to byte `offset` of to[s], if that is not null.
template <int N>
TLMM_DEV void tlmm_store_outputs(const int64_t* to, const void* staging, int offset) {
  unsigned lane = tlmm_lane(), warp = (unsigned)tlmm_thread() / 32 % 4, chunk = lane & 7, row = warp * 4 + (lane >> 3);
  const char* from = (const char*)staging + row * 128 + ((chunk ^ row & 7) << 4);
  uint4 piece[N / 16];
  #pragma unroll
  for (int s = 0; s < N / 16; s++) piece[s] = *(const uint4*)(from + s * 2048);
  #pragma unroll
  for (int s = 0; s < N / 16; s++)
    if (to[s]) *(uint4*)(to[s] + offset + chunk * 16) = piece[s]; }
"""
)
SWAPPED_SWIGLU_CUDA = r"""
// gate <- silu(gate) * up, to the bit as tlmm_swiglu, whose four values of a reciprocal are columns c, c + 1, c + 8 and
// c + 9 of a row: a thread has two of them, and the other two are 4 lanes from it.
template <int N>
TLMM_DEV void tlmm_swiglu_columns(float* gate, const float* up) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int v = (i >> 1) * 4 + (i & 1);
    float power[2], below[2], other[2], both[2], all;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power[h])
        : "f"(fabsf(gate[v + 2 * h]) * -1.4426950408889634f));  // log2(e)
      below[h] = 1.0f + power[h];
      other[h] = __shfl_xor_sync(0xffffffffu, below[h], 4);
      both[h] = below[h] * other[h]; }
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(all) : "f"(both[0] * both[1]));
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float g = gate[v + 2 * h];
      gate[v + 2 * h] = g * (g < 0.0f ? power[h] : 1.0f) * (all * both[1 - h] * other[h]) * up[v + 2 * h]; } } }
"""
"""With fast_math alone."""


@T.meta_class
class ColumnOperands(Operands):
    """The ring as a math warpgroup reads it with swapped operands: the scales of a K block are
    those of all of the tile's rows that a thread has.

    Attributes:
        row_sf: by group, `rows / 4` values: of rows 8 i + 2 (lane % 4) and the next.
    """

    def __init__(self, ring, groups: int, rows: int):
        self.rows = rows
        super().__init__(ring, 0, groups)

    def alloc_scales(self):
        return tuple(T.alloc_local((self.rows // 4,), "float32") for _ in range(self.groups))

    def first_scale(self):
        return T.get_thread_binding() % 4 * 2

    @T.inline
    def forget_scales(self):
        """Overwrite the scales: else those of all tiles before are kept in registers, since the
        loop reads the first ones under a condition."""
        for group in tuple(range(self.groups)):
            for v in T.unroll(self.rows // 4):
                self.row_sf[group][v] = 0.0

    @T.inline
    def read_scales(self, cursor):
        """Read the row scales of the stage, which is full."""
        for group in tuple(range(self.groups)):
            T.call_extern(
                "handle",
                f"tlmm_load_scales<{self.rows}>",
                self.row_sf[group].data,
                self.scales_at(cursor, group),
            )


def end_block():
    """Keep what is above here from what is below."""
    return T.call_extern("handle", "tlmm_end_block")


@T.macro
def swapped_k_loop(plan: Plan, ring, cursor, acc, wg, rows, num_k, w_sf, at, beside, gathered):
    """Multiply one tile's K blocks and promote them. Role: math (128 threads).

    Args:
        plan, ring, cursor, num_k, w_sf, beside: as for `scaled_k_loop`.
        acc: accumulators; the first `rows / 2` values of both totals are overwritten.
        wg: the warpgroup, which multiplies the 128-row block of weights of that number.
        rows: of the tile, a Python int.
        at: (expert, (scale row of unit 0, that of unit 1) or one for both).
        gathered: None, or whether this launch's rows come by cp.async, whose writes WGMMA sees
            behind a fence.
    """
    expert, sf_rows = at
    num_blocks, groups, narrow = num_k
    wgmmas = 4 // groups
    apart = plan.schedule.block_m * 4 if narrow else 0
    columns = tuple(range(len(sf_rows)))
    lane = T.get_thread_binding() % 32
    lane_sf = tuple(T.alloc_var("float32") for _ in columns)
    sf = tuple(T.alloc_var("float32") for _ in columns)
    # A product of its own: what tiles of other sizes leave in a shared one makes ptxas serialise.
    raw = T.alloc_local((rows // 2,), "float32")
    scale = T.alloc_local((rows // 4,), "float32")
    for c in columns:
        lane_sf[c][0] = w_sf[expert, sf_rows[c], T.min(lane, num_blocks - 1)]
    for u in UNITS:
        for v in T.unroll(rows // 2):
            acc.total[u][v] = 0.0
    operands = ColumnOperands(ring, groups, rows)
    operands.enter(cursor)
    operands.forget_scales()
    for c in columns:
        sf[c][0] = T.call_extern("float32", "tlmm_lane_value", lane_sf[c][0], 0)
    next_sf = tuple(T.alloc_var("float32") for _ in columns)
    rows_at = T.alloc_var("uint32")
    weights_at = T.alloc_var("uint32")
    products = tuple((u, group) for u in UNITS for group in range(groups))
    for k in T.serial(num_blocks):
        if operands.full[0] == 0:
            operands.wait(cursor)
            operands.read_scales(cursor)
        if gathered is not None:
            if gathered:
                fence_shared()
        rows_at = operands.a_at[0]
        weights_at = operands.b_at[0] + T.Cast("uint32", wg * 1024)
        for u, group in products:
            T.call_extern(
                "handle",
                f"tlmm_product_columns<{rows}, {group * wgmmas}, {wgmmas}, {apart}>",
                raw.data,
                weights_at + T.uint32(u * 512),
                rows_at,
            )
            end_block()
            # Both units of linear2 share their scales, unless another group's come between.
            if u == 0 or len(columns) > 1 or groups > 1:
                T.call_extern(
                    "handle",
                    f"tlmm_weigh_scales<{rows}>",
                    scale.data,
                    operands.row_sf[group].data,
                    sf[u % len(columns)][0],
                )
            if (u, group) == products[0]:
                for c in columns:
                    next_sf[c][0] = T.call_extern(
                        "float32", "tlmm_lane_value", lane_sf[c][0], k + 1
                    )
                operands.advance(cursor)
                if k + 1 < num_blocks:
                    operands.test(cursor)
                if k == min(1, num_blocks - 1):
                    beside.under_product()
            elif (u, group) == products[-1]:
                for c in columns:
                    sf[c][0] = next_sf[c][0]
                if num_blocks > 32:
                    if k % 32 == 30:
                        for c in columns:
                            lane_sf[c][0] = w_sf[
                                expert, sf_rows[c], T.min(k + 2 + lane, num_blocks - 1)
                            ]
                if operands.full[0] == 1:
                    operands.read_scales(cursor)
            else:
                end_block()
            T.call_extern("handle", f"tlmm_wait_columns<{rows}>", raw.data)
            if (u, group) == products[-1]:
                operands.release()
            T.call_extern(
                "handle",
                f"tlmm_promote_columns<{rows}>",
                acc.total[u].data,
                raw.data,
                scale.data,
            )


def scale_columns(rows: int, values, of):
    """values *= of[row], where `of` is the first of `rows` floats in shared memory."""
    return T.call_extern("handle", f"tlmm_scale_columns<{rows}>", values.data, T.address_of(of))


def column_maxima(rows: int, values, maxima):
    """maxima[row] <- largest magnitude of a row over the warp's 16 columns; NaN is left out."""
    return T.call_extern("handle", f"tlmm_column_maxima<{rows}>", values.data, T.address_of(maxima))


def largest_of_warps(warps: int, maxima, stride: int):
    """The largest of `warps` values in shared memory, `stride` apart."""
    return T.call_extern("float32", f"tlmm_largest<{warps}>", T.address_of(maxima), stride)


def stage_columns(rows: int, values, of, staging):
    """A warpgroup's 64 columns times of[row] as e4m3 into rows of 64 bytes, of which each warp
    fills its own chunks."""
    return T.call_extern(
        "handle",
        f"tlmm_stage_columns<{rows}>",
        values.data,
        T.address_of(of),
        T.address_of(staging),
    )


def stage_outputs(rows: int, total, staging):
    """A warpgroup's 64 columns of all rows as BF16 into rows of 128 bytes, of which each warp fills
    its own chunks."""
    return T.call_extern("handle", f"tlmm_stage_outputs<{rows}>", total.data, T.address_of(staging))


def store_outputs(rows: int, to, staging, offset):
    """What `stage_outputs` staged to byte `offset` of its rows: lane l stores a piece of row
    `16 s + 4 warp + l // 8` to address `to[s]`, and nothing where that is 0."""
    return T.call_extern(
        "handle", f"tlmm_store_outputs<{rows}>", to.data, T.address_of(staging), offset
    )
