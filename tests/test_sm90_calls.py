"""Calls from model code on a GPU: operators, torch.compile, CUDA graphs, streams, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_cases import SMALL, SMALL_CAPACITY

from tl_megamoe import SymmBuffer, fp8_mega_moe, mega_moe, reference
from tl_megamoe.explorer.findings import same_bits
from tl_megamoe.explorer.host import YARDSTICK, host_times
from tl_megamoe.quantize import quantize_activations
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, PlainWeights, transform_weights

pytestmark = pytest.mark.sm90

OPS = torch.ops.tl_megamoe
BUSY_CYCLES = 100_000_000
"""About 60 ms: longer than everything that is queued behind it takes on the host."""


@pytest.fixture(scope="module")
def plain() -> PlainWeights:
    return random_weights(SMALL, "cuda")


@pytest.fixture(scope="module")
def weights(plain: PlainWeights) -> MoEWeights:
    return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), SMALL)


@pytest.fixture(scope="module")
def shared_buffer() -> SymmBuffer:
    made = SymmBuffer(SMALL, SMALL_CAPACITY, timeout_s=5.0)
    made.warmup(num_shared=0)
    return made


@pytest.fixture
def buffer(shared_buffer: SymmBuffer) -> Iterator[SymmBuffer]:
    """One for all tests, with nothing of the test before in it."""
    torch.cuda.synchronize()
    shared_buffer.poison()
    for tensor in (shared_buffer.x_sf, shared_buffer.topk_weights):
        tensor.fill_(torch.nan)
    torch.cuda.synchronize()
    yield shared_buffer
    torch.cuda.synchronize()
    shared_buffer.check_report()


def tokens_of(num_tokens: int, seed: int) -> tuple[torch.Tensor, Inputs]:
    """Bfloat16 activations and their routes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_tokens, SMALL.hidden, device="cuda", generator=generator).bfloat16()
    return x, random_inputs(SMALL, num_tokens, seed=seed, device="cuda")


@pytest.mark.parametrize("tokens", [0, 1, 65, 300, SMALL_CAPACITY])
def test_every_form_gives_the_same_bits(
    buffer: SymmBuffer, plain: PlainWeights, weights: MoEWeights, tokens: int, seed: int
) -> None:
    x, inputs = tokens_of(tokens, seed)
    routes = (inputs.topk_idx, inputs.topk_weights)
    quantised = quantize_activations(x)
    bound = (*weights.l1, *weights.l2, buffer.key)
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "functional": lambda: mega_moe(*quantised, *routes, weights, buffer),
        "bfloat16": lambda: mega_moe(x, None, *routes, weights, buffer),
        "operator": lambda: OPS.mega_moe(x, None, *routes, *bound),
        "operator on e4m3": lambda: OPS.mega_moe(*quantised, *routes, *bound),
    }
    buffer.fill(*quantised, *routes)
    first = torch.empty_like(x)
    fp8_mega_moe(first, weights.l1, weights.l2, buffer)
    for name, form in forms.items():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert same_bits(form(), first), name
    if tokens:
        wanted = reference.moe(SMALL, *quantised, *routes, plain)
        found = reference.compare(first, wanted, intermediate=SMALL.intermediate)
        assert found, found.reason


def test_counts_are_added_in_every_call(buffer: SymmBuffer, weights: MoEWeights, seed: int) -> None:
    x, inputs = tokens_of(64, seed)
    stats = torch.zeros(SMALL.num_local_experts, dtype=torch.int32, device="cuda")
    buffer.quantize(x, inputs.topk_idx, inputs.topk_weights)
    y = torch.empty_like(x)
    for _ in range(3):
        fp8_mega_moe(y, weights.l1, weights.l2, buffer, stats)
    own = torch.bincount(inputs.topk_idx.flatten(), minlength=SMALL.num_experts)
    assert stats.tolist() == (3 * own).tolist()


def test_work_is_on_the_current_stream(buffer: SymmBuffer, weights: MoEWeights, seed: int) -> None:
    x, inputs = tokens_of(64, seed)
    call = (inputs.topk_idx, inputs.topk_weights, weights, buffer)
    wanted = mega_moe(x, None, *call)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        late.copy_(x)  # the layer must come behind this
        y = mega_moe(late, None, *call)
        done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert same_bits(y, wanted)


def test_streams_that_share_a_buffer(buffer: SymmBuffer, weights: MoEWeights, seed: int) -> None:
    """A call on another stream waits for the one before, which waits behind a busy kernel."""
    calls = [tokens_of(n, seed + n) for n in (64, 200, 7, 129)]
    given = [(x, None, i.topk_idx, i.topk_weights, weights, buffer) for x, i in calls]
    wanted = [mega_moe(*call) for call in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(5):
        results = []
        for stream, call in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                if stream is streams[0]:
                    torch.cuda._sleep(BUSY_CYCLES)
                results.append(mega_moe(*call))
        torch.cuda.synchronize()
        assert all(map(same_bits, results, wanted))


@pytest.mark.parametrize("shares", [True, False], ids=["one-buffer", "a-buffer-each"])
def test_threads(buffer: SymmBuffer, weights: MoEWeights, shares: bool, seed: int) -> None:
    calls = [tokens_of(n, seed + n) for n in (64, 200, 7, 129)]
    buffers = [buffer] * 4
    if not shares:
        buffers = [SymmBuffer(SMALL, SMALL_CAPACITY, timeout_s=5.0) for _ in calls]
        for made in buffers:
            made.warmup(num_shared=0)
    given = [
        (x, None, i.topk_idx, i.topk_weights, weights, made)
        for (x, i), made in zip(calls, buffers, strict=True)
    ]
    wanted = [mega_moe(*call) for call in given]
    torch.cuda.synchronize()
    wrong: list[Any] = []
    start = threading.Barrier(len(given))

    def work(index: int) -> None:
        try:
            start.wait(10)
            with torch.cuda.stream(torch.cuda.Stream()):
                results = [mega_moe(*given[index]) for _ in range(50)]
                torch.cuda.current_stream().synchronize()
            wrong.extend(index for y in results if not same_bits(y, wanted[index]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    torch.cuda.synchronize()
    for made in buffers:
        made.check_report()


def test_a_graph_of_several_layers(buffer: SymmBuffer, weights: MoEWeights, seed: int) -> None:
    """Three layers on one buffer, replayed with other tokens."""
    other = random_weights(SMALL, "cuda", seed=5)
    layers = [weights, transform_weights((other.l1, other.l1_sf), (other.l2, other.l2_sf)), weights]

    def model(x: torch.Tensor, idx: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            y = OPS.mega_moe(x, None, idx, routing, *layer.l1, *layer.l2, buffer.key)
            x = x + y / (1 + y.abs().amax())
        return x

    x, inputs = tokens_of(128, seed)
    static = [x.clone(), inputs.topk_idx.clone(), inputs.topk_weights.clone()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(*static)
    for again in range(3):
        x, inputs = tokens_of(128, seed + again)
        wanted = model(x, inputs.topk_idx, inputs.topk_weights)
        for target, value in zip(static, (x, inputs.topk_idx, inputs.topk_weights), strict=True):
            target.copy_(value)
        graph.replay()
        assert same_bits(y, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(buffer: SymmBuffer, weights: MoEWeights, mode: str, seed: int) -> None:
    """Inductor's code around the operator, in its own CUDA graphs too."""

    def model(x: torch.Tensor, idx: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x * 0.5 + mega_moe(x * 2, None, idx, routing, weights, buffer)
        return x

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for again in range(4):  # the third call replays a graph
            x, inputs = tokens_of(128, seed + again)
            given = (x, inputs.topk_idx, inputs.topk_weights)
            wanted = model(*given)
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            found = compiled(*given).clone()
            difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
            assert difference < 5e-3, difference  # bfloat16 sums, fused


@pytest.mark.slow
def test_compile_of_deepgemm_s_call_shape(
    buffer: SymmBuffer, weights: MoEWeights, seed: int
) -> None:
    """The views are filled, and y is written, inside compiled code."""
    x, inputs = tokens_of(100, seed)
    quantised = quantize_activations(x)
    wanted = mega_moe(*quantised, inputs.topk_idx, inputs.topk_weights, weights, buffer)

    def layer(codes: torch.Tensor, sf: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n = y.shape[0]
        buffer.x[:n] = codes
        buffer.x_sf[:n] = sf
        fp8_mega_moe(y, weights.l1, weights.l2, buffer)
        return y + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    buffer.topk_idx[:100] = inputs.topk_idx
    buffer.topk_weights[:100] = inputs.topk_weights
    with torch.inference_mode():
        for _ in range(3):
            buffer.x_sf.fill_(torch.nan)
            y = torch.empty_like(x)
            plus = compiled(*quantised, y)
            assert same_bits(y, wanted)
            assert torch.equal(plus, wanted + 1)


def test_host_cost() -> None:
    """A launch costs the host a few of torch's own; results/README.md has the times."""
    times = {t.form: t.least_us for t in host_times(SMALL, 16, SMALL_CAPACITY)}
    assert times["fp8_mega_moe(y, l1, l2, buffer)"] < 4 * times[YARDSTICK], times
