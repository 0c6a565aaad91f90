"""DeepGEMM's grouped FP8 products, contiguous or masked, on one rank.

Names and shapes follow DeepGEMM 2.6.1 (github.com/deepseek-ai/DeepGEMM).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tl_megamoe.problem import SCALE_BLOCK, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.weights import PlainWeights

from .base import (
    BF16_GATE_UP,
    Layer,
    Prepared,
    Tolerance,
    import_problem,
    installed_version,
    no_gpu,
)
from .pieces import ExpertLayer, Product, Rows

TESTED = ""
TESTED_MASKED = ""

MODULE = "deep_gemm"
MASKED_ALIGN = 64
"""Rows of an expert in the masked layout; scales of 4 rows and more are aligned for TMA."""


class DeepGemm:
    """Two grouped products and torch's pieces between them.

    Args:
        masked: every expert has room for the rows of the busiest one; else the experts' rows follow
            one another, each part padded to DeepGEMM's alignment.
        api: the package; imported when None.
    """

    tolerance: Tolerance | None = BF16_GATE_UP

    def __init__(self, masked: bool = False, api: Any = None):
        self.masked = masked
        self.name = "deepgemm-masked" if masked else "deepgemm"
        self.tested = TESTED_MASKED if masked else TESTED
        self.what = (
            f"DeepGEMM's {'masked' if masked else 'contiguous'} grouped FP8 products; permute by "
            "index_select, SwiGLU + quantise and combine by torch.compile where it works; rows "
            "placed beforehand; gate and up pass through BF16"
        )
        self._api = api

    def available(self) -> str | None:
        return import_problem(MODULE) or no_gpu()

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        if problem.num_ranks > 1:
            return f"{problem.num_ranks} ranks: it runs one"
        return other_groups(recipe)

    def version(self) -> str:
        return installed_version(MODULE)

    def prepare(self, layer: Layer) -> Prepared:
        api = self._api or importlib.import_module(MODULE)
        routing = layer.sets[0].inputs
        align = MASKED_ALIGN if self.masked else contiguous_align(api)
        rows = Rows(
            routing.topk_idx,
            routing.topk_weights,
            layer.problem.num_local_experts,
            align,
            equal=self.masked,
        )
        layers = [
            grouped_layer(api, s.plain, rows, layer.recipe, masked=self.masked) for s in layer.sets
        ]
        outputs = [torch.empty_like(s.inputs.x, dtype=torch.bfloat16) for s in layer.sets]

        def launch(index: int) -> None:
            inputs = layer.sets[index].inputs
            layers[index].run(inputs.x, inputs.x_sf, outputs[index])

        return Prepared(launch, outputs, layers[0].notes)


def other_groups(recipe: Recipe) -> str | None:
    """Why DeepGEMM does not multiply a recipe's intermediate; None when it does."""
    if recipe.intermediate_group != SCALE_BLOCK:
        return f"recipe {recipe}: a scale of DeepGEMM's SM90 products covers 128 columns"
    return None


def contiguous_align(api: Any) -> int:
    """Rows that each expert's part is padded to in the contiguous layout."""
    for name in (
        "get_mk_alignment_for_contiguous_layout",
        "get_m_alignment_for_contiguous_layout",  # before 2.2
    ):
        if hasattr(api, name):
            return int(getattr(api, name)())
    raise ValueError(
        "deep_gemm has no get_mk_alignment_for_contiguous_layout: install version 2.1 or later"
    )


def grouped_layer(
    api: Any, plain: PlainWeights, rows: Rows, recipe: Recipe, *, masked: bool = False
) -> ExpertLayer:
    """The experts of one rank by DeepGEMM, on rows that are placed beforehand."""
    make = _masked_product if masked else _contiguous_product
    return ExpertLayer(
        rows,
        (make(api, plain.l1, plain.l1_sf, rows), make(api, plain.l2, plain.l2_sf, rows)),
        recipe,
        (plain.l1.shape[2], plain.l2.shape[2]),
        rows.parts if masked else [slice(0, rows.num_rows)],
    )


def _contiguous_product(api: Any, w: Tensor, w_sf: Tensor, rows: Rows) -> Product:
    groups = w.shape[2] // SCALE_BLOCK

    def product(codes: Tensor, sf: Tensor) -> Tensor:
        out = torch.empty((len(codes), w.shape[1]), dtype=torch.bfloat16, device=codes.device)
        api.m_grouped_fp8_gemm_nt_contiguous(
            (codes, sf.view(groups, -1).t()), (w, w_sf), out, rows.expert
        )
        return out

    return product


def _masked_product(api: Any, w: Tensor, w_sf: Tensor, rows: Rows) -> Product:
    experts, _, columns = w.shape
    counts = torch.tensor(rows.counts, dtype=torch.int32, device=w.device)
    expected = max(1, -(-sum(rows.counts) // experts))

    def product(codes: Tensor, sf: Tensor) -> Tensor:
        a = codes.view(experts, -1, columns)
        a_sf = sf.view(experts, columns // SCALE_BLOCK, -1).transpose(1, 2)
        return masked_product(api, (a, a_sf), (w, w_sf), counts, expected).flatten(0, 1)

    return product


def masked_product(
    api: Any,
    a: tuple[Tensor, Tensor],
    w: tuple[Tensor, Tensor],
    counts: Tensor,
    expected: int,
) -> Tensor:
    """DeepGEMM's masked product.

    Args:
        api: the package.
        a: codes (experts, M, K) e4m3 and scales (experts, M, K/128) float32, M contiguous.
        w: codes (experts, N, K) e4m3 and scales (experts, N/128, K/128) float32.
        counts: (experts,) int32, rows of each expert that count.
        expected: the mean of them, which DeepGEMM chooses tiles by.

    Returns:
        (experts, M, N) bf16.
    """
    experts, most, _ = a[0].shape
    shape = (experts, most, w[0].shape[1])
    out = torch.empty(shape, dtype=torch.bfloat16, device=a[0].device)
    name = "m_grouped_fp8_gemm_nt_masked"
    run = getattr(api, name, None) or api.fp8_m_grouped_gemm_nt_masked  # its name before 2.1
    run(a, w, out, counts, expected)
    return out
