"""DeepEP's normal kernels of version 1 around DeepGEMM's contiguous products."""

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


class V1Contig(OverDeepEP):
    """Dispatch, grouped products and combine of several ranks, a GPU each."""

    name = "v1-contig"
    what = (
        "DeepEP's normal dispatch and combine around DeepGEMM's contiguous products; the layout "
        "and the routing weights are exchanged beforehand; gate and up pass through BF16"
    )
    tested = TESTED

    def prepare(self, layer: Layer) -> Prepared:
        """Dispatch once, so that launches reuse the layout: no CPU waits in the graph."""
        ep, gemm = self._api or load()
        group, problem = group_of(layer), layer.problem
        size = group.size()
        configs = (ep.Buffer.get_dispatch_config(size), ep.Buffer.get_combine_config(size))
        num_bytes = max(c.get_nvl_buffer_size_hint(2 * problem.hidden, size) for c in configs)
        buffer = ep.Buffer(group, num_bytes, 0)
        handles, layers, outputs = [], [], []
        for s in layer.sets:
            idx = route_indices(ep, s)
            to_rank, _, to_expert, in_rank, _ = buffer.get_dispatch_layout(idx, problem.num_experts)
            received, received_idx, received_weights, _, handle, _ = buffer.dispatch(
                (s.inputs.x, s.inputs.x_sf),
                num_tokens_per_rank=to_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=to_expert,
                topk_idx=idx,
                topk_weights=s.inputs.topk_weights,
            )
            handles.append(handle)
            layers.append(received_layer(gemm, layer, s, received_idx, received_weights))
            outputs.append(torch.empty_like(s.inputs.x, dtype=torch.bfloat16))

        def launch(index: int) -> None:
            inputs = layer.sets[index].inputs
            (x, x_sf), *_ = buffer.dispatch((inputs.x, inputs.x_sf), handle=handles[index])
            partial = torch.empty_like(x, dtype=torch.bfloat16)
            layers[index].run(x, x_sf, partial)
            outputs[index], *_ = buffer.combine(partial, handles[index])

        return Prepared(launch, outputs, layers[0].notes)
