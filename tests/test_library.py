"""The operators of torch.ops.tl_megamoe, on a CPU: schema, fakes, torch.compile, refusals."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import SMALL
from torch.library import opcheck

from tl_megamoe import ReferenceBuffer, SymmBuffer, fp8_mega_moe, mega_moe, reference
from tl_megamoe.loading import NotLoadedError, prepare
from tl_megamoe.quantize import quantize_activations
from tl_megamoe.registry import buffer_of
from tl_megamoe.schedule import default_schedule
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, PlainWeights, transform_weights

CAPACITY = 16
OPS = torch.ops.tl_megamoe
UTILS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Of opcheck all but test_schema, which multiplies float8 tensors on the CPU, where torch has no
such product; `check_schema` looks at bytes instead."""


def check_schema(op: Any, given: tuple[Any, ...], **options: Any) -> None:
    """The schema's promises: what it does not call mutated stays, and nothing new aliases it."""
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    before = [t.view(torch.uint8).clone() for t in tensors]
    result = op(*given, **options)
    infos = [a.alias_info for a, v in zip(op._schema.arguments, given, strict=False)]
    writes = [
        info is not None and info.is_write
        for info, value in zip(infos, given, strict=False)
        if isinstance(value, torch.Tensor)
    ]
    for tensor, was, written in zip(tensors, before, writes, strict=True):
        assert torch.equal(tensor.view(torch.uint8), was) != written
    if isinstance(result, torch.Tensor):
        storages = {t.untyped_storage().data_ptr() for t in tensors}
        assert result.untyped_storage().data_ptr() not in storages


@pytest.fixture(scope="module")
def plain() -> PlainWeights:
    return random_weights(SMALL)


@pytest.fixture(scope="module")
def weights(plain: PlainWeights) -> MoEWeights:
    return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), SMALL)


@pytest.fixture
def buffer() -> ReferenceBuffer:
    return ReferenceBuffer(SMALL, CAPACITY)


@pytest.fixture
def inputs(seed: int) -> Inputs:
    return random_inputs(SMALL, 7, seed=seed, device="cpu")


def expected(inputs: Inputs, plain: PlainWeights, clamp: float | None = None) -> torch.Tensor:
    return reference.moe(
        SMALL, inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights, plain, clamp=clamp
    )


def arguments(inputs: Inputs, weights: MoEWeights, key: str) -> tuple[Any, ...]:
    routed = (inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    return (*routed, *weights.l1, *weights.l2, key)


def test_opcheck_of_the_functional_operator(
    inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer, seed: int
) -> None:
    given = arguments(inputs, weights, buffer.key)
    check_schema(OPS.mega_moe.default, given)
    opcheck(OPS.mega_moe.default, given, test_utils=UTILS)
    x = torch.randn(5, SMALL.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    routes = (inputs.topk_idx[:5], inputs.topk_weights[:5])
    opcheck(
        OPS.mega_moe.default,
        (x, None, *routes, *weights.l1, *weights.l2, buffer.key),
        {"token_bound": 8, "activation_clamp": 7.0},
        test_utils=UTILS,
    )


def test_opcheck_of_the_operator_that_mutates(
    inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer
) -> None:
    y = torch.zeros(7, SMALL.hidden, dtype=torch.bfloat16)
    stats = torch.zeros(SMALL.num_local_experts, dtype=torch.int32)
    routed = (inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    for counts in (None, stats):
        given = (y, *routed, *weights.l1, *weights.l2, counts, buffer.key)
        y.zero_()
        check_schema(OPS.fp8_mega_moe.default, given)
        opcheck(OPS.fp8_mega_moe.default, given, test_utils=UTILS)
    schema = OPS.fp8_mega_moe.default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert mutated == ["y", "recv_stats"]


def test_values(
    inputs: Inputs, plain: PlainWeights, weights: MoEWeights, buffer: ReferenceBuffer, seed: int
) -> None:
    given = arguments(inputs, weights, buffer.key)
    assert torch.equal(OPS.mega_moe(*given), expected(inputs, plain))
    clamped = OPS.mega_moe(*given, activation_clamp=0.25)
    assert torch.equal(clamped, expected(inputs, plain, 0.25))
    assert not torch.equal(clamped, expected(inputs, plain))
    x = torch.randn(7, SMALL.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    routes = (inputs.topk_idx, inputs.topk_weights)
    y = OPS.mega_moe(x, None, *routes, *weights.l1, *weights.l2, buffer.key)
    assert torch.equal(y, reference.moe(SMALL, *quantize_activations(x), *routes, plain))
    assert torch.equal(y, mega_moe(x, None, *routes, weights, buffer))


def test_fakes(inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer) -> None:
    given = arguments(inputs, weights, buffer.key)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given]
        y = OPS.mega_moe(*fake)
        assert (y.shape, y.dtype) == ((7, SMALL.hidden), torch.bfloat16)
        with pytest.raises(RuntimeError, match="must be torch.bfloat16"):
            OPS.mega_moe(fake[0], None, *fake[2:])
        with pytest.raises(RuntimeError, match="topk_idx and x must have a row for every token"):
            OPS.mega_moe(*fake[:2], fake[2][:3], *fake[3:])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_compile_of_the_functional_form(
    inputs: Inputs, plain: PlainWeights, weights: MoEWeights, buffer: ReferenceBuffer
) -> None:
    @compiled
    def layer(x_sf: torch.Tensor, scale: float) -> torch.Tensor:
        routes = (inputs.topk_idx, inputs.topk_weights * scale)
        return mega_moe(inputs.x, x_sf, *routes, weights, buffer, activation_clamp=8.0) + 1

    scaled = reference.moe(
        SMALL,
        inputs.x,
        inputs.x_sf,
        inputs.topk_idx,
        inputs.topk_weights * 0.5,
        plain,
        clamp=8.0,
    )
    assert torch.equal(layer(inputs.x_sf, 0.5), scaled + 1)


def test_compile_sees_what_is_written_to_the_buffer(
    inputs: Inputs, plain: PlainWeights, weights: MoEWeights, buffer: ReferenceBuffer
) -> None:
    """DeepGEMM's call shape: views are filled, then the call reads them."""

    @compiled
    def layer(y: torch.Tensor, stats: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
        n = y.shape[0]
        buffer.x_sf[:n] = x_sf * 2
        fp8_mega_moe(y, weights.l1, weights.l2, buffer, stats)
        return y * 2

    buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    y = torch.empty(7, SMALL.hidden, dtype=torch.bfloat16)
    stats = torch.zeros(SMALL.num_local_experts, dtype=torch.int32)
    doubled = layer(y, stats, inputs.x_sf)
    routes = (inputs.topk_idx, inputs.topk_weights)
    wanted = reference.moe(SMALL, inputs.x, inputs.x_sf * 2, *routes, plain)
    assert torch.equal(y, wanted)
    assert torch.equal(doubled, wanted * 2)
    assert torch.equal(buffer.x_sf[:7], inputs.x_sf * 2)
    assert stats.sum() == (inputs.topk_idx >= 0).sum()


def test_compile_of_dynamic_tokens(
    plain: PlainWeights, weights: MoEWeights, buffer: ReferenceBuffer, seed: int
) -> None:
    @compiled
    def layer(*routed: torch.Tensor) -> torch.Tensor:
        return mega_moe(*routed, weights, buffer)

    for tokens in (3, 5, 9):
        made = random_inputs(SMALL, tokens, seed=seed, device="cpu")
        routed = (made.x, made.x_sf, made.topk_idx, made.topk_weights)
        assert torch.equal(layer(*routed), expected(made, plain))


def test_export(inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            routes = (inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
            return mega_moe(x, *routes, weights, buffer)

    program = torch.export.export(Layer(), (inputs.x,))
    assert "torch.ops.tl_megamoe.mega_moe.default" in program.graph_module.code


def test_an_operator_never_compiles(inputs: Inputs, weights: MoEWeights) -> None:
    symmetric = SymmBuffer(SMALL, CAPACITY, device="cpu")
    given = arguments(inputs, weights, symmetric.key)
    with pytest.raises(NotLoadedError, match="a call from model code never compiles.*warmup"):
        OPS.mega_moe(*given)
    x = torch.zeros(7, SMALL.hidden, dtype=torch.bfloat16)
    with pytest.raises(NotLoadedError, match=r"num_shared=1 is not loaded.*warmup\(num_shared=1\)"):
        OPS.mega_moe(x, None, *given[2:], 1)
    y = torch.zeros(7, SMALL.hidden, dtype=torch.bfloat16)
    name = default_schedule(SMALL, 7).name
    with pytest.raises(ValueError, match=f"schedule='{name}' is not loaded on buffer"):
        OPS.fp8_mega_moe(y, *given[:-1], None, symmetric.key, schedule=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_bound": 3}, "token_bound=3 must be an integer from num_tokens=7 to capacity=16"),
        ({"activation_clamp": -1.0}, "activation_clamp=-1.0 must be a positive number"),
        ({"num_shared": 1}, "num_shared=1 with x_sf"),
        ({"buffer": "gone"}, "buffer='gone' names no buffer of this process; alive: "),
    ],
)
def test_bad_arguments(
    inputs: Inputs,
    weights: MoEWeights,
    buffer: ReferenceBuffer,
    change: dict[str, Any],
    message: str,
) -> None:
    given = arguments(inputs, weights, buffer.key)
    with pytest.raises(ValueError, match=re.escape(message)):
        OPS.mega_moe(*given[:-1], **{"buffer": buffer.key, **change})


def test_nothing_to_differentiate(
    inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer
) -> None:
    x = torch.zeros(7, SMALL.hidden, dtype=torch.bfloat16, requires_grad=True)
    given = (x, None, inputs.topk_idx, inputs.topk_weights, *weights.l1, *weights.l2, buffer.key)
    with pytest.raises(RuntimeError, match="no backward pass: call the model under"):
        OPS.mega_moe(*given)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not OPS.mega_moe(*given).requires_grad


def test_a_name_lives_as_long_as_its_buffer() -> None:
    made = ReferenceBuffer(SMALL, CAPACITY)
    key = made.key
    assert buffer_of(key) is made
    del made
    gc.collect()
    with pytest.raises(ValueError, match=f"buffer='{key}' names no buffer"):
        buffer_of(key)


def test_the_reference_is_of_one_rank() -> None:
    with pytest.raises(ValueError, match="num_ranks=2 of problem 'small': the reference computes"):
        ReferenceBuffer(replace(SMALL, num_ranks=2), CAPACITY)


@pytest.mark.parametrize("name", ["x", "x_sf", "topk_weights"])
def test_the_buffer_never_joins_a_graph_of_autograd(
    inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer, name: str
) -> None:
    x = torch.zeros(7, SMALL.hidden, dtype=torch.bfloat16)
    given: dict[str, Any] = {"x": x, "x_sf": None, "topk_weights": inputs.topk_weights.clone()}
    if name == "x_sf":
        given |= {"x": inputs.x, "x_sf": inputs.x_sf.clone()}
    given[name].requires_grad_()
    order = (given["x"], given["x_sf"], inputs.topk_idx, given["topk_weights"])
    with pytest.raises(RuntimeError, match=f"{name} requires grad, and the MoE layer has no backw"):
        mega_moe(*order, weights, buffer)
    with torch.no_grad():
        y = mega_moe(*order, weights, buffer)
    assert not y.requires_grad
    held = (buffer.x, buffer.x_sf, buffer.topk_weights)
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in held)


def test_a_token_bound_below_zero_is_wrong_everywhere(
    inputs: Inputs, weights: MoEWeights, buffer: ReferenceBuffer
) -> None:
    routed = (inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    with pytest.raises(ValueError, match="token_bound=-1 must be an integer"):
        mega_moe(*routed, weights, buffer, token_bound=-1)
    with pytest.raises(ValueError, match="token_bound=-1 must be an integer"):
        OPS.mega_moe(*routed, *weights.l1, *weights.l2, buffer.key, token_bound=-1)


def test_a_reference_buffer_answers_as_the_other_does(buffer: ReferenceBuffer) -> None:
    shown = buffer.describe()
    assert "small, capacity 16, the float32 reference, recipe exact-128" in shown
    assert buffer.warmup(activation_clamp=True, fast_math=False, num_shared=1) == []
    with pytest.raises(ValueError, match="num_shared=3 must be below num_topk=3"):
        buffer.warmup(num_shared=3)
    with pytest.raises(TypeError, match="num_sharedd"):
        buffer.warmup(num_sharedd=1)  # type: ignore[call-arg]
    buffer.check_report()
    with pytest.raises(ValueError, match="sym_buffer must be a SymmBuffer, found ReferenceBuffer"):
        prepare(buffer, 3)  # type: ignore[arg-type]
    buffer.destroy()
    assert not hasattr(buffer, "x")
