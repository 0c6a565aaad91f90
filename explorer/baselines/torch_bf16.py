"""torch alone, in BF16: weights and tokens dequantised beforehand, one `torch.mm` an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import dequantize, dequantize_blocks

from .base import NO_FP8_INTERMEDIATE, Layer, Prepared, Tolerance
from .pieces import Rows, combine, fuse, take_rows

TESTED = ""

ALIGN = 16


class TorchBf16:
    """The layer without FP8: twice the bytes, half the rate of the products."""

    name = "torch-bf16"
    what = (
        "BF16 torch.mm, one call an expert, on weights and tokens dequantised beforehand; permute "
        "by index_select, SwiGLU and combine by torch.compile where it works; row counts known "
        "beforehand; the intermediate stays BF16"
    )
    tested = TESTED
    tolerance: Tolerance | None = NO_FP8_INTERMEDIATE

    def available(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA GPU here"

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return f"{problem.num_ranks} ranks: it runs one" if problem.num_ranks > 1 else None

    def version(self) -> str:
        return str(torch.__version__)

    def prepare(self, layer: Layer) -> Prepared:
        routing, hidden = layer.sets[0].inputs, layer.problem.hidden
        rows = Rows(routing.topk_idx, routing.topk_weights, layer.problem.num_local_experts, ALIGN)
        tokens = [dequantize(s.inputs.x, s.inputs.x_sf).bfloat16() for s in layer.sets]
        weights = [
            (_bf16(s.plain.l1, s.plain.l1_sf), _bf16(s.plain.l2, s.plain.l2_sf)) for s in layer.sets
        ]
        outputs = [torch.empty_like(x) for x in tokens]
        gate_up = tokens[0].new_zeros((rows.num_rows, weights[0][0].shape[1]))
        middle, how = fuse(_swiglu, gate_up, rows.weight)
        back = tokens[0].new_zeros((rows.num_rows, hidden))
        put_back, _ = fuse(combine, back, rows.place, rows.kept, torch.empty_like(outputs[0]))

        def launch(index: int) -> None:
            up_down = weights[index]
            x = take_rows(tokens[index], rows.token)
            h = middle(_product(x, up_down[0], rows), rows.weight)
            put_back(_product(h, up_down[1], rows), rows.place, rows.kept, outputs[index])

        return Prepared(launch, outputs, f"pieces={how}")


def _bf16(codes: Tensor, sf: Tensor) -> Tensor:
    """BF16 weights, an expert at a time: float32 copies of all would be four times the codes."""
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for expert in range(len(codes)):
        out[expert] = dequantize_blocks(codes[expert], sf[expert])
    return out


def _swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, 1)
    return (reference.swiglu(gate, up) * weight[:, None]).bfloat16()


def _product(x: Tensor, w: Tensor, rows: Rows) -> Tensor:
    out = torch.empty((len(x), w.shape[1]), dtype=x.dtype, device=x.device)
    for expert, count in enumerate(rows.counts):
        if count:
            part = rows.parts[expert]
            torch.mm(x[part], w[expert].t(), out=out[part])
    return out
