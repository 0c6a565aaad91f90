"""torch alone, in FP8: one `torch._scaled_mm` an expert with the recipe's own block scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tl_megamoe.problem import SCALE_BLOCK, Problem
from tl_megamoe.recipe import Recipe

from .base import BF16_GATE_UP, Layer, Prepared, Tolerance, no_gpu
from .pieces import ExpertLayer, Product, Rows

TESTED = "torch 2.11.0, NVIDIA H200, 2026-11-29"

ALIGN = 16
"""Rows of an expert: cuBLAS wants scales that begin at multiples of 16 bytes."""
MIN_CUDA = (12, 9)
"""The first CUDA whose cuBLAS multiplies with scales of 1 x 128 and 128 x 128 blocks."""


class TorchFp8:
    """FP8 products of torch with scales of 1 x 128 and 128 x 128 blocks."""

    name = "torch"
    what = (
        "torch._scaled_mm with 1x128 and 128x128 block scales, one call an expert; permute by "
        "index_select, SwiGLU + quantise and combine by torch.compile where it works; row counts "
        "known beforehand; gate and up pass through BF16"
    )
    tested = TESTED
    tolerance: Tolerance | None = BF16_GATE_UP

    def __init__(self, scaled_mm: Callable[..., Tensor] | None = None):
        self._scaled_mm = scaled_mm

    def available(self) -> str | None:
        reason = no_gpu()
        if reason:
            return reason
        version = str(torch.version.cuda or "0.0")
        major, minor = (int(part) for part in version.split(".")[:2])
        if (major, minor) < MIN_CUDA:
            return f"torch is built for CUDA {version}; block scales need 12.9 or later"
        return None

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return no_block_scales(problem, recipe)

    def version(self) -> str:
        return str(torch.__version__)

    def prepare(self, layer: Layer) -> Prepared:
        problem, recipe = layer.problem, layer.recipe
        routing = layer.sets[0].inputs
        rows = Rows(routing.topk_idx, routing.topk_weights, problem.num_local_experts, ALIGN)
        scaled_mm = self._scaled_mm or torch._scaled_mm
        layers = [
            ExpertLayer(
                rows,
                (
                    _products(s.plain.l1, s.plain.l1_sf, rows, scaled_mm),
                    _products(s.plain.l2, s.plain.l2_sf, rows, scaled_mm),
                ),
                recipe,
                (problem.hidden, problem.intermediate),
                rows.parts,
            )
            for s in layer.sets
        ]
        outputs = [torch.empty_like(s.inputs.x, dtype=torch.bfloat16) for s in layer.sets]

        def launch(index: int) -> None:
            inputs = layer.sets[index].inputs
            layers[index].run(inputs.x, inputs.x_sf, outputs[index])

        return Prepared(launch, outputs, layers[0].notes)


def no_block_scales(problem: Problem, recipe: Recipe) -> str | None:
    """Why cuBLAS has no product for a layer's scales; None when it has."""
    if problem.num_ranks > 1:
        return f"{problem.num_ranks} ranks: it runs one"
    if recipe.intermediate_group != SCALE_BLOCK:
        return f"recipe {recipe}: block scales cover 128 columns"
    for name in ("hidden", "intermediate"):
        size = getattr(problem, name)
        if size % (4 * SCALE_BLOCK):
            return f"{name}={size}: cuBLAS pads weight scales to multiples of 512 columns"
    return None


def _products(w: Tensor, w_sf: Tensor, rows: Rows, scaled_mm: Callable[..., Any]) -> Product:
    """`codes @ w.T` expert by expert; each has its rows, and a block of the packed scales."""
    groups = w.shape[2] // SCALE_BLOCK
    used = [expert for expert, count in enumerate(rows.counts) if count]

    def product(codes: Tensor, sf: Tensor) -> Tensor:
        out = torch.empty((len(codes), w.shape[1]), dtype=torch.bfloat16, device=codes.device)
        for expert in used:
            part = rows.parts[expert]
            block = sf[groups * part.start : groups * part.stop].view(groups, -1)
            scaled_mm(
                codes[part],
                w[expert].t(),
                scale_a=block.t(),
                scale_b=w_sf[expert].t(),
                out_dtype=torch.bfloat16,
                out=out[part],
            )
        return out

    return product
