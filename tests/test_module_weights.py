"""Weights of the layer as a module: every form that is loaded, and the modules of transformers."""

from __future__ import annotations

import copy
import importlib
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
from module_layers import plain as plain
from safetensors.torch import save_file
from torch import Tensor, nn

from tl_megamoe.module import MegaMoE
from tl_megamoe.problem import Problem
from tl_megamoe.reference_buffer import ReferenceBuffer
from tl_megamoe.scaling import dequantize_blocks, quantize_blocks
from tl_megamoe.swizzle import swizzle_rows
from tl_megamoe.weights import PlainWeights, transform_weights

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
