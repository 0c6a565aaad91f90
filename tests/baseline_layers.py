"""Layers for the baselines, stand-ins for their packages, and distances from the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.explorer.baselines.base import Baseline, Layer, LayerSet, Prepared
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.synthetic import random_inputs, random_weights
from tl_megamoe.weights import PlainWeights

SMALL = Problem(name="s", hidden=512, intermediate=512, num_experts=4, num_topk=2, num_ranks=1)
PAIR = replace(SMALL, num_ranks=2)
GROUP64 = Recipe(intermediate_group=64)


@lru_cache
def weights_of(index: int) -> PlainWeights:
    return random_weights(SMALL, seed=index)


def make_layer(
    tokens: int, seed: int, recipe: Recipe | None = None, *, mask: float = 0.0, sets: int = 1
) -> Layer:
    routed = random_inputs(SMALL, tokens, "zipf:1", mask, seed)
    made = []
    for index in range(sets):
        inputs = random_inputs(SMALL, tokens, seed=seed + 1 + index)
        inputs = replace(inputs, topk_idx=routed.topk_idx, topk_weights=routed.topk_weights)
        made.append(LayerSet(weights_of(index), inputs))
    return Layer(SMALL, recipe or Recipe(), made)


def expected(layer: Layer, index: int) -> Tensor:
    s = layer.sets[index]
    i = s.inputs
    return reference.moe(
        layer.problem, i.x, i.x_sf, i.topk_idx, i.topk_weights, s.plain, layer.recipe
    )


def errors(baseline: Baseline, layer: Layer) -> reference.Comparison:
    """The last set's result under the baseline's own bounds."""
    prepared = baseline.prepare(layer)
    return compare(baseline, prepared, layer)


def compare(baseline: Baseline, prepared: Prepared, layer: Layer) -> reference.Comparison:
    index = len(layer.sets) - 1
    prepared.launch(index)
    bounds = baseline.tolerance
    assert bounds is not None
    return reference.compare(
        prepared.outputs[index],
        expected(layer, index),
        intermediate=layer.problem.intermediate,
        max_rel_error=bounds.result_of(layer.num_tokens),
        max_token_error=bounds.token,
    )


def scaled_mm(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: Any, out: Tensor
) -> Tensor:
    """`torch._scaled_mm` with block scales on SM90: what it asks for, and its result."""
    rows, k = a.shape
    assert rows % 4 == 0, "scales that begin at multiples of 16 bytes"
    assert b.stride() == (1, k)
    assert scale_a.shape == (rows, k // 128)
    assert scale_a.stride() == (1, rows)
    assert scale_a.storage_offset() * 4 % 16 == 0
    assert scale_b.t().is_contiguous()
    assert scale_b.t().shape == (b.shape[1] // 128, k // 128)
    assert out.dtype == out_dtype == torch.bfloat16
    return out.copy_(reference.scaled_product(a, scale_a, b.t(), scale_b.t()))


class FakeDeepGemm:
    """Grouped products as DeepGEMM's SM90 kernels take them; rows of no expert become NaN."""

    def __init__(self, alignment: int = 32):
        self.alignment = alignment
        self.masked_calls: list[int] = []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor
    ) -> None:
        (codes, sf), (w, w_sf) = a, b
        assert sf.shape == (len(codes), w.shape[2] // 128)
        assert sf.stride() == (1, len(codes)), "the layout that is not transposed once more"
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.shape == (len(codes),)
        d.fill_(torch.nan)
        for start in range(0, len(codes), self.alignment):
            block = slice(start, start + self.alignment)
            experts = {e for e in grouped_layout[block].tolist() if e >= 0}
            assert len(experts) <= 1
            for e in experts:
                d[block] = reference.scaled_product(codes[block], sf[block], w[e], w_sf[e])
            d[block][grouped_layout[block] < 0] = torch.nan

    def m_grouped_fp8_gemm_nt_masked(
        self,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        masked_m: Tensor,
        expected_m: int,
    ) -> None:
        (codes, sf), (w, w_sf) = a, b
        experts, most, k = codes.shape
        assert sf.shape == (experts, most, k // 128)
        assert sf.stride() == (most * (k // 128), 1, most)
        assert masked_m.dtype == torch.int32
        self.masked_calls.append(expected_m)
        d.fill_(torch.nan)
        for e, count in enumerate(masked_m.tolist()):
            d[e, :count] = reference.scaled_product(
                codes[e, :count], sf[e, :count], w[e], w_sf[e]
            ).bfloat16()
