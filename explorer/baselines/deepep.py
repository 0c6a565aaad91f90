"""What the baselines over DeepEP share.

Names and shapes follow DeepEP 2.1.0 (github.com/deepseek-ai/DeepEP), whose `Buffer` is that of
version 1.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe

from .base import (
    BF16_GATE_UP,
    Layer,
    LayerSet,
    Tolerance,
    import_problem,
    installed_version,
    no_gpu,
    no_ranks,
)
from .deepgemm import MODULE as GEMM_MODULE
from .deepgemm import contiguous_align, grouped_layer, other_groups
from .pieces import ExpertLayer, Rows

MODULE = "deep_ep"


def no_deepep(attribute: str) -> str | None:
    """Why DeepEP and DeepGEMM cannot run here; None when they can."""
    return (
        import_problem(MODULE, attributes=[attribute])
        or import_problem(GEMM_MODULE)
        or no_gpu()
        or no_ranks()
    )


def refuses_ranks(problem: Problem, recipe: Recipe) -> str | None:
    """Why a layer does not run over DeepEP; None when it does."""
    if problem.num_ranks == 1:
        return "one rank: it is for several, a GPU each"
    return other_groups(recipe)


def versions() -> str:
    """Versions of both packages; empty when DeepEP is not installed."""
    own = installed_version(MODULE)
    return f"deep_ep {own}, deep_gemm {installed_version(GEMM_MODULE)}" if own else ""


class OverDeepEP:
    """What the baselines over DeepEP have in common; each has its own launch.

    Args:
        api: DeepEP and DeepGEMM; the installed ones when None.
    """

    tolerance: Tolerance | None = BF16_GATE_UP
    needs = "Buffer"
    """The class of DeepEP that it takes."""

    def __init__(self, api: tuple[Any, Any] | None = None):
        self._api = api

    def available(self) -> str | None:
        return no_deepep(self.needs)

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return refuses_ranks(problem, recipe)

    def version(self) -> str:
        return versions()


def load() -> tuple[Any, Any]:
    """DeepEP and DeepGEMM."""
    return importlib.import_module(MODULE), importlib.import_module(GEMM_MODULE)


def group_of(layer: Layer) -> Any:
    """The process group of a layer.

    Raises:
        ValueError: the layer has none.
    """
    if layer.group is None:
        raise ValueError(
            "a baseline over DeepEP runs on several ranks: give the layer their process group "
            "(Layer(..., group=torch.distributed.group.WORLD)), under torchrun"
        )
    return layer.group


def route_indices(ep: Any, layer_set: LayerSet) -> Tensor:
    """The routing in the integers that this build of DeepEP takes."""
    indices: Tensor = layer_set.inputs.topk_idx.to(getattr(ep, "topk_idx_t", torch.int64))
    return indices


def received_layer(
    gemm: Any, layer: Layer, layer_set: LayerSet, topk_idx: Tensor, topk_weights: Tensor
) -> ExpertLayer:
    """The experts of this rank on the tokens that a dispatch brings, in the order it brings them.

    Args:
        gemm: DeepGEMM.
        layer: over all ranks.
        layer_set: whose weights.
        topk_idx: (received, topk) local experts, -1 for those of other ranks.
        topk_weights: (received, topk) float32.
    """
    local = layer.problem.num_local_experts
    rows = Rows(topk_idx, topk_weights, local, contiguous_align(gemm))
    return grouped_layer(gemm, layer_set.plain, rows, layer.recipe)
