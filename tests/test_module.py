"""The layer as a module: what it computes, how its weights are loaded, what it refuses."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tl_megamoe import module as module_file
from tl_megamoe import reference, sharing
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.module import MegaMoE
from tl_megamoe.problem import Problem
from tl_megamoe.quantize import quantize_activations
from tl_megamoe.recipe import Recipe
from tl_megamoe.reference_buffer import ReferenceBuffer
from tl_megamoe.scaling import E4M3, dequantize_blocks, quantize_blocks
from tl_megamoe.shared_experts import with_shared, without_shared
from tl_megamoe.swizzle import swizzle_rows
from tl_megamoe.synthetic import random_weights
from tl_megamoe.weights import PlainWeights, transform_weights

H, INTER, E, K = 256, 128, 8, 2
LAYER = Problem(name="layer", hidden=H, intermediate=INTER, num_experts=E, num_topk=K, num_ranks=1)
NAMES = ("l1", "l1_sf", "l2", "l2_sf")
OPTIONS: dict[str, Any] = {"backend": "reference", "device": "cpu", "capacity": 64}


def make(**options: Any) -> MegaMoE:
    return MegaMoE(H, INTER, E, K, **{**OPTIONS, **options})


def routed(tokens: int, seed: int, top_k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """x bf16, experts, weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, H), generator=generator).bfloat16()
    logits = torch.randn((tokens, E), generator=generator)
    weights, experts = logits.softmax(1).topk(top_k, 1)
    return x, experts, weights


def per_expert(plain: PlainWeights, wide: torch.dtype | None = None) -> dict[str, Tensor]:
    """Named as in DeepSeek's checkpoints, without a prefix."""
    out: dict[str, Tensor] = {}
    for expert in range(E):
        (gate, up), (gate_sf, up_sf) = plain.l1[expert].chunk(2), plain.l1_sf[expert].chunk(2)
        parts = (("gate", gate, gate_sf), ("up", up, up_sf))
        for word, codes, sf in (*parts, ("down", plain.l2[expert], plain.l2_sf[expert])):
            put(out, f"{expert}.{word}_proj.weight", codes, sf, wide)
    return out


def put(
    out: dict[str, Tensor], name: str, codes: Tensor, sf: Tensor, wide: torch.dtype | None
) -> None:
    if wide is None:
        out[name], out[f"{name}_scale_inv"] = codes, sf
    else:
        out[name] = dequantize_blocks(codes, sf).to(wide)


def stacked(plain: PlainWeights) -> dict[str, Tensor]:
    return {
        "gate_up_proj": plain.l1,
        "gate_up_proj_scale_inv": plain.l1_sf,
        "down_proj": plain.l2,
        "down_proj_scale_inv": plain.l2_sf,
    }


def shared_mlp(num_shared: int, seed: int, wide: torch.dtype | None = None) -> dict[str, Tensor]:
    """One MLP as wide as all shared experts together."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    wide_shape = (num_shared * INTER, H)
    for word, shape in (("gate", wide_shape), ("up", wide_shape), ("down", wide_shape[::-1])):
        w = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        put(out, f"{word}_proj.weight", *quantize_blocks(w), wide)
    return out


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def bits(module: MegaMoE) -> list[Tensor]:
    return [getattr(module, name).clone().view(torch.uint8) for name in NAMES]


def equal(one: MegaMoE, other: MegaMoE) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


@pytest.fixture(scope="module")
def plain() -> PlainWeights:
    return random_weights(LAYER, seed=5)


@pytest.fixture
def module(plain: PlainWeights) -> MegaMoE:
    out = make()
    out.load_state_dict(per_expert(plain))
    return out


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


# ---- weights


def test_every_form_gives_the_weights_of_the_kernel(plain: PlainWeights, tmp_path: Path) -> None:
    wanted = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), LAYER)
    kernel = [t.view(torch.uint8) for t in (*wanted.l1, *wanted.l2)]
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    short = {f"{long}.weight": f"{word}.weight" for long, word in short.items()}
    renamed = {}
    for name, value in per_expert(plain).items():
        number, _, rest = name.partition(".")
        if rest.endswith("_scale_inv"):
            word = short[rest.removesuffix("_scale_inv")].replace(".weight", ".scale")
        else:
            word = short[rest]
        renamed[f"{number}.{word}"] = value
    forms = [per_expert(plain), renamed, stacked(plain)]
    forms += [under("experts.", form) for form in forms]
    for form in forms:
        module = make()
        addresses = [getattr(module, name).data_ptr() for name in NAMES]
        assert str(module.load_state_dict(form)) == "<All keys matched successfully>"
        assert all(torch.equal(a, b) for a, b in zip(bits(module), kernel, strict=True))
        assert addresses == [getattr(module, name).data_ptr() for name in NAMES]
        assert torch.equal(module.weights.l1[0].view(torch.uint8), kernel[0])
    prefix = "model.layers.3.mlp.experts"
    save_file(under(f"{prefix}.", per_expert(plain)), tmp_path / "model.safetensors")
    module = make().load_checkpoint(tmp_path, prefix)
    assert all(torch.equal(a, b) for a, b in zip(bits(module), kernel, strict=True))


def test_bf16_weights_are_quantised_alike(plain: PlainWeights, seed: int) -> None:
    wide = per_expert(plain, torch.bfloat16)
    shared = shared_mlp(2, seed, torch.bfloat16)
    one, other = make(num_shared_experts=2), make(num_shared_experts=2)
    one.load_state_dict({**wide, **under("shared_experts.", shared)})
    tensors = {**under("a.experts.", wide), **under("a.shared_experts.", shared)}
    other.load_checkpoint(tensors, "a.experts")
    assert equal(one, other)
    codes, sf = quantize_blocks(shared["down_proj.weight"])
    tiles = codes.view(torch.uint8).unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2)
    tiles = swizzle_rows(tiles)
    for s in range(2):
        assert torch.equal(one.l2[E + s].view(torch.uint8), tiles[:, s : s + 1])
        assert torch.equal(one.l2_sf[E + s], sf[:, s : s + 1])


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


def test_missing_and_unexpected_keys_are_torchs(plain: PlainWeights) -> None:
    module = make()
    assert module.load_state_dict({}, strict=False).missing_keys == list(NAMES)
    good = per_expert(plain)
    cut = {k: v for k, v in good.items() if not k.startswith("5.up")}
    cut["6.gate_proj.weight_scale"] = cut.pop("6.gate_proj.weight_scale_inv")
    cut["8.up_proj.weight"] = good["0.up_proj.weight"]
    found = module.load_state_dict(cut, strict=False)
    assert found.missing_keys == ["5.up_proj.weight", "6.gate_proj.weight_scale_inv"]
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(cut)
    assert 'Missing key(s) in state_dict: "5.up_proj.weight", "6.gate_proj.weight_sc' in str(
        error.value
    )
    assert 'Unexpected key(s) in state_dict: "6.gate_proj.weight_scale", "8.up_proj' in str(
        error.value
    )
    whole = make()
    whole.load_state_dict(good)
    halves = [{k: v for k, v in good.items() if (int(k[0]) < 4) == half} for half in (True, False)]
    parts = make()
    missing = [parts.load_state_dict(half, strict=False).missing_keys for half in halves]
    assert all(len(names) == 12 for names in missing)
    assert equal(parts, whole)  # shard by shard
    shared = under("shared_experts.", shared_mlp(1, 0))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*shared_experts.gate_proj"):
        module.load_state_dict({**good, **shared})
    with pytest.raises(RuntimeError, match=r"Missing key.*shared_experts.gate_proj.weight"):
        make(num_shared_experts=1).load_state_dict(good)


def test_tensors_that_do_not_fit_are_torchs_errors(plain: PlainWeights) -> None:
    good, module = per_expert(plain), make(num_shared_experts=1)
    shared = under("shared_expert.", shared_mlp(1, 0))
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"0.up_proj.bias": torch.ones(4)}, "experts with biases"),
        ({"2.up_proj.weight": torch.zeros(3, 4)}, r"2.up_proj.weight has shape \(3, 4\)"),
        ({"shared_expert_gate.weight": torch.ones(1, H)}, "multiplies its shared expert by a gate"),
        (under("shared_expert.", shared_mlp(2, 0)), r"has shape \(256, 256\), and must have"),
    ]
    for extra, message in cases:
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict({**good, **shared, **extra}, strict=False)
    router = {"gate.weight": torch.ones(E, H), "gate.e_score_correction_bias": torch.ones(E)}
    found = module.load_state_dict({**good, **shared, **router}, strict=False)
    assert found.unexpected_keys == list(router)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"gate.weight", "gate.e_score'):
        module.load_state_dict({**good, **shared, **router})
    with pytest.raises(ValueError, match="shared_prefix='s' of a layer with num_shared_experts=0"):
        make().load_checkpoint(good, "", "s")
    with pytest.raises(ValueError, match="no shared experts under 'a.shared_experts' or"):
        module.load_checkpoint(under("a.experts.", good), "a.experts")


def test_a_square_matrix_is_never_guessed(seed: int) -> None:
    module = MegaMoE(256, 128, 2, 1, **OPTIONS)  # gate_up_proj is 256 x 256
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn((2, 256, 256), generator=generator)
    down = torch.randn((2, 256, 128), generator=generator)
    with pytest.raises(RuntimeError, match="square matrices, 256 x 256: only down_proj beside it"):
        module.load_state_dict({"gate_up_proj": gate_up}, strict=False)
    with pytest.raises(RuntimeError, match=r"down_proj has shape .*it is transposed"):
        module.load_state_dict({"gate_up_proj": gate_up, "down_proj": down.mT})
    assert not module.l1.float().any()
    module.load_state_dict({"gate_up_proj": gate_up, "down_proj": down})


class FakeRank(ReferenceBuffer):
    """A buffer of one rank of four, which computes nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__(LAYER, 16, "cpu")
        layer = Problem(
            name="four", hidden=H, intermediate=INTER, num_experts=E, num_topk=K, num_ranks=4
        )
        self.problem, self.rank = layer, rank


@pytest.mark.parametrize("form", [per_expert, stacked])
def test_a_rank_loads_its_own_experts(plain: PlainWeights, form: Any) -> None:
    whole = make()
    whole.load_state_dict(form(plain))
    for rank in range(4):
        by_state = MegaMoE(H, INTER, E, K, buffer=FakeRank(rank))
        by_state.load_state_dict(form(plain))  # others' experts are not unexpected
        by_file = MegaMoE(H, INTER, E, K, buffer=FakeRank(rank))
        by_file.load_checkpoint(under("x.", form(plain)), "x")
        own = slice(2 * rank, 2 * rank + 2)
        for module in (by_state, by_file):
            assert (module.rank, module.routed.num_ranks) == (rank, 4)
            pairs = zip(bits(module), bits(whole), strict=True)
            assert all(torch.equal(a, b[own]) for a, b in pairs)


# ---- transformers


class Experts(nn.Module):
    """As transformers 5 stacks them."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)
        self.act_fn = nn.SiLU() if act is None else act


class Clamped(Experts):
    limit = 10.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Mlp(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for word in ("gate_proj", "up_proj", "down_proj"):
            w = tensors[f"{word}.weight"]
            linear = nn.Linear(w.shape[1], w.shape[0], bias=False)
            linear.weight.data = w
            setattr(self, word, linear)
        self.act_fn = nn.SiLU()


def test_from_stacked_experts(plain: PlainWeights, seed: int) -> None:
    wide = [dequantize_blocks(*pair) for pair in ((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf))]
    gate_up, down = wide[0].bfloat16(), wide[1].bfloat16()
    module = MegaMoE.from_experts(Experts(gate_up, down), K, **OPTIONS)
    other = make()
    other.load_state_dict(per_expert(plain, torch.bfloat16))
    assert equal(module, other)
    mlp = Mlp(shared_mlp(2, seed, torch.bfloat16))
    both = MegaMoE.from_experts(Experts(gate_up, down), K, shared_experts=mlp, **OPTIONS)
    wanted = make(num_shared_experts=2)
    shared = under("shared_experts.", mlp.state_dict())
    wanted.load_state_dict({**per_expert(plain, torch.bfloat16), **shared})
    assert equal(both, wanted)
    clamped = MegaMoE.from_experts(Clamped(gate_up, down), K, activation_clamp=10.0, **OPTIONS)
    assert clamped.activation_clamp == 10.0


def on_meta(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to("meta")


def test_sizes_of_the_module_and_weights_of_the_checkpoint(
    plain: PlainWeights, tmp_path: Path, seed: int
) -> None:
    """Of a module on the meta device only shapes and activation are read."""
    own = shared_mlp(2, seed)
    tensors = {**under("a.experts.", per_expert(plain)), **under("a.shared.", own)}
    save_file(tensors, tmp_path / "model.safetensors")
    wide = [dequantize_blocks(*pair) for pair in ((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf))]
    experts = on_meta(Clamped(*wide))
    mlp = on_meta(Mlp(shared_mlp(2, seed, torch.bfloat16)))
    wanted = make(num_shared_experts=2)
    wanted.load_checkpoint(tensors, "a.experts", "a.shared")
    with pytest.raises(ValueError, match="Mlp does not compute .*It does not clamp"):
        MegaMoE.from_experts(experts, K, shared_experts=mlp, activation_clamp=10.0, **OPTIONS)
    plain_experts = on_meta(Experts(*wide))
    with torch.device("meta"):
        module = MegaMoE.from_experts(
            plain_experts,
            K,
            checkpoint=tmp_path,
            prefix="a.experts",
            shared_experts=mlp,
            shared_prefix="a.shared",
            **OPTIONS,
        )
    assert equal(module, wanted)
    routed_only = MegaMoE.from_experts(
        experts, K, checkpoint=tensors, prefix="a.experts", activation_clamp=10.0, **OPTIONS
    )
    assert torch.equal(routed_only.l2_sf, wanted.l2_sf[:E])
    for options in ({"checkpoint": tensors}, {"prefix": "a"}, {"shared_prefix": "a"}):
        with pytest.raises(ValueError, match="a prefix says where in a checkpoint the experts are"):
            MegaMoE.from_experts(plain_experts, K, **options, **OPTIONS)
    with pytest.raises(ValueError, match="Experts is on the meta device and holds no values: pass"):
        MegaMoE.from_experts(plain_experts, K, **OPTIONS)
    with pytest.raises(ValueError, match="no experts under 'b'.*it has, for example, 'a.experts"):
        MegaMoE.from_experts(plain_experts, K, checkpoint=tensors, prefix="b", **OPTIONS)


class GptOss(nn.Module):
    """Biases, transposed weights, gate and up interleaved, another activation."""

    limit = 7.0

    def __init__(self, biases: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 256, 256))
        self.down_proj = nn.Parameter(torch.ones(2, 128, 256))
        if biases:
            self.gate_up_proj_bias = nn.Parameter(torch.ones(2, 256))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)


class LateClamp(Experts):
    """Clamps behind the activation, as no activation_clamp does."""

    swiglu_limit = 5.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate).clamp(max=5.0) * up.clamp(-5.0, 5.0)


class SwigluLimit(Clamped):
    limit = float("inf")
    swiglu_limit = 12.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=12.0)) * up.clamp(-12.0, 12.0)


class HiddenClamp(Experts):
    limit = 10.0


class Unlimited(Experts):
    limit = float("inf")


def test_modules_of_another_kind_are_refused(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn((2, 256, 256), generator=generator)
    down = torch.randn((2, 256, 128), generator=generator)
    no_clamp = r"No activation_clamp makes it so"
    cases: list[tuple[nn.Module, float | None, str]] = [
        (nn.ModuleList([nn.Linear(2, 2)]), None, "has no stacked gate_up_proj and down_proj"),
        (Experts(gate_up, down.mT.contiguous()), None, "are transposed"),
        (Experts(gate_up, down[:1]), None, "do not belong together"),
        (Experts(gate_up, down, nn.GELU()), None, rf"does not compute silu\(gate\).*{no_clamp}"),
        (Experts(gate_up, down, nn.GELU()), 7.0, no_clamp),
        (Experts(gate_up, down), 7.0, "It does not clamp: leave activation_clamp away"),
        (Unlimited(gate_up, down), 7.0, "It does not clamp: leave activation_clamp away"),
        (Clamped(gate_up, down), None, "limit is 10.0: pass activation_clamp=10.0"),
        (Clamped(gate_up, down), 7.0, "limit is 10.0: pass activation_clamp=10.0"),
        (SwigluLimit(gate_up, down), None, "limit is 12.0: pass activation_clamp=12.0"),
        (LateClamp(gate_up, down), None, no_clamp),
        (LateClamp(gate_up, down), 5.0, no_clamp),
        (HiddenClamp(gate_up, down), 10.0, "has the limit 10.0 and no _apply_gate"),
        (GptOss(biases=True), None, "gate_up_proj_bias: experts with biases are not what"),
        (GptOss(biases=False), 7.0, no_clamp),
    ]
    for experts, clamp, message in cases:
        for module in (experts, on_meta(experts)):
            with pytest.raises(ValueError, match=message):
                MegaMoE.from_experts(module, 1, activation_clamp=clamp, **OPTIONS)
    learnt = on_meta(Experts(gate_up, down, nn.PReLU(128)))
    with pytest.raises(ValueError, match=no_clamp):  # its values are not there to be tried
        MegaMoE.from_experts(learnt, 1, checkpoint={}, prefix="a", **OPTIONS)
    odd = Mlp({f"{word}_proj.weight": torch.ones(64, 64) for word in ("gate", "up", "down")})
    with pytest.raises(ValueError, match="a multiple of 128 columns beside hidden=256"):
        MegaMoE.from_experts(Experts(gate_up, down), 1, shared_experts=odd, **OPTIONS)
    assert MegaMoE.from_experts(Unlimited(gate_up, down), 1, **OPTIONS).activation_clamp is None


GIVEN_UP = {
    "gpt_oss.modeling_gpt_oss.GptOssExperts": "proj_bias: experts with biases",
    "llama4.modeling_llama4.Llama4TextExperts": "are transposed",
    "gemma4.modeling_gemma4.Gemma4TextExperts": "No activation_clamp makes it so",
}


@pytest.mark.parametrize("kind", GIVEN_UP)
def test_what_transformers_computes_otherwise_is_refused_for_its_reason(kind: str) -> None:
    pytest.importorskip("transformers")
    module_name, _, name = kind.rpartition(".")
    modeling = importlib.import_module(f"transformers.models.{module_name}")
    config_name = name.replace("Experts", "Config")
    config = getattr(modeling, config_name)()
    for word, size in (
        ("hidden_size", H),
        ("intermediate_size", INTER),
        ("moe_intermediate_size", INTER),
        ("num_experts", E),
        ("num_local_experts", E),
    ):
        setattr(config, word, size)
    with torch.device("meta"):
        experts = getattr(modeling, name)(config)
    with pytest.raises(ValueError, match=GIVEN_UP[kind]):
        MegaMoE.from_experts(experts, K, **OPTIONS)


def test_transformers_models(seed: int) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=INTER,
        n_routed_experts=E,
        num_local_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(seed)
    block = modeling.DeepseekV3MoE(config).bfloat16()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x, experts, weights = routed(32, seed)
    module = MegaMoE.from_experts(block.experts, K, shared_experts=block.shared_experts, **OPTIONS)
    with torch.no_grad():
        y = block.experts(x, experts, weights) + block.shared_experts(x)
        found = module(x, experts, weights)
    # Weights of three products, x for two of them and h are quantised, each with an error of 2.7 %
    # a value: sqrt(6) * 0.027 = 0.066; transformers rounds its sums to BF16.
    assert (found - y).float().norm() / y.float().norm() < 0.08


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
