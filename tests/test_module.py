"""The layer as a module: what it computes, its state, its buffers, what it refuses."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from module_layers import (
    INTER,
    LAYER,
    NAMES,
    OPTIONS,
    E,
    H,
    K,
    bits,
    equal,
    make,
    per_expert,
    routed,
    shared_mlp,
    stacked,
    under,
)
from module_layers import module as module
from module_layers import plain as plain
from torch import Tensor, nn

from tl_megamoe import module as module_file
from tl_megamoe import reference, sharing
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.module import MegaMoE
from tl_megamoe.problem import Problem
from tl_megamoe.quantize import quantize_activations
from tl_megamoe.recipe import Recipe
from tl_megamoe.reference_buffer import ReferenceBuffer
from tl_megamoe.scaling import E4M3, dequantize_blocks
from tl_megamoe.shared_experts import with_shared, without_shared
from tl_megamoe.weights import PlainWeights

# ---- what it computes


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="pow2", intermediate_group=64)])
@pytest.mark.parametrize("clamp", [None, 1.5])
def test_forward_is_the_reference(
    plain: PlainWeights, recipe: Recipe, clamp: float | None, seed: int
) -> None:
    module = make(recipe=recipe, activation_clamp=clamp)
    module.load_state_dict(per_expert(plain))
    x, experts, weights = routed(13, seed)
    experts[3] = -1
    experts[4, 1] = E  # no expert: dropped
    codes, sf = quantize_activations(x, recipe)
    y = reference.moe(LAYER, codes, sf, experts, weights, plain, recipe, clamp)
    found = module(x, experts, weights)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, y)
    assert torch.equal(module(x, experts.int(), weights), y)
    assert not found[3].any()
    assert found[4].any()


def test_leading_dimensions_come_back(module: MegaMoE, seed: int) -> None:
    x, experts, weights = routed(12, seed)
    flat = module(x, experts, weights, token_bound=12)
    folded = module(x.view(3, 4, H), experts, weights)
    assert folded.shape == (3, 4, H)
    assert torch.equal(folded.view(12, H), flat)
    both = module(x.view(3, 4, H), experts.view(3, 4, K), weights.view(3, 4, K))
    assert torch.equal(both, folded)
    assert torch.equal(module(x[5], experts[5:6], weights[5:6]), flat[5])
    assert module(x[:0], experts[:0], weights[:0]).shape == (0, H)
    with pytest.raises(ValueError, match=r"topk_idx of shape \(4, 3, 2\) must be .*leading dim"):
        module(x.view(3, 4, H), experts.view(4, 3, K), weights)
    with pytest.raises(ValueError, match="hidden"):
        module(x.view(6, 2 * H), experts[:6], weights[:6])
    with pytest.raises(ValueError, match="topk_idx"):
        module(x, experts[:, :1], weights[:, :1])


def test_an_unloaded_module_gives_zero_and_says_so_once(
    plain: PlainWeights, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> int:
        return sum("its weights were never loaded" in r.message for r in caplog.records)

    module = make(name="mine")
    for _ in range(2):
        assert not module(*routed(5, seed)).any()
    assert said() == 1
    assert "MegaMoE mine computes zeros" in caplog.text
    by_parts, by_file, own = make(), make(), make()
    cut = {k: v for k, v in per_expert(plain).items() if k.startswith("3.")}
    by_parts.load_state_dict(cut, strict=False)
    by_file.load_checkpoint(under("x.", stacked(plain)), "x")
    own.load_state_dict(by_file.state_dict())
    for loaded in (by_parts, by_file, own, copy.deepcopy(own)):
        assert loaded(*routed(5, seed)).shape == (5, H)
    assert said() == 1
    missed = make()
    missed.load_state_dict({"another.weight": torch.ones(1)}, strict=False)
    torch.compile(missed, backend="eager", fullgraph=True)(*routed(5, seed))
    assert said() == 1  # compiled code says nothing
    missed(*routed(5, seed))
    assert said() == 2


@pytest.mark.parametrize("num_shared", [1, 3])
def test_shared_experts_are_added(plain: PlainWeights, num_shared: int, seed: int) -> None:
    own = shared_mlp(num_shared, seed)
    state = {**under("experts.", per_expert(plain)), **under("shared_experts.", own)}
    module = make(num_shared_experts=num_shared)
    module.load_state_dict(state)
    x, experts, weights = routed(40, seed)
    routed_only = make()
    routed_only.load_state_dict(per_expert(plain))

    w = {
        word: dequantize_blocks(own[f"{word}_proj.weight"], own[f"{word}_proj.weight_scale_inv"])
        for word in ("gate", "up", "down")
    }
    h = reference.swiglu(x.float() @ w["gate"].T, x.float() @ w["up"].T)
    shared = h @ w["down"].T
    found = module(x, experts, weights).float() - routed_only(x, experts, weights).float()
    # x is quantised for two products and h for one, each with an error of 2.7 % a value:
    # sqrt(3) * 0.027 = 0.047; the two sums are rounded to BF16.
    assert (found - shared).norm() / shared.norm() < 0.06
    assert shared.norm() > 0.1 * x.float().norm()


def test_shared_experts_are_slices_of_one_matrix(plain: PlainWeights, seed: int) -> None:
    """Two shared experts compute to the bit what they do as routed ones of weight 1."""
    own = shared_mlp(2, seed)
    module = make(num_shared_experts=2)
    module.load_state_dict({**per_expert(plain), **under("shared_expert.", own)})
    extra = {}
    for s in range(2):
        for word, axis in (("gate", 0), ("up", 0), ("down", 1)):
            for ending in ("weight", "weight_scale_inv"):
                part = own[f"{word}_proj.{ending}"].chunk(2, axis)[s]
                extra[f"{E + s}.{word}_proj.{ending}"] = part.contiguous()
    as_routed = MegaMoE(H, INTER, E + 2, K + 2, **OPTIONS)
    as_routed.load_state_dict({**per_expert(plain), **extra})
    assert equal(module, as_routed)
    x, experts, weights = routed(20, seed)
    more = torch.cat((experts, torch.tensor([[E, E + 1]]).expand(20, 2)), 1)
    y = as_routed(x, more, torch.cat((weights, torch.ones(20, 2)), 1))
    assert torch.equal(module(x, experts, weights), y)


def test_with_shared_counts_them_on_every_rank() -> None:
    four = Problem(
        name="four", hidden=H, intermediate=INTER, num_experts=E, num_topk=K, num_ranks=4
    )
    shared = with_shared(four, 2)
    assert (shared.num_experts, shared.num_topk, shared.num_local_experts) == (16, 4, 4)
    assert with_shared(four, 0) is four
    assert without_shared(shared, 2) == four
    assert without_shared(four, 0) is four
    with pytest.raises(ValueError, match="num_shared=2 must be from 0 to below num_topk=2"):
        without_shared(four, 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(module: MegaMoE, backend: str, seed: int) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(H, E, bias=False)
            self.experts = module

        def forward(self, x: Tensor) -> Tensor:
            weights, experts = self.router(x.float()).softmax(-1).topk(K, -1)
            return x + self.experts(x, experts, weights)

    torch._dynamo.reset()
    torch.manual_seed(seed)
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        for tokens in (6, 9, 1):
            x = torch.randn(2, tokens, H).bfloat16()
            assert torch.equal(compiled(x), block(x))
        before = block(x)
        module.l2_sf.mul_(2)  # compiled code reads the weights where they are
        assert not torch.equal(compiled(x), before)
        assert torch.equal(compiled(x), block(x))


def test_no_backward(module: MegaMoE, seed: int) -> None:
    x, experts, weights = routed(4, seed)
    with pytest.raises(RuntimeError, match="no backward"):
        module(x.requires_grad_(), experts, weights)
    with torch.inference_mode():
        assert module(x, experts, weights).any()


# ---- state


def test_state_dict_round_trip(module: MegaMoE) -> None:
    state = module.state_dict(prefix="experts.")
    assert sorted(state) == [f"experts.{name}" for name in NAMES]
    model = nn.Module()
    model.experts = make()
    model.load_state_dict(state, assign=True)
    assert equal(model.experts, module)
    assert model.experts.l1.data_ptr() != module.l1.data_ptr()
    wrong = {**state, "experts.l1_sf": state["experts.l1_sf"].bfloat16()}
    with pytest.raises(RuntimeError, match=r"l1_sf is torch.bfloat16, and must be torch.float32"):
        model.load_state_dict(wrong)
    small = {**state, "experts.l2": state["experts.l2"][:1]}
    with pytest.raises(RuntimeError, match=r"size mismatch for experts.l2"):
        model.load_state_dict(small)


def test_a_state_dict_of_another_layout_is_refused(module: MegaMoE) -> None:
    state = module.state_dict()
    state._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"saved in layout 1, and this one reads layout 2"):
        make().load_state_dict(state)


# ---- buffers and life


@pytest.fixture
def no_buffers() -> None:
    """Nothing made or said before."""
    gc.collect()
    sharing._said.clear()


def test_modules_of_a_shape_share_a_buffer(no_buffers: None) -> None:
    only = 40  # no other test's: AOT Autograd keeps what it compiled, modules too
    one, other = make(capacity=only), make(capacity=only, name="other")
    assert one.buffer is other.buffer
    assert make(capacity=32).buffer is not one.buffer
    assert make(capacity=only, recipe=Recipe(scale="pow2")).buffer is not one.buffer
    assert make(capacity=only, num_shared_experts=1).buffer is not one.buffer
    key, problem = one.buffer.key, one.problem
    del one, other
    gc.collect()
    assert make(capacity=only).buffer.key != key  # nobody held it
    own = ReferenceBuffer(problem, 48, "cpu")
    module = MegaMoE(H, INTER, E, K, buffer=own)
    assert module.buffer is own
    assert (module.capacity, module.backend, module.device.type) == (48, "reference", "cpu")


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    buffer = ReferenceBuffer(LAYER, 48, "cpu")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_shared_experts": 1}, r"num_experts=8.*module needs .*num_experts=9"),
        ({"capacity": 64}, "capacity=64 differs from the buffer's, 48"),
        ({"recipe": Recipe(scale="pow2")}, "recipe=pow2-128 differs from the buffer's, exact-128"),
        ({"backend": "kernel"}, "backend='kernel' with a ReferenceBuffer"),
        ({"kernels": "somewhere"}, "kernels='somewhere' together with a buffer"),
        ({"device": "meta"}, "device=meta differs from the buffer's, cpu"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            MegaMoE(H, INTER, E, K, buffer=buffer, **options)
    with pytest.raises(ValueError, match="buffer must be a SymmBuffer or a ReferenceBuffer"):
        MegaMoE(H, INTER, E, K, buffer="a buffer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs an SM90 GPU"):
        MegaMoE(H, INTER, E, K, buffer=SymmBuffer(LAYER, 16, "cpu"))


def test_wrong_arguments_are_named() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"backend": "cuda"}, "backend='cuda' must be one of auto, kernel, reference"),
        ({"backend": "kernel"}, "backend='kernel' on cpu: the kernel needs an SM90 GPU"),
        ({"device": "meta"}, "device='meta' must be a CUDA device or the CPU"),
        ({"activation_clamp": -1.0}, "activation_clamp=-1.0 must be a positive number"),
        ({"num_shared_experts": -1}, "num_shared_experts=-1 must be an integer from 0"),
        ({"kernels": "k"}, "kernels='k' on cpu with backend='reference': the reference runs no"),
        ({"kernels": "k", "backend": "auto"}, "kernels='k' on cpu with backend='auto'"),
        ({"timeout_s": -1}, "timeout_s=-1 must be a positive number"),
        ({"recipe": "fast"}, "recipe='fast' must be"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(ValueError, match="hidden=200 of problem .* is not a multiple of 128"):
        MegaMoE(200, INTER, E, K, **OPTIONS)
    with pytest.raises(RuntimeError, match="init_process_group"):
        make(group=object())


def test_auto_says_once_that_it_runs_the_reference(
    no_buffers: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tl_megamoe"):
        modules = [make(backend="auto") for _ in range(3)]
    assert [m.backend for m in modules] == ["reference"] * 3
    said = [r.message for r in caplog.records if "float32 reference on cpu" in r.message]
    assert len(said) == 1


def test_a_group_of_one_rank(tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        module = make(group=dist.group.WORLD)
        assert (module.rank, module.routed.num_ranks) == (0, 1)
        assert module.buffer is not make().buffer
    finally:
        dist.destroy_process_group()


def test_the_reference_runs_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_file, "rank_in", lambda group: (2, 1))
    monkeypatch.setattr(sharing, "gather", lambda card, *_: [card])
    for backend in ("auto", "reference"):
        with pytest.raises(ValueError, match=f"one rank.* has 2: backend='{backend}' on cpu"):
            make(group=object(), backend=backend)
    with pytest.raises(ValueError, match="num_ranks=2 does not divide num_experts=7"):
        MegaMoE(H, INTER, 7, K, object(), **OPTIONS)


class FakeSymmBuffer(SymmBuffer):
    """What the registry looks at."""

    def __init__(self) -> None:
        self.timeout_s, self.raw = 60.0, torch.empty(0)


def test_ranks_find_a_buffer_together_or_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's garbage collector has freed it, another's not: all make a new one."""
    two = Problem(name="two", hidden=H, intermediate=INTER, num_experts=E, num_topk=K, num_ranks=2)
    asked = sharing.BufferOptions(
        group=object(),
        capacity=16,
        recipe=None,
        backend="kernel",
        device="cpu",
        timeout_s=60.0,
        kernels=None,
    )
    other: dict[str, Any] = {"found": True, "error": None}

    def make_buffer(*_: Any, **__: Any) -> SymmBuffer:
        return FakeSymmBuffer()

    monkeypatch.setattr(sharing, "_pick", lambda *_: ("kernel", torch.device("cpu")))
    monkeypatch.setattr(sharing, "gather", lambda card, *_: [card, other])
    monkeypatch.setattr(SymmBuffer, "from_process_group", make_buffer)
    first = sharing.find_buffer(two, asked)
    assert sharing.find_buffer(two, asked) is first
    other["found"] = False
    second = sharing.find_buffer(two, asked)
    assert second is not first
    other["found"] = True
    assert sharing.find_buffer(two, asked) is second
    with pytest.raises(ValueError, match="rank 0: timeout_s=5.0 differs from timeout_s=60.0"):
        sharing.find_buffer(two, replace(asked, timeout_s=5.0))
    other["error"] = "timeout_s=7"
    with pytest.raises(ValueError, match="no rank has a buffer. rank 1: timeout_s=7"):
        sharing.find_buffer(two, asked)
    other["error"] = None
    del second.raw
    assert sharing.find_buffer(two, asked) is not second  # destroyed


def test_copies_share_the_buffer_and_nothing_is_pickled(module: MegaMoE, seed: int) -> None:
    model = nn.Sequential(module)
    copied = copy.deepcopy(model)[0]
    assert copied.buffer is module.buffer
    assert equal(copied, module)
    copied.l1_sf.zero_()
    x, experts, weights = routed(4, seed)
    assert module(x, experts, weights).any()
    assert not copied(x, experts, weights).any()
    with pytest.raises(TypeError, match="cannot be pickled.*Save state_dict"):
        pickle.dumps(model)


def test_conversions_leave_the_weights_alone(module: MegaMoE, seed: int) -> None:
    x, experts, weights = routed(4, seed)
    before, y = bits(module), module(x, experts, weights)
    model = nn.Sequential(module)
    for convert in (model.half, model.bfloat16, model.float, model.cpu, model.eval):
        convert()
    model.to("cpu", torch.float64)
    assert module.l1.dtype == E4M3
    assert all(torch.equal(a, b) for a, b in zip(before, bits(module), strict=True))
    assert torch.equal(module(x, experts, weights), y)
    model.to(memory_format=torch.channels_last_3d)
    model.to_empty(device="cpu")
    assert torch.equal(module(x, experts, weights), y)
    with pytest.raises(ValueError, match="cannot move to meta: .* put it into the model after the"):
        model.to("meta")
    with torch.device("meta"):  # as loaders of big models do
        assert make().l1.device.type == "cpu"


def test_repr_says_what_it_is(module: MegaMoE) -> None:
    assert repr(module) == (
        "MegaMoE(256, 128, num_experts=8, top_k=2, capacity=64, recipe=exact-128, "
        "backend=reference, device=cpu)"
    )
    text = repr(make(num_shared_experts=1, activation_clamp=7))
    assert "num_shared_experts=1, activation_clamp=7.0," in text
