"""DeepEP's low-latency kernels of version 1 around DeepGEMM's masked products."""

from __future__ import annotations

from typing import Any

import torch

from tl_megamoe.problem import SCALE_BLOCK, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import dequantize

from .base import Layer, Prepared
from .deepep import OverDeepEP, group_of, load, route_indices
from .deepgemm import masked_product
from .pieces import fuse, swiglu_quantise

TESTED = ""


class V1LowLatency(OverDeepEP):
    """Dispatch, masked products and combine of several ranks, a GPU each; for few tokens."""

    name = "v1-ll"
    what = (
        "DeepEP's low-latency dispatch and combine around DeepGEMM's masked products; tokens come "
        "in BF16 and are quantised by the dispatch, the combine applies the routing weights; gate "
        "and up pass through BF16"
    )
    tested = TESTED

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        if not recipe.folds_topk_weight:
            return f"recipe {recipe}: its combine applies the routing weight, not the activation"
        return super().refuses(problem, recipe)

    def prepare(self, layer: Layer) -> Prepared:
        ep, gemm = self._api or load()
        problem, tokens, recipe = layer.problem, layer.num_tokens, layer.recipe
        group, local = group_of(layer), problem.num_local_experts
        experts, inter = problem.num_experts, problem.intermediate
        num_bytes = ep.Buffer.get_low_latency_rdma_size_hint(
            tokens, problem.hidden, group.size(), experts
        )
        buffer = ep.Buffer(group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=local)
        bf16 = [dequantize(s.inputs.x, s.inputs.x_sf).bfloat16() for s in layer.sets]
        indices = [route_indices(ep, s) for s in layer.sets]
        outputs = [torch.empty_like(x) for x in bf16]
        num_rows = local * tokens * group.size()
        ones = torch.ones(num_rows, device=bf16[0].device)
        expected = max(1, -(-tokens * group.size() * problem.num_topk // experts))

        def middle(gate_up: Any) -> Any:
            codes, sf = swiglu_quantise(gate_up, ones, recipe)
            columns = sf.view(local, -1, inter // SCALE_BLOCK).transpose(1, 2).contiguous()
            return codes.view(local, -1, inter), columns.transpose(1, 2)

        example = torch.zeros((num_rows, 2 * inter), dtype=torch.bfloat16, device=ones.device)
        quantised, how = fuse(middle, example)

        def launch(index: int) -> None:
            s = layer.sets[index]
            received, counts, handle, *_ = buffer.low_latency_dispatch(
                bf16[index], indices[index], tokens, experts, use_fp8=True
            )
            weights = s.plain
            gate_up = masked_product(gemm, received, (weights.l1, weights.l1_sf), counts, expected)
            h = quantised(gate_up.flatten(0, 1))
            rows = masked_product(gemm, h, (weights.l2, weights.l2_sf), counts, expected)
            buffer.low_latency_combine(
                rows, indices[index], s.inputs.topk_weights, handle, out=outputs[index]
            )

        return Prepared(launch, outputs, f"pieces={how}")
