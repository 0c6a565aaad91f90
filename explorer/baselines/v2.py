"""DeepEP's `ElasticBuffer` of version 2 around DeepGEMM's contiguous products."""

from __future__ import annotations

import torch

from .base import Layer, Prepared
from .deepep import (
    OverDeepEP,
    group_of,
    load,
    received_layer,
    route_indices,
)

TESTED = ""


class V2(OverDeepEP):
    """Dispatch, grouped products and combine of several ranks, a GPU each."""

    name = "v2"
    what = (
        "DeepEP's ElasticBuffer around DeepGEMM's contiguous products; the layout and the routing "
        "weights are exchanged beforehand; gate and up pass through BF16"
    )
    tested = TESTED
    needs = "ElasticBuffer"

    def prepare(self, layer: Layer) -> Prepared:
        """Dispatch once, so that launches reuse the layout: no CPU waits in the graph."""
        ep, gemm = self._api or load()
        group, problem, tokens = group_of(layer), layer.problem, layer.num_tokens
        buffer = ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=tokens,
            hidden=problem.hidden,
            num_topk=problem.num_topk,
            use_fp8_dispatch=True,
        )
        handles, layers, outputs = [], [], []
        for s in layer.sets:
            _, received_idx, received_weights, handle, _ = buffer.dispatch(
                (s.inputs.x, s.inputs.x_sf),
                topk_idx=route_indices(ep, s),
                topk_weights=s.inputs.topk_weights,
                num_experts=problem.num_experts,
                num_max_tokens_per_rank=tokens,
            )
            handles.append(handle)
            layers.append(received_layer(gemm, layer, s, received_idx, received_weights))
            outputs.append(torch.empty_like(s.inputs.x, dtype=torch.bfloat16))

        def launch(index: int) -> None:
            inputs, handle = layer.sets[index].inputs, handles[index]
            # num_sms is named: without it a cached dispatch asks for the experts that it lacks.
            (x, x_sf), *_ = buffer.dispatch(
                (inputs.x, inputs.x_sf), handle=handle, num_sms=handle.num_sms
            )
            partial = torch.empty_like(x, dtype=torch.bfloat16)
            layers[index].run(x, x_sf, partial)
            outputs[index], *_ = buffer.combine(partial, handle=handle)

        return Prepared(launch, outputs, layers[0].notes)
