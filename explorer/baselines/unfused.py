"""Our own phases, each a kernel of its own, launched one after the other in one graph."""

from __future__ import annotations

import torch

import tl_megamoe
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from ..farm import kernel_digest
from ..worker import STAGES
from .base import Layer, Prepared, Tolerance, no_gpu

TESTED = "torch 2.11.0, NVIDIA H200, 2026-11-29"


def unfused_specs(
    problem: Problem, schedule: Schedule, capacity: int, recipe: Recipe
) -> list[KernelSpec]:
    """The kernels of the phases, in the order of their launches."""
    return [
        KernelSpec(
            problem=problem, schedule=schedule, capacity=capacity, phase=phase, recipe=recipe
        )
        for phase in STAGES
    ]


class Unfused:
    """What fusing is worth: the same code, schedule and buffers without the overlap."""

    name = "unfused"
    what = "our dispatch, linear1, linear2 and combine kernels one after the other"
    tested = TESTED
    tolerance: Tolerance | None = None

    def available(self) -> str | None:
        return no_gpu()

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        if problem.num_ranks > 1:
            return f"{problem.num_ranks} ranks: phases of several ranks meet on the host"
        return None

    def version(self) -> str:
        return f"{tl_megamoe.__version__} {kernel_digest()}"

    def prepare(self, layer: Layer) -> Prepared:
        """Load the phases; they run on the buffers and weights of our fused kernel."""
        schedule, compile_spec = layer.schedule, layer.compile_spec
        memory = [
            (s.buffer, s.weights)
            for s in layer.sets
            if s.buffer is not None and s.weights is not None
        ]
        if schedule is None or compile_spec is None or len(memory) < len(layer.sets):
            raise ValueError(
                "the unfused baseline runs our own kernels: the layer needs a schedule, "
                "compile_spec, and a buffer and weights in every set"
            )
        specs = unfused_specs(layer.problem, schedule, memory[0][0].capacity, layer.recipe)
        kernels = [compile_spec(spec) for spec in specs]
        outputs = [torch.empty_like(s.inputs.x, dtype=torch.bfloat16) for s in layer.sets]

        def launch(index: int) -> None:
            buffer, weights = memory[index]
            for kernel in kernels:
                kernel.launch(buffer, weights, outputs[index], layer.num_tokens, schedule)

        return Prepared(launch, outputs)
