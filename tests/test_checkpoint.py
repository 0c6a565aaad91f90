"""Expert weights from checkpoints: every layout, a rank's own experts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tl_megamoe import load_experts, reference, transform_weights
from tl_megamoe.checkpoint import PlainTarget, TiledTarget, place, plan_shared
from tl_megamoe.problem import Problem
from tl_megamoe.scaling import E4M3, dequantize_blocks, quantize_blocks
from tl_megamoe.sources import Tensors
from tl_megamoe.synthetic import random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, PlainWeights

LAYER = Problem(name="layer", hidden=256, intermediate=128, num_experts=8, num_topk=2, num_ranks=4)
WHOLE = replace(LAYER, num_ranks=1)
PREFIX = "model.layers.3.mlp.experts"


@pytest.fixture(scope="module")
def weights() -> PlainWeights:
    return random_weights(WHOLE, seed=5)


def per_expert(plain: PlainWeights, *, wide: torch.dtype | None = None) -> dict[str, Tensor]:
    """As DeepSeek's FP8 checkpoints name them; dequantised to `wide` without scales."""
    out: dict[str, Tensor] = {}
    half, blocks = LAYER.intermediate, LAYER.intermediate // 128
    for expert in range(WHOLE.num_experts):
        l1, l1_sf = plain.l1[expert], plain.l1_sf[expert]
        parts = {
            "gate_proj": (l1[:half], l1_sf[:blocks]),
            "up_proj": (l1[half:], l1_sf[blocks:]),
            "down_proj": (plain.l2[expert], plain.l2_sf[expert]),
        }
        for word, (codes, sf) in parts.items():
            name = f"{PREFIX}.{expert}.{word}.weight"
            if wide is None:
                out[name], out[f"{name}_scale_inv"] = codes.clone(), sf.clone()
            else:
                out[name] = dequantize_blocks(codes, sf).to(wide)
    return out


def stacked(plain: PlainWeights) -> dict[str, Tensor]:
    return {
        f"{PREFIX}.gate_up_proj": plain.l1,
        f"{PREFIX}.gate_up_proj_scale_inv": plain.l1_sf,
        f"{PREFIX}.down_proj": plain.l2,
        f"{PREFIX}.down_proj_scale_inv": plain.l2_sf,
    }


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1, index: bool = True) -> Path:
    """Shards in the order of the names of experts, so that a rank's lie in few of them."""
    names = list(tensors)
    places = {}
    for shard in range(shards):
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in mine}, folder / file)
        places.update(dict.fromkeys(mine, file))
    if index:
        data = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(data))
    return folder


def same(one: PlainWeights, other: PlainWeights, experts: slice) -> bool:
    pairs = ((one.l1, other.l1), (one.l1_sf, other.l1_sf), (one.l2, other.l2))
    pairs = (*pairs, (one.l2_sf, other.l2_sf))

    def bits(t: Tensor) -> Tensor:
        return t.contiguous().view(torch.uint8)

    return all(torch.equal(bits(a), bits(b[experts])) for a, b in pairs)


@pytest.mark.parametrize("make", [per_expert, stacked])
@pytest.mark.parametrize("index", [True, False])
def test_each_rank_gets_its_experts(
    weights: PlainWeights, tmp_path: Path, make: object, index: bool
) -> None:
    assert callable(make)
    tensors = make(weights)
    shards = 4 if len(tensors) > 4 else 2
    folder = save(tmp_path, tensors, shards, index)
    for rank in range(4):
        own = slice(2 * rank, 2 * rank + 2)
        assert same(load_experts(folder, PREFIX, LAYER, rank), weights, own)
        assert same(load_experts(tensors, PREFIX, LAYER, rank), weights, own)
        assert same(load_experts(folder, PREFIX, LAYER.one_rank(), rank), weights, own)
    assert same(load_experts(folder, PREFIX, WHOLE), weights, slice(None))


def test_a_rank_opens_only_the_files_of_its_experts(weights: PlainWeights, tmp_path: Path) -> None:
    folder = save(tmp_path, per_expert(weights), shards=4)
    for number in (1, 2, 4):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    assert same(load_experts(folder, PREFIX, LAYER, rank=2), weights, slice(4, 6))
    with pytest.raises(ValueError, match="there is no file .*00001-of-00004.*the checkpoint's"):
        load_experts(folder, PREFIX, LAYER, rank=0)


def test_one_file(weights: PlainWeights, tmp_path: Path) -> None:
    save(tmp_path, per_expert(weights), index=False)
    file = next(tmp_path.glob("*.safetensors"))
    assert same(load_experts(str(file), PREFIX, LAYER, 3), weights, slice(6, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_weights_are_quantised_per_block(
    weights: PlainWeights, tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = per_expert(weights, wide=dtype)
    found = load_experts(save(tmp_path, tensors), PREFIX, LAYER, 1)
    codes, sf = quantize_blocks(tensors[f"{PREFIX}.2.down_proj.weight"])
    assert torch.equal(found.l2[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.l2_sf[0], sf)
    gate = dequantize_blocks(found.l1[1], found.l1_sf[1])[: LAYER.intermediate]
    wide = tensors[f"{PREFIX}.3.gate_proj.weight"].float()
    assert (gate - wide).norm() / wide.norm() < 0.04  # e4m3 has three bits of mantissa


def test_a_layer_from_a_checkpoint_computes_what_its_weights_do(
    weights: PlainWeights, tmp_path: Path
) -> None:
    folder = save(tmp_path, per_expert(weights), shards=3)
    found = load_experts(folder, PREFIX, WHOLE)
    inputs = random_inputs(WHOLE, 16, "uniform", seed=2)
    args = (inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
    assert torch.equal(reference.moe(WHOLE, *args, found), reference.moe(WHOLE, *args, weights))
    kernel = transform_weights((found.l1, found.l1_sf), (found.l2, found.l2_sf), WHOLE)
    assert kernel.l1[0].dtype == E4M3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_are_exact(weights: PlainWeights, dtype: torch.dtype) -> None:
    tensors = per_expert(weights)
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    rounded = {name: tensors[name].log2().round().exp2().to(dtype) for name in scales}
    found = load_experts({**tensors, **rounded}, PREFIX, LAYER, 1)
    assert found.l2_sf.dtype == torch.float32
    assert torch.equal(found.l2_sf[0], rounded[f"{PREFIX}.2.down_proj.weight_scale_inv"].float())


def test_the_names_of_deepseek_v4(weights: PlainWeights, tmp_path: Path) -> None:
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {}
    for name, value in per_expert(weights).items():
        for word, short in words.items():
            name = name.replace(f"{word}.weight_scale_inv", f"{short}.scale")
            name = name.replace(f"{word}.weight", f"{short}.weight")
        renamed[name.replace(PREFIX, "layers.3.ffn.experts")] = value
    folder = save(tmp_path, renamed, shards=3)
    for rank in range(4):
        found = load_experts(folder, "layers.3.ffn.experts", LAYER, rank)
        assert same(found, weights, slice(2 * rank, 2 * rank + 2))
    index = folder / "model.safetensors.index.json"
    assert same(load_experts(index, "layers.3.ffn.experts", WHOLE), weights, slice(None))


def test_a_name_in_two_files_is_no_guess(weights: PlainWeights, tmp_path: Path) -> None:
    save(tmp_path, per_expert(weights), index=False)
    save_file({f"{PREFIX}.0.up_proj.weight": weights.l1[0]}, tmp_path / "z-old.safetensors")
    with pytest.raises(ValueError, match=r"is in .* and in .*z-old.safetensors: keep one"):
        load_experts(tmp_path, PREFIX, LAYER)


def test_a_square_stacked_matrix_needs_the_other_one(weights: PlainWeights) -> None:
    """gate_up_proj is (8, 256, 256) here: its shape does not tell whether it is transposed."""
    turned = {**stacked(weights), f"{PREFIX}.down_proj": weights.l2.view(torch.uint8).mT.view(E4M3)}
    with pytest.raises(ValueError, match=r"down_proj has shape \(8, 128, 256\).*transposed"):
        load_experts(turned, PREFIX, LAYER)
    alone = changed(stacked(weights), f"{PREFIX}.down_proj", None)
    with pytest.raises(ValueError, match="gate_up_proj holds square matrices, 256 x 256: only"):
        load_experts(alone, PREFIX, LAYER)


def test_a_shared_experts_matrix_is_divided_exactly(weights: PlainWeights, seed: int) -> None:
    """Codes and scales of BF16 and of FP8 weights; every shared expert gets whole blocks."""
    inter, num_shared, first = LAYER.intermediate, 3, LAYER.num_local_experts
    generator = torch.Generator().manual_seed(seed)
    wide = {
        f"s.{word}.weight": torch.randn(shape, generator=generator).bfloat16()
        for word, shape in (
            ("w1", (num_shared * inter, LAYER.hidden)),
            ("w3", (num_shared * inter, LAYER.hidden)),
            ("w2", (LAYER.hidden, num_shared * inter)),
        )
    }
    codes = {}
    for name, value in wide.items():
        codes[name], codes[name.replace(".weight", ".scale")] = quantize_blocks(value)
    target = replace(LAYER, num_experts=LAYER.num_experts + 4 * num_shared)
    for tensors in (wide, codes):
        out = PlainTarget(target, torch.device("cpu"))
        source = Tensors(tensors)
        for piece in plan_shared(source, "s", LAYER, num_shared):
            place(source, piece, out)
        for s in range(num_shared):
            rows = slice(s * inter, (s + 1) * inter)
            for found, found_sf, w in (
                (out.weights.l1[first + s][:inter], out.weights.l1_sf[first + s][:1], "w1"),
                (out.weights.l1[first + s][inter:], out.weights.l1_sf[first + s][1:], "w3"),
                (out.weights.l2[first + s], out.weights.l2_sf[first + s], "w2"),
            ):
                part = wide[f"s.{w}.weight"][(slice(None), rows) if w == "w2" else rows]
                own, own_sf = quantize_blocks(part)
                assert torch.equal(found.view(torch.uint8), own.view(torch.uint8))
                assert torch.equal(found_sf, own_sf)
    gated = {**wide, "s_gate.weight": torch.ones(1, LAYER.hidden)}
    with pytest.raises(ValueError, match="s_gate.weight: the model multiplies its shared expert"):
        plan_shared(Tensors(gated), "s", LAYER, num_shared)


@pytest.mark.parametrize("expert", [0, 7])
def test_the_tiled_target_is_transform_weights(weights: PlainWeights, expert: int) -> None:
    """A part written in place is what the whole transformation makes of it; no other is touched."""
    kernel = transform_weights((weights.l1, weights.l1_sf), (weights.l2, weights.l2_sf), WHOLE)
    l1, l1_sf, l2, l2_sf = (torch.zeros_like(t) for t in (*kernel.l1, *kernel.l2))
    empty = MoEWeights((l1, l1_sf), (l2, l2_sf))
    target = TiledTarget(empty)
    (gate, up), (gate_sf, up_sf) = weights.l1[expert].chunk(2), weights.l1_sf[expert].chunk(2)
    target.put(expert, "gate", gate, gate_sf)
    target.put(expert, "up", up, up_sf)
    target.put(expert, "down", weights.l2[expert], weights.l2_sf[expert])
    for found, wanted in zip((*empty.l1, *empty.l2), (*kernel.l1, *kernel.l2), strict=True):
        assert torch.equal(found[expert].view(torch.uint8), wanted[expert].view(torch.uint8))
        assert int(found.view(torch.uint8).count_nonzero()) == int(
            wanted[expert].view(torch.uint8).count_nonzero()
        )


def changed(tensors: dict[str, Tensor], name: str, value: Tensor | None) -> dict[str, Tensor]:
    out = {k: v for k, v in tensors.items() if k != name}
    if value is not None:
        out[name] = value
    return out


def test_what_does_not_fit_is_named(weights: PlainWeights, tmp_path: Path) -> None:
    good = per_expert(weights)
    gate = f"{PREFIX}.0.gate_proj.weight"
    cases = [
        (changed(good, f"{gate}_scale_inv", None), f"no '{gate}_scale_inv'"),
        (
            changed(good, gate, good[gate][:64]),
            r"has shape \(64, 256\), and must have \(128, 256\)",
        ),
        (
            changed(good, gate, torch.zeros(128, 256, dtype=torch.int8)),
            r"is torch.int8, .*packed FP4",
        ),
        (changed(good, gate, good[gate].view(torch.uint8).T.contiguous().view(E4M3)), "transposed"),
        (changed(good, f"{PREFIX}.0.gate_proj.bias", torch.ones(128)), "experts with biases"),
        (changed(good, gate, torch.empty(128, 256, device="meta")), "meta device"),
        (changed(good, gate, torch.zeros(128, 256)), "has scales in .*only torch.float8_e4m3fn"),
        (
            changed(good, f"{gate}_scale_inv", torch.ones(1, 2, dtype=torch.float64)),
            "_scale_inv is torch.float64, and must be one of torch.float32, torch.bfloat16",
        ),
        (changed(good, f"{PREFIX}.7.gate_proj.weight", None), "has 7 experts .*'layer' 8 over all"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            load_experts(tensors, PREFIX, LAYER)
    with pytest.raises(
        ValueError, match=r"no experts under 'layers.3'.*for example, 'model.layers"
    ):
        load_experts(good, "layers.3", LAYER)
    with pytest.raises(ValueError, match="rank=4 must be within 0 and the 4 ranks"):
        load_experts(good, PREFIX, LAYER, 4)
    short = {**stacked(weights), f"{PREFIX}.down_proj": weights.l2[:, :128]}
    with pytest.raises(
        ValueError, match=r"has shape \(8, 128, 128\), and must have \(8, 256, 128\)"
    ):
        load_experts(short, PREFIX, LAYER)
    fewer = replace(LAYER, num_experts=4)  # the checkpoint's experts are not those of the layer
    with pytest.raises(ValueError, match=r"has shape \(8, 256, 256\), and must have \(4, "):
        load_experts(stacked(weights), PREFIX, fewer)
    with pytest.raises(ValueError, match="there is no .safetensors file at"):
        load_experts(tmp_path / "nothing", PREFIX, LAYER)
    (tmp_path / "broken.safetensors").write_text("{}")
    with pytest.raises(ValueError, match="broken.safetensors is no safetensors file"):
        load_experts(tmp_path, PREFIX, LAYER)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index of safetensors files"):
        load_experts(tmp_path, PREFIX, LAYER)
