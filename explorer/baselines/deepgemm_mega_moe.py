"""DeepGEMM's own fused layer for SM90, in one launch.

Names follow its pull requests 323 and 383 (github.com/deepseek-ai/DeepGEMM); version 2.6.1 has the
layer for SM100 only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe

from .base import (
    OTHER_RECIPE,
    Layer,
    Prepared,
    Tolerance,
    import_problem,
    installed_version,
    no_gpu,
)
from .deepgemm import MODULE

TESTED = ""

ATTRIBUTES = ("fp8_mega_moe", "transform_weights_for_mega_moe_sm90")
SM90_BUFFER, BUFFER = "get_symm_buffer_for_sm90_mega_moe", "get_symm_buffer_for_mega_moe"


class DeepGemmMegaMoe:
    """One rank in a process group of its own, or the ranks of a group."""

    name = "deepgemm-mega-moe"
    what = (
        "DeepGEMM's fused layer (fp8_mega_moe); another recipe: scales of 64 columns, the routing "
        "weight in the activation"
    )
    tested = TESTED
    tolerance: Tolerance | None = OTHER_RECIPE

    def __init__(self, api: Any = None):
        self._api = api

    def available(self) -> str | None:
        return import_problem(MODULE, attributes=ATTRIBUTES) or no_gpu()

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return None

    def version(self) -> str:
        return installed_version(MODULE)

    def prepare(self, layer: Layer) -> Prepared:
        """Fill a symmetric buffer for each set; a launch reads it and does not change it."""
        api: Any = self._api or importlib.import_module(MODULE)
        problem, group = layer.problem, layer.group or _group_of_one()
        make_buffer = getattr(api, SM90_BUFFER, None) or getattr(api, BUFFER)
        buffers, weights = [], []
        for s in layer.sets:
            buffer = make_buffer(
                group,
                problem.num_experts,
                layer.num_tokens,
                problem.num_topk,
                problem.hidden,
                problem.intermediate,
            )
            inputs = s.inputs
            for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                getattr(buffer, name)[: layer.num_tokens].copy_(getattr(inputs, name))
            buffers.append(buffer)
            weights.append(
                api.transform_weights_for_mega_moe_sm90(
                    (s.plain.l1, s.plain.l1_sf), (s.plain.l2, s.plain.l2_sf)
                )
            )
        outputs = [torch.empty_like(s.inputs.x, dtype=torch.bfloat16) for s in layer.sets]

        def launch(index: int) -> None:
            l1, l2 = weights[index]
            api.fp8_mega_moe(outputs[index], l1, l2, buffers[index])

        return Prepared(launch, outputs)


def _group_of_one() -> Any:
    """A process group that holds this process alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.group.WORLD
