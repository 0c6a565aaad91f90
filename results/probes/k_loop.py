r"""A K loop alone: what promotion and row scales cost beside WGMMA, in SM clocks.

    python results/probes/k_loop.py build PROBE.so    compile (nvcc, no GPU needed)
    python results/probes/k_loop.py run PROBE.so      check against torch, then count, on an H200

A persistent kernel of 132 blocks multiplies 49,152 x 4096 by 3840 x 4096 e4m3, promoted every 128
columns with a scale a row. One thread fills the ring by bulk copies of pre-tiled, swizzled
operands; there is no epilogue. A variant is

    shape       warpgroups x columns of a product x products a K block; each warpgroup has 64 rows
    promotion   none, add (no scale), fma (FFMAs of one scale in a row), mixed (as columns come)
    scales      none a K block (constant), loaded under the first product (late), a product ahead
                (early)

and its figure the clocks of the launch over those of its products, 256 for 64 x 128 x 128. The text
does not say in which order ptxas puts FFMAs and loads: `nvdisasm` does.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

M, N, K = 49_152, 3840, 4096
SECONDS = 0.15
PROMOTIONS = ("none", "add", "fma", "mixed")
SCALES = ("constant", "late", "early")
OURS = (2, 128, 2)
VARIANTS = [
    *((OURS, p, s) for p in ("none", "add", "fma") for s in ("constant", "early")),
    *((OURS, p, "late") for p in ("add", "fma")),
    (OURS, "mixed", "early"),
    *(
        (shape, p, "early")
        for shape in ((2, 192, 1), (3, 128, 1), (1, 128, 2))
        for p in ("add", "fma")
    ),
]
STAGES = 4

CUDA = r"""
#include <stdint.h>
typedef unsigned u;
#define D __device__ __forceinline__
D u smem(const void* p) { return (u)__cvta_generic_to_shared(p); }
D u uniform(u v) { return __shfl_sync(~0u, v, 0); }
D float lds(u at) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory"); return v; }
D void wait_full(u bar, int par) { asm volatile("{.reg .pred p;\nw: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
  "@!p bra w;}" :: "r"(bar), "r"(par) : "memory"); }
D int is_full(u bar, int par) { int ok; asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
  "selp.s32 %0, 1, 0, p;}" : "=r"(ok) : "r"(bar), "r"(par) : "memory"); return ok; }
D void arrive(u bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory"); }
D void load(void* to, const void* from, u n, u bar) { asm volatile(
  "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
  :: "r"(smem(to)), "l"(from), "r"(n), "r"(bar) : "memory"); }
D u descriptor(const void* p) { return uniform((smem(p) >> 4 & 0x3fff) | 0x10000); }
template <int W, int N, int P, int PROMOTION, int SCALES>
__global__ void __launch_bounds__(128 * W + 128, 1)
k_loop(const uint8_t* a, const uint8_t* b, const float* sf, float* c, int m, int n, int k, long long* clocks) {
  constexpr int BM = 64 * W, BN = N * P, R = N / 2;
  extern __shared__ __align__(1024) uint8_t ring_a[];
  uint8_t* ring_b = ring_a + STAGES * BM * 128;
  float* ring_sf = (float*)(ring_b + STAGES * BN * 128);
  uint64_t* bars = (uint64_t*)(ring_sf + STAGES * BM);
  int tx = threadIdx.x, tiles_n = n / BN, tiles = m / BM * tiles_n, blocks = k / 128;
  long long start = clock64();
  if (tx == 0) for (int i = 0; i < STAGES; i++) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(smem(bars + i)));
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(smem(bars + STAGES + i)), "r"(4 * W));
    asm volatile("fence.mbarrier_init.release.cluster;"); }
  __syncthreads();
  if (tx < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    int stage = 0, par = 1;
    if (tx == 0) for (int t = blockIdx.x; t < tiles; t += gridDim.x)
      for (int i = 0; i < blocks; i++) {
        u full = smem(bars + stage);
        wait_full(smem(bars + STAGES + stage), par);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(full), "r"((BM + BN) * 128 + BM * 4));
        load(ring_a + stage * BM * 128, a + ((size_t)(t / tiles_n) * blocks + i) * BM * 128, BM * 128, full);
        load(ring_b + stage * BN * 128, b + ((size_t)(t % tiles_n) * blocks + i) * BN * 128, BN * 128, full);
        load(ring_sf + stage * BM, sf + ((size_t)(t / tiles_n) * blocks + i) * BM, BM * 4, full);
        if (++stage == STAGES) stage = 0, par ^= 1; }
  } else {
    if (W == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int wg = uniform(tx / 128 - 1), lane = tx % 32, row = wg * 64 + tx % 128 / 32 * 16 + lane / 4, stage = 0, par = 0;
    float raw[R], total[P][R];
    u full = uniform(smem(bars)), empty = full + STAGES * 8, at = smem(ring_sf) + row * 4;
    u da = descriptor(ring_a) + wg * 512, db = descriptor(ring_b);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      #pragma unroll
      for (int q = 0; q < P; q++)
        #pragma unroll
        for (int v = 0; v < R; v++) total[q][v] = 0;
      int ok = 0; stage = uniform(stage); par = uniform(par);
      float low = sf[row], high = sf[row + 8], next_low, next_high;
      for (int i = 0; i < blocks; i++) {
        if (!ok) {
          wait_full(full + stage * 8, par);
          if (SCALES == 2) next_low = lds(at + stage * BM * 4), next_high = lds(at + stage * BM * 4 + 32); }
        if (SCALES == 2) low = next_low, high = next_high;
        int left = stage;
        #pragma unroll
        for (int q = 0; q < P; q++) {
          product(raw, da + stage * BM * 8, db + stage * BN * 8 + q * N * 8);
          if (q == 0 && SCALES == 1) low = lds(at + stage * BM * 4), high = lds(at + stage * BM * 4 + 32);
          if (q == P - 1) {
            par ^= stage == STAGES - 1; stage = stage == STAGES - 1 ? 0 : stage + 1;
            ok = is_full(full + stage * 8, par);
            if (ok && SCALES == 2) next_low = lds(at + stage * BM * 4), next_high = lds(at + stage * BM * 4 + 32); }
          wait_product(raw);
          if (q == P - 1) { __syncwarp(); if (lane == 0) arrive(empty + left * 8); }
          if (PROMOTION == 0) total[q][0] += raw[0];
          #pragma unroll
          for (int v = 0; v < R; v++) {
            if (PROMOTION == 1) total[q][v] += raw[v];
            if (PROMOTION == 3) total[q][v] += raw[v] * (v / 2 % 2 ? high : low); }
          #pragma unroll
          for (int h = 0; h < 2; h++)
            #pragma unroll
            for (int v = 0; v < R; v++)
              if (PROMOTION == 2 && v / 2 % 2 == h)
                asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(total[q][v]) : "f"(raw[v]), "f"(h ? high : low)); } }
      #pragma unroll
      for (int q = 0; q < P; q++)
        #pragma unroll
        for (int v = 0; v < R; v++) {
          asm volatile("" :: "f"(total[q][v]));
          if (c) c[(size_t)(t / tiles_n * BM + row + v / 2 % 2 * 8) * n + t % tiles_n * BN + q * N + v / 4 * 8 + lane % 4 * 2
                   + v % 2] = total[q][v]; } } }
  __syncthreads();
  if (tx == 0) atomicMax((unsigned long long*)clocks, (unsigned long long)(clock64() - start)); }
"""


def helpers(columns: int) -> str:
    """Product and wait for 64 x `columns` accumulators."""
    r = columns // 2
    names = ", ".join(f"%{i}" for i in range(r))
    raw = ", ".join(f'"+f"(d[{i}])' for i in range(r))
    return f"""
template <bool ADD> D void wgmma(float (&d)[{r}], u a, u b) {{
  unsigned long long high = 0x40000040ull << 32;
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{r + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{names}}}, %{r}, %{r + 1}, p, 1, 1;}}"
    : {raw} : "l"(high | a), "l"(high | b), "n"(ADD)); }}
D void product(float (&d)[{r}], u a, u b) {{
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  wgmma<false>(d, a, b); wgmma<true>(d, a + 2, b + 2); wgmma<true>(d, a + 4, b + 4); wgmma<true>(d, a + 6, b + 6);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
D void wait_product(float (&d)[{r}]) {{ asm volatile("wgmma.wait_group.sync.aligned 0;" : {raw} :: "memory"); }}
"""


def source() -> str:
    """The CUDA text: all variants and a launcher by number."""
    launches = ""
    for number, ((w, n, p), promotion, scales) in enumerate(VARIANTS):
        smem = STAGES * ((64 * w + n * p) * 128 + 64 * w * 4 + 16)
        call = f"k_loop<{w}, {n}, {p}, {PROMOTIONS.index(promotion)}, {SCALES.index(scales)}>"
        launches += f"""
  if (number == {number}) {{
    cudaFuncSetAttribute({call}, cudaFuncAttributeMaxDynamicSharedMemorySize, {smem});
    {call}<<<132, {128 * w + 128}, {smem}>>>(a, b, sf, c, m, n, k, clocks); }}"""
    head, kernel = CUDA.split("template <int W,", 1)
    products = "".join(helpers(n) for n in sorted({shape[1] for shape, *_ in VARIANTS}))
    return f"""{head}{products}template <int W,{kernel}
extern "C" int launch(int number, const uint8_t* a, const uint8_t* b, const float* sf, float* c, int m, int n, int k,
                      long long* clocks) {{{launches}
  return (int)cudaGetLastError(); }}
""".replace("STAGES", str(STAGES))


def build(library: str) -> None:
    """Compile the variants into a shared library."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "k_loop.cu"
        text.write_text(source())
        flags = [
            "-O3",
            "-gencode",
            "arch=compute_90a,code=sm_90a",
            "-shared",
            "-Xcompiler",
            "-fPIC",
        ]
        subprocess.run(["nvcc", *flags, "-o", library, str(text)], check=True)


def run(library: str) -> None:
    """Check the variants that promote with their scales, and count clocks of all."""
    import torch

    launch = ctypes.CDLL(str(Path(library).resolve())).launch
    generator = torch.Generator("cuda").manual_seed(0)

    def operand(rows: int) -> torch.Tensor:
        x = torch.randn((rows, K), device="cuda", generator=generator)
        return x.to(torch.float8_e4m3fn)

    def tiled(x: torch.Tensor, rows: int) -> torch.Tensor:
        """(R, K) bytes as (R / rows, K / 128, rows, 128), 16-byte chunk c of row r at c xor r % 8."""
        t = x.view(torch.uint8).view(-1, rows, K // 128, 8, 16).transpose(1, 2)
        at = torch.arange(8, device="cuda") ^ torch.arange(rows, device="cuda")[:, None] % 8
        return t.gather(3, at[..., None].expand(t.shape)).contiguous()

    a, b = operand(M), operand(N)
    sf = torch.rand((M, K // 128), device="cuda", generator=generator) + 0.5
    clocks = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows = 768
    scaled = (a[:rows].float().view(rows, -1, 128) * sf[:rows, :, None]).view(rows, K)
    want = scaled @ b.float().T
    print("| shape | promotion | scales | clocks / products' | us |\n|---|---|---|---|---|")
    for number, ((w, n, p), promotion, scales) in enumerate(VARIANTS):
        held = (
            tiled(a, 64 * w),
            tiled(b, n * p),
            sf.view(-1, 64 * w, K // 128).transpose(1, 2).contiguous(),
        )
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in held]
        counter = ctypes.c_void_p(clocks.data_ptr())
        if promotion in ("fma", "mixed") and scales != "constant":
            y = torch.zeros((rows, N), device="cuda")
            assert (
                launch(number, *pointers, ctypes.c_void_p(y.data_ptr()), rows, N, K, counter) == 0
            )
            torch.cuda.synchronize()
            assert (y - want).abs().max() < 1e-3 * want.abs().max(), number
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launches = int(SECONDS / 1.4e-3)
        for _ in ("warm", "timed"):
            clocks.zero_()
            begin.record()
            for _ in range(launches):
                assert launch(number, *pointers, None, M, N, K, counter) == 0
            end.record()
            torch.cuda.synchronize()
        waves = -(-(M // (64 * w)) * (N // (n * p)) // 132)
        products = waves * (K // 128) * 2 * n * p * w
        us = begin.elapsed_time(end) * 1e3 / launches
        print(
            f"| {w} x {n} x {p} | {promotion} | {scales} | {clocks.item() / products:.3f} | {us:.0f} |"
        )


if __name__ == "__main__":
    {"build": build, "run": run}[sys.argv[1]](sys.argv[2])
