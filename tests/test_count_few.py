"""Few routes counted by every block: the device text, on the host with a thread for each."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess

import pytest

from tl_megamoe.device.walk import first_blocks
from tl_megamoe.phases.dispatch import DISPATCH_CUDA, ENTRY_ROUTES
from tl_megamoe.shared_memory import FEW_COUNT_BYTES, MAX_FEW_STEPS

THREADS = 384
SHIM = """
#include <barrier>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>
#define TLMM_DEV static
constexpr int THREADS = 384;
struct Index { unsigned x; };
static thread_local Index threadIdx;
static int slots[THREADS];
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static std::unique_ptr<std::barrier<>> block;
static int tlmm_thread() { return (int)threadIdx.x; }
static int tlmm_load(const void* p) { return *(const int*)p; }
static void tlmm_bar(int, int) { block->arrive_and_wait(); }
static void __syncwarp() { warps[threadIdx.x / 32]->arrive_and_wait(); }
static int __popc(unsigned v) { return __builtin_popcount(v); }
template <class F> static auto exchange(int v, F read) {
  slots[threadIdx.x] = v; __syncwarp();
  auto found = read(slots + threadIdx.x / 32 * 32, (int)(threadIdx.x & 31)); __syncwarp();
  return found; }
static unsigned __match_any_sync(unsigned, int v) {
  return exchange(v, [v](int* warp, int) {
    unsigned same = 0;
    for (int l = 0; l < 32; l++) same |= (unsigned)(warp[l] == v) << l;
    return same; }); }
static int __shfl_up_sync(unsigned, int v, int d) {
  return exchange(v, [v, d](int* warp, int lane) { return lane >= d ? warp[lane - d] : v; }); }
static int __shfl_sync(unsigned, int v, int from) {
  return exchange(v, [from](int* warp, int) { return warp[from]; }); }
"""
ENTRY = """
template <int STEPS>
static void run(const int64_t* idx, int routes, void* scratch, int* out, int experts, int block_m) {
  warps.clear();
  for (int w = 0; w < THREADS / 32; w++) warps.push_back(std::make_unique<std::barrier<>>(32));
  block = std::make_unique<std::barrier<>>(THREADS);
  int *counts = out, *total = counts + experts, *first_block = total + experts;
  int* first_row = first_block + experts + 1;
  std::vector<std::thread> threads;
  for (int t = 0; t < THREADS; t++)
    threads.emplace_back([=] {
      threadIdx.x = (unsigned)t;
      tlmm_count_few<THREADS, STEPS>(idx, routes, scratch, counts, experts, block_m, total,
                                     first_block, first_row, first_row + experts + 1, 0); });
  for (auto& thread : threads) thread.join(); }
extern "C" void count_few(int steps, const int64_t* idx, int routes, void* scratch, int* out,
                          int experts, int block_m) {
  if (steps == 1) run<1>(idx, routes, scratch, out, experts, block_m);
  else run<2>(idx, routes, scratch, out, experts, block_m); }
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`tlmm_count_few` and what it calls, where lanes of a warp and threads of a block meet."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is a requirement of tilelang too"
    folder = tmp_path_factory.mktemp("count_few")
    begin, end = (
        DISPATCH_CUDA.index("// One warp: received"),
        DISPATCH_CUDA.index("// Helpers with"),
    )
    head = DISPATCH_CUDA[: DISPATCH_CUDA.index("//")]
    text = folder / "count_few.cpp"
    text.write_text(SHIM + head + DISPATCH_CUDA[begin:end] + ENTRY, encoding="utf-8")
    library = folder / "count_few.so"
    flags = ["-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    subprocess.run([compiler, *flags, "-o", str(library), str(text)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("routes", [0, 1, 31, 383, 384, 385, 700, 767, 768])
@pytest.mark.parametrize(("experts", "block_m"), [(5, 64), (33, 128), (682, 64)])
def test_counts_and_entries(
    device: ctypes.CDLL, routes: int, experts: int, block_m: int, seed: int
) -> None:
    """Of every expert's rows the routes in their order, whatever is masked or out of range."""
    rng = random.Random(f"{seed} {routes} {experts}")
    odd = (-1, -(2**40), experts, 2**32, 2**32 + 1)
    hot = rng.randrange(experts)
    idx = [
        rng.choice(odd) if rng.random() < 0.1 else rng.choice((hot, rng.randrange(experts)))
        for _ in range(routes)
    ]
    counts = [idx.count(expert) for expert in range(experts)]
    known = sorted(e * ENTRY_ROUTES + i for i, e in enumerate(idx) if 0 <= e < experts)
    rows = [sum(counts[:expert]) for expert in range(experts + 1)]
    want = [*counts, *counts, *first_blocks(counts, block_m), *rows, *known]
    for steps in range(1 if routes <= THREADS else 2, MAX_FEW_STEPS + 1):
        out = (ctypes.c_int * (4 * experts + 2 + THREADS * steps))()
        scratch = (ctypes.c_char * (THREADS // 32 * experts * FEW_COUNT_BYTES))(b"\x5a")
        device.count_few(
            steps, (ctypes.c_int64 * max(1, routes))(*idx), routes, scratch, out, experts, block_m
        )
        assert list(out[: len(want)]) == want
