"""Quantize: the torch twins' numbers, and that the program's text computes the same on a CPU."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.problem import Problem
from tl_megamoe.quantize import (
    QuantizeKernel,
    QuantizeSpec,
    add_shared_routes,
    compile_program,
    quantize_activations,
)
from tl_megamoe.recipe import Recipe

SCALES = ("exact", "pow2")
SPEC = QuantizeSpec(
    hidden=384,
    num_topk=5,
    num_shared=2,
    num_local_experts=6,
    num_experts=12,
    capacity=40,
    scale="exact",
)
"""Two ranks of four routed experts and two copies of shared ones; three scales a token."""
BYTES = {torch.float8_e4m3fn: torch.uint8, torch.float32: torch.int32}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        a.contiguous().view(BYTES.get(a.dtype, a.dtype)),
        b.contiguous().view(BYTES.get(b.dtype, b.dtype)),
    )


def activations(tokens: int, hidden: int, seed: int) -> torch.Tensor:
    """BF16 rows over many magnitudes, and rows with NaN, infinities, zeros and the extremes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    x *= torch.exp2(torch.randint(-40, 40, (tokens, 1), generator=generator).float())
    x = x.to(torch.bfloat16)
    special = (
        torch.nan,
        -torch.nan,
        torch.inf,
        -torch.inf,
        torch.finfo(torch.bfloat16).max,
        torch.finfo(torch.bfloat16).smallest_normal,
    )
    for i, value in enumerate(special):
        if tokens > 2 * i + 1:
            x[2 * i + 1, (37 * i) % hidden] = value
    if tokens > 12:
        x[12] = 0.0
        x[12, ::2] = -0.0
    if tokens > 13:
        x[13, :128] = torch.nan
    return x


def routes(spec: QuantizeSpec, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of which some do not exist, and weights."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-2, spec.num_routed_experts + 2, (tokens, spec.top_k), generator=generator)
    weights = torch.randn(tokens, spec.top_k, generator=generator)
    return idx, weights


# ---- twins


@pytest.mark.parametrize("scale", SCALES)
def test_codes_and_scales_follow_the_rule(scale: Any, seed: int) -> None:
    x = activations(40, 384, seed)
    codes, sf = quantize_activations(x, Recipe(scale=scale))
    assert codes.shape == x.shape
    assert sf.shape == (40, 3)
    for token in range(40):
        for group in range(3):
            part = x[token, group * 128 : group * 128 + 128].float()
            amax = max((abs(v) for v in part.tolist() if not math.isnan(v)), default=0.0)
            expected = torch.tensor(max(amax, 1e-10)) * torch.tensor(1.0 / 448.0)
            if scale == "pow2" and amax < math.inf:
                expected = 2.0 ** torch.tensor(math.ceil(math.log2(expected.item())))
            assert sf[token, group] == expected
            scaled = part * (1.0 / sf[token, group])
            got = codes[token, group * 128 : group * 128 + 128]
            nan = scaled.isnan()
            assert (got.view(torch.uint8)[nan] == 0x7F).all()
            error = (got.float() - scaled)[~nan].abs()
            # Half a step of three mantissa bits, or of the smallest e4m3 value, 2**-9.
            assert (error <= (scaled[~nan].abs() / 16).clamp(min=2.0**-10)).all()


def test_infinity_and_nan_stay_in_their_group() -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    x[0, 3], x[0, 4], x[0, 5] = -torch.inf, -2.0, torch.nan
    codes, sf = quantize_activations(x)
    raw = codes.view(torch.uint8)
    assert sf[0, 0] == torch.inf
    # Zeros keep their sign; what has no value is the one NaN.
    assert raw[0, :6].tolist() == [0, 0, 0, 0x7F, 0x80, 0x7F]
    clean = quantize_activations(torch.ones(1, 256, dtype=torch.bfloat16))
    assert same_bits(codes[1:], clean[0])
    assert same_bits(codes[:1, 128:], clean[0][:, 128:])
    assert same_bits(sf[1:], clean[1])


def test_shared_routes_of_two_ranks() -> None:
    idx = torch.tensor([[0, 3, 4], [7, -1, 8]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, 0.125], [1, 2, 3]], dtype=torch.bfloat16)
    got, got_weights = add_shared_routes(idx, weights, 8, 2, 1, 2)
    # Rank 0 owns 0..3 and its copies 4, 5; rank 1 owns 6..9 and its copies 10, 11.
    assert got.tolist() == [[0, 3, 6, 10, 11], [9, -1, -1, 10, 11]]
    assert got_weights.tolist() == [[0.5, 0.25, 0.125, 1, 1], [1, 2, 3, 1, 1]]
    assert (got.dtype, got_weights.dtype) == (torch.int64, torch.float32)
    assert add_shared_routes(idx, weights, 8, 2, 0, 2)[0][:, 3:].tolist() == [[4, 5], [4, 5]]


def test_without_shared_experts_only_wrong_indices_change(seed: int) -> None:
    idx, weights = routes(replace(SPEC, num_shared=0), 20, seed)
    got, got_weights = add_shared_routes(idx, weights, 12, 2, 0, 0)
    assert torch.equal(got, torch.where((idx >= 0) & (idx < 12), idx, -1))
    assert (got != idx).any()
    assert torch.equal(got_weights, weights)


def test_twins_take_no_tokens() -> None:
    codes, sf = quantize_activations(torch.empty(0, 256, dtype=torch.bfloat16))
    assert (codes.shape, sf.shape) == ((0, 256), (0, 2))
    idx, _ = add_shared_routes(torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 3), 8, 2, 0, 1)
    assert idx.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 3}, "num_ranks=3 does not divide num_experts=8"),
        ({"rank": 2}, "rank=2 must be 0 to 1"),
        ({"num_shared": -1}, "num_shared=-1 must be an integer of at least 0"),
        ({"topk_weights": torch.ones(4, 3)}, r"topk_weights of shape \(4, 3\) must both be"),
    ],
)
def test_shared_routes_refuse(change: dict[str, Any], message: str) -> None:
    arguments = {
        "topk_idx": torch.zeros(4, 2, dtype=torch.int64),
        "topk_weights": torch.ones(4, 2),
        "num_experts": 8,
        "num_ranks": 2,
        "rank": 0,
        "num_shared": 1,
    }
    with pytest.raises(ValueError, match=message):
        add_shared_routes(**{**arguments, **change})


# ---- spec


def problem_of(spec: QuantizeSpec) -> Problem:
    """A problem of one rank with a spec's sizes."""
    return Problem(
        name="quantize",
        hidden=spec.hidden,
        intermediate=128,
        num_experts=spec.num_experts,
        num_topk=spec.num_topk,
        num_ranks=1,
    )


def buffer_of(spec: QuantizeSpec) -> SymmBuffer:
    """A buffer on the CPU; the program needs its inputs and rank alone."""
    recipe = Recipe(scale=spec.scale)
    return SymmBuffer(problem_of(spec), spec.capacity, device="cpu", recipe=recipe)


def test_spec_of_a_buffer() -> None:
    one_rank = replace(SPEC, num_local_experts=12)
    buffer = buffer_of(replace(one_rank, scale="pow2"))
    spec = QuantizeSpec.of(buffer.problem, buffer.capacity, buffer.recipe, 2)
    assert spec == replace(one_rank, scale="pow2")
    assert (spec.top_k, spec.num_ranks, spec.num_routed_experts) == (3, 1, 10)
    assert (SPEC.num_ranks, SPEC.num_routed_experts) == (2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 200}, "hidden=200 is not a multiple of 128"),
        ({"num_topk": 0}, "num_topk=0 must be an integer of at least 1"),
        ({"num_shared": 5}, "num_shared=5 must be below num_topk=5"),
        ({"num_shared": 6, "num_topk": 8}, "num_shared=6 must be below num_local_experts=6"),
        ({"num_local_experts": 5}, "num_local_experts=5 does not divide num_experts=12"),
        ({"scale": "log"}, "scale='log'"),
        ({"capacity": True}, "capacity=True must be an integer"),
    ],
)
def test_spec_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


# ---- launch


class Recorder:
    """Stands for a kernel: keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def test_no_tokens_launch_nothing() -> None:
    recorder, buffer = Recorder(), buffer_of(SPEC)
    idx, weights = routes(SPEC, 0, 0)
    QuantizeKernel(SPEC, recorder).launch(
        buffer, torch.empty(0, 384, dtype=torch.bfloat16), idx, weights
    )
    assert not recorder.calls


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.ones(4, 384), "x of dtype torch.float32 must be torch.bfloat16"),
        (
            "x",
            torch.ones(2, 2, 384),
            r"x must have shape \(tokens, hidden=384\), found \(2, 2, 384\)",
        ),
        ("x", torch.ones(41, 384), "x has 41 tokens, more than capacity=40"),
        ("x", torch.ones(384, 4).bfloat16().t(), "must have contiguous columns"),
        ("x", torch.ones(4, 388).bfloat16()[:, :384], "rows at multiples of 16 bytes"),
        ("x", torch.ones(4, 392).bfloat16()[:, 4:388], "rows at multiples of 16 bytes"),
        ("topk_idx", torch.zeros(4, 3).short(), "must be torch.int64 or torch.int32"),
        (
            "topk_idx",
            torch.zeros(4, 5).long(),
            r"must be \(tokens, top_k without the 2 shared\) = \(4, 3\)",
        ),
        ("topk_weights", torch.zeros(5, 3), r"\(tokens, top_k without the 2 shared\) = \(4, 3\)"),
        ("topk_weights", torch.zeros(4, 3).half(), "must be torch.float32 or torch.bfloat16"),
        ("topk_weights", torch.zeros(4, 3, device="meta"), "on meta, the buffer on cpu"),
    ],
)
def test_launch_refuses(name: str, value: torch.Tensor, message: str) -> None:
    recorder, buffer = Recorder(), buffer_of(SPEC)
    tensors = {
        "x": torch.ones(4, 384, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(4, 3, dtype=torch.int64),
        "topk_weights": torch.zeros(4, 3),
    }
    with pytest.raises(ValueError, match=message):
        QuantizeKernel(SPEC, recorder).launch(buffer, **{**tensors, name: value})
    assert not recorder.calls


# ---- the program, compiled for the host

HOST_CUDA = r"""
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <pthread.h>
#undef __global__
#undef __launch_bounds__
#define __global__
#define __launch_bounds__(...)
#define TLMM_DEV static
typedef __nv_bfloat16 bfloat16_t;
typedef unsigned char fp8_e4_t;
typedef uint32_t fp8_e4_4_t;
typedef uint4 fp8_e4_16_t;
struct Index { int x; };
static thread_local Index blockIdx, threadIdx;
static float max(float a, float b) { return fmaxf(a, b); }
static float __int_as_float(int v) { float f; memcpy(&f, &v, 4); return f; }
static int __float_as_int(float v) { int i; memcpy(&i, &v, 4); return i; }
// Eight threads stand for the lanes of a scale: the only ones that meet.
static pthread_barrier_t lanes;
static float lane_values[8];
namespace tl {
struct MaxOp {};
template <int N> struct NamedBarrier {};
template <class Op, int N, int Scale, int Offset, class Barrier> struct AllReduce {
  static float run(float v) {
    static_assert(N == 8 && Scale == 1, "the lanes of a scale");
    lane_values[threadIdx.x & 7] = v;
    pthread_barrier_wait(&lanes);
    for (float other : lane_values) v = fmaxf(v, other);
    pthread_barrier_wait(&lanes);
    return v; } };
}
"""
"""What the program's text needs beside NVIDIA's own conversions, which run on a CPU too."""

RUN_CUDA = r"""
struct Launch { int lane, blocks; PARAMETERS };
static void* run_lane(void* raw) {
  Launch& a = *(Launch*)raw;
  for (blockIdx.x = 0; blockIdx.x < a.blocks; blockIdx.x++)
    for (threadIdx.x = a.lane; threadIdx.x < 128; threadIdx.x += 8)
      quantize_kernel(ARGUMENTS);
  return nullptr; }
extern "C" void run(const Launch* launch) {
  pthread_t threads[8]; Launch copies[8];
  pthread_barrier_init(&lanes, nullptr, 8);
  for (int i = 0; i < 8; i++) { copies[i] = *launch; copies[i].lane = i;
    pthread_create(&threads[i], nullptr, run_lane, &copies[i]); }
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  pthread_barrier_destroy(&lanes); }
"""
PARAMETERS = (
    "x x_sf topk_idx topk_weights from_x x_stride from_idx idx_token_stride idx_slot_stride "
    "idx_is_int64 from_weights weights_token_stride weights_slot_stride weights_are_float32 rank "
    "num_tokens"
).split()
"""In the order of the call; those of the device text are sorted otherwise."""


class HostKernel:
    """The generated text of a quantize kernel, run on the CPU."""

    def __init__(self, spec: QuantizeSpec, folder: Path) -> None:
        from tilelang.contrib.nvcc import get_nvcc_compiler

        from tl_megamoe.scaling import SCALING_CUDA

        source = compile_program(spec).get_kernel_source()
        kernel = source[source.index('extern "C" __global__') :]
        signature = re.search(r"quantize_kernel\((.*?)\);", kernel)
        assert signature
        declared = [p.replace("__restrict__ ", "") for p in signature[1].split(", ")]
        self.names = [p.split()[-1] for p in declared]
        assert sorted(self.names) == sorted(PARAMETERS)
        types = {"int": ctypes.c_int, "int64_t": ctypes.c_int64}
        fields = [("lane", ctypes.c_int), ("blocks", ctypes.c_int)]
        fields += [(p.split()[-1], types.get(p.split()[0], ctypes.c_void_p)) for p in declared]
        self.struct = type("Launch", (ctypes.Structure,), {"_fields_": fields})
        run = RUN_CUDA.replace("PARAMETERS", "; ".join(declared) + ";")
        run = run.replace("ARGUMENTS", ", ".join(f"a.{name}" for name in self.names))
        text, library = folder / "quantize.cpp", folder / "quantize.so"
        text.write_text(HOST_CUDA + SCALING_CUDA + kernel + run, encoding="utf-8")
        # nvcc hands a .cpp file to the host's compiler, and knows where CUDA's headers are.
        command = [get_nvcc_compiler(), "-std=c++20", "-O1", "-w", "-shared", "-cudart", "none"]
        command += ["-Xcompiler", "-fPIC,-pthread", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
        self.spec = spec
        self.library = ctypes.CDLL(str(library))

    def __call__(self, *arguments: Any) -> None:
        values = dict(zip(PARAMETERS, arguments, strict=True))
        groups, tokens = self.spec.hidden // 128, values["num_tokens"]
        columns = math.gcd(groups, 16)
        # A block more than the launch has: it must find nothing to do.
        blocks = -(-tokens // (16 // columns)) * (groups // columns)
        blocks += -(-tokens * self.spec.num_topk // 128) + 1
        values = {
            name: torch.from_dlpack(v).data_ptr() if hasattr(v, "__dlpack__") else v
            for name, v in values.items()
        }
        self.library.run(ctypes.byref(self.struct(blocks=blocks, **values)))


@pytest.fixture(scope="module", params=[("exact", 384), ("pow2", 768)], ids=["exact", "pow2"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    """Tiles of 16 tokens x 1 scale, and of 8 x 2."""
    scale, hidden = request.param
    spec = replace(SPEC, scale=scale, hidden=hidden)
    return HostKernel(spec, tmp_path_factory.mktemp("quantize"))


@pytest.mark.parametrize("idx_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 0), (7, 1), (40, 0)])
def test_text_equals_the_twins(
    host: HostKernel,
    tokens: int,
    rank: int,
    idx_dtype: torch.dtype,
    weights_dtype: torch.dtype,
    seed: int,
) -> None:
    spec = host.spec
    buffer = buffer_of(spec)
    buffer.rank = rank
    for name in ("x", "x_sf", "topk_weights"):
        getattr(buffer, name).view(torch.uint8).fill_(0x55)
    before = {name: getattr(buffer, name).clone() for name in ("x", "x_sf", "topk_idx")}
    x = activations(tokens, spec.hidden, seed)
    idx, weights = routes(spec, tokens, seed)
    idx, weights = idx.to(idx_dtype), weights.to(weights_dtype)
    if idx_dtype == torch.int64:
        idx[0, 0] = 2**32 + 1  # an existing expert if it were cut to 32 bits
    QuantizeKernel(spec, host).launch(buffer, x, idx, weights)
    codes, sf = quantize_activations(x, buffer.recipe)
    assert same_bits(buffer.x[:tokens], codes)
    assert same_bits(buffer.x_sf[:tokens], sf)
    routed = add_shared_routes(
        idx, weights, spec.num_routed_experts, spec.num_ranks, rank, spec.num_shared
    )
    assert torch.equal(buffer.topk_idx[:tokens], routed[0])
    assert same_bits(buffer.topk_weights[:tokens], routed[1])
    for name, old in before.items():
        assert same_bits(getattr(buffer, name)[tokens:], old[tokens:])


def test_text_reads_strided_tensors(host: HostKernel, seed: int) -> None:
    spec = host.spec
    buffer = buffer_of(spec)
    x = torch.cat([activations(9, spec.hidden, seed), torch.ones(9, 16).bfloat16()], 1)
    x = x[:, : spec.hidden]
    idx, weights = routes(spec, 18, seed)
    idx = idx.t().contiguous().t()[::2]
    weights = torch.tensor([[0.5]]).expand(9, spec.top_k)
    QuantizeKernel(spec, host).launch(buffer, x, idx, weights)
    assert same_bits(buffer.x[:9], quantize_activations(x, buffer.recipe)[0])
    routed = add_shared_routes(idx, weights, spec.num_routed_experts, spec.num_ranks, 0, 2)
    assert torch.equal(buffer.topk_idx[:9], routed[0])
    assert torch.equal(buffer.topk_weights[:9], routed[1])


def test_text_moves_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """On the compiler's word: one wide store a thread, two wide loads, no spills."""
    from tilelang.contrib.nvcc import default_compile_options, get_nvcc_compiler

    source = compile_program(SPEC).get_kernel_source()
    assert re.search(r"i < 2;.*?\n\s*\*\(uint4\*\)\(raw .*? = \*\(uint4\*\)", source)
    assert source.count("*(fp8_e4_16_t*)(x +") == 1
    assert "__shared__" not in source
    assert "__syncthreads" not in source
    text = tmp_path / "quantize.cu"
    text.write_text(source, encoding="utf-8")
    command = [get_nvcc_compiler(), "-ptx", "-O3", "-w"]
    command += ["-gencode", "arch=compute_90a,code=compute_90a", *default_compile_options()]
    subprocess.run([*command, "-o", str(tmp_path / "quantize.ptx"), str(text)], check=True)
    ptx = (tmp_path / "quantize.ptx").read_text(encoding="utf-8")
    assert len(re.findall(r"ld\.global\S*\.v4\.\w32", ptx)) == 2
    assert len(re.findall(r"st\.global\S*\.v4\.\w32", ptx)) == 1
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == 8
    assert "rcp.rn.f32" in ptx  # correctly rounded, as torch divides
    assert ".local" not in ptx
