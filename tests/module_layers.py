"""Layers as modules, and weights in the forms that they are loaded from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tl_megamoe.module import MegaMoE
from tl_megamoe.problem import Problem
from tl_megamoe.scaling import dequantize_blocks, quantize_blocks
from tl_megamoe.synthetic import random_weights
from tl_megamoe.weights import PlainWeights

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
