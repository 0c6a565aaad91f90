"""Quantize on the GPU: equal to the twin to the bit, rows beyond the tokens untouched, its time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from test_quantize import activations, routes, same_bits

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.metrics import HBM_READ_TBS
from tl_megamoe.problem import Problem
from tl_megamoe.quantize import (
    QuantizeSpec,
    add_shared_routes,
    compile_quantize,
    quantize_activations,
)
from tl_megamoe.recipe import Recipe

pytestmark = pytest.mark.sm90

HIDDEN = (128, 4096, 7168)
TOKENS = (1, 7, 64, 1000)
SCALES = ("exact", "pow2")
CAPACITY = 1024
TIMED = (16, 8192)
TIMED_HIDDEN = 7168
SHARED = {128: 0, 4096: 1, 7168: 2}
"""Shared experts at each width in the large cases; every number of them runs at 128."""


@lru_cache(maxsize=1)
def buffer_of(hidden: int, num_shared: int, scale: Any, capacity: int = CAPACITY) -> SymmBuffer:
    """A buffer of one rank with 32 routed experts and 6 routes of a token, and the shared ones."""
    problem = Problem(
        name="quantize",
        hidden=hidden,
        intermediate=128,
        num_experts=32 + num_shared,
        num_topk=6 + num_shared,
        num_ranks=1,
    )
    return SymmBuffer(problem, capacity, recipe=Recipe(scale=scale))


def specs() -> list[QuantizeSpec]:
    """The kernels of this file, to be compiled beforehand on any machine."""
    cases = [(h, SHARED[h], s, CAPACITY) for h in HIDDEN for s in SCALES]
    cases += [(128, n, "exact", CAPACITY) for n in (1, 2)]
    cases.append((TIMED_HIDDEN, 1, "exact", max(TIMED)))
    return [
        QuantizeSpec(
            hidden=hidden,
            num_topk=6 + num_shared,
            num_shared=num_shared,
            num_local_experts=32 + num_shared,
            num_experts=32 + num_shared,
            capacity=capacity,
            scale=scale,
        )
        for hidden, num_shared, scale, capacity in cases
    ]


def spec_of(buffer: SymmBuffer, num_shared: int) -> QuantizeSpec:
    return QuantizeSpec.of(buffer.problem, buffer.capacity, buffer.recipe, num_shared)


def check(buffer: SymmBuffer, num_shared: int, inputs: tuple[torch.Tensor, ...]) -> None:
    """Launch, and compare with the twins and with what lay in the rows beyond."""
    spec = spec_of(buffer, num_shared)
    tokens = inputs[0].shape[0]
    names = ("x", "x_sf", "topk_idx", "topk_weights")
    for name in names:
        getattr(buffer, name).view(torch.uint8).fill_(0x55)
    before = {name: getattr(buffer, name)[tokens:].cpu() for name in names}
    compile_quantize(spec).launch(buffer, *(t.cuda() for t in inputs))
    x, idx, weights = inputs
    codes, sf = quantize_activations(x, buffer.recipe)
    routed, routed_weights = add_shared_routes(
        idx, weights, spec.num_routed_experts, 1, 0, num_shared
    )
    for name, value in zip(names, (codes, sf, routed, routed_weights), strict=True):
        found = getattr(buffer, name).cpu()
        assert same_bits(found[:tokens], value), name
        assert same_bits(found[tokens:], before[name]), name


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_equals_the_twin(tokens: int, hidden: int, scale: Any, seed: int) -> None:
    """Over special values: NaN, infinities, zeros, the largest and smallest magnitudes."""
    buffer = buffer_of(hidden, SHARED[hidden], scale)
    spec = spec_of(buffer, SHARED[hidden])
    x = activations(tokens, hidden, seed)
    check(buffer, SHARED[hidden], (x, *routes(spec, tokens, seed)))


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("idx_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_routes_of_any_dtype(
    num_shared: int, idx_dtype: torch.dtype, weights_dtype: torch.dtype, seed: int
) -> None:
    buffer = buffer_of(128, num_shared, "exact")
    idx, weights = routes(spec_of(buffer, num_shared), 300, seed)
    idx, weights = idx.to(idx_dtype), weights.to(weights_dtype)
    if idx_dtype == torch.int64:
        idx[0, 0] = 2**32 + 1  # an existing expert if it were cut to 32 bits
    check(buffer, num_shared, (activations(300, 128, seed), idx, weights))


def test_twin_is_the_same_on_the_gpu(seed: int) -> None:
    x = activations(64, 4096, seed)
    for scale in SCALES:
        recipe = Recipe(scale=scale)
        here, there = quantize_activations(x, recipe), quantize_activations(x.cuda(), recipe)
        assert same_bits(here[0], there[0].cpu())
        assert same_bits(here[1], there[1].cpu())


def test_strided_rows_and_routes(seed: int) -> None:
    buffer = buffer_of(4096, 1, "exact")
    wide = torch.cat([activations(33, 4096, seed), torch.ones(33, 8).bfloat16()], 1).cuda()
    idx, weights = (t.cuda() for t in routes(spec_of(buffer, 1), 66, seed))
    x, idx, weights = wide[:, :4096], idx[::2], weights.t().contiguous().t()[::2]
    compile_quantize(spec_of(buffer, 1)).launch(buffer, x, idx, weights)
    codes, sf = quantize_activations(x.cpu())
    routed, routed_weights = add_shared_routes(idx.cpu(), weights.cpu(), 32, 1, 0, 1)
    assert same_bits(buffer.x[:33].cpu(), codes)
    assert same_bits(buffer.x_sf[:33].cpu(), sf)
    assert torch.equal(buffer.topk_idx[:33].cpu(), routed)
    assert same_bits(buffer.topk_weights[:33].cpu(), routed_weights)


def test_runs_on_the_current_stream_and_in_graphs(seed: int) -> None:
    """Behind a slow kernel of a side stream, and from a replay with other inputs in place."""
    buffer = buffer_of(4096, 1, "exact")
    spec = spec_of(buffer, 1)
    kernel = compile_quantize(spec)
    first, second = (activations(64, 4096, seed + i) for i in (0, 1))
    idx, weights = (t.cuda() for t in routes(spec, 64, seed))
    x, filled = torch.zeros(64, 4096, dtype=torch.bfloat16, device="cuda"), first.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(filled)
        kernel.launch(buffer, x, idx, weights)
    stream.synchronize()
    assert same_bits(buffer.x[:64].cpu(), quantize_activations(first)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(buffer, x, idx, weights)
    x.copy_(second)
    graph.replay()
    assert same_bits(buffer.x[:64].cpu(), quantize_activations(second)[0])


@pytest.mark.parametrize("tokens", TIMED)
def test_time(tokens: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed beside the floor: 3 bytes a value at the rate of memory. Few tokens are latency."""
    buffer = buffer_of(TIMED_HIDDEN, 1, "exact", max(TIMED))
    spec = spec_of(buffer, 1)
    kernel = compile_quantize(spec)
    idx, weights = (t.cuda() for t in routes(spec, tokens, seed))
    # As many inputs as L2 does not hold, in one graph: no launch from the host is timed.
    sets = [
        torch.randn(tokens, TIMED_HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    ]
    kernel.launch(buffer, sets[0], idx, weights)  # loads it, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in sets * 5:
            kernel.launch(buffer, x, idx, weights)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 20)
    measured_us = sorted(times)[len(times) // 2]
    floor_us = tokens * TIMED_HIDDEN * 3 / (HBM_READ_TBS * 1e6)
    with capsys.disabled():
        print(f"\nquantize {tokens} x {TIMED_HIDDEN}: {measured_us:.2f} us, floor {floor_us:.2f}")
    latency_us = 5.0  # of a launch in a graph, and of one dependent trip to memory
    assert measured_us < 3 * floor_us + latency_us
