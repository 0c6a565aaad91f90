"""Our own phases, each a kernel of its own, launched one after the other in one graph.

Over several ranks, each with a GPU, what one launch leaves another rank reads in a later one, so
the ranks must meet between launches. Nothing is added for that: the phases meet by themselves.
Every stand-alone phase holds the barrier of all ranks that stands before combine in the fused
kernel (`phases.combine.wait_for_rows`; combine starts with it, the others end with it), and
dispatch starts with one of its own, over which the counts travel. They are inside the kernels, so
they are in the graph and in its time. With `D(` the barrier that dispatch starts with, `)` the one
that a launch ends with and `(C` the one that combine starts with, a layer is `D( ) L1 ) L2 ) (C`.

a rank that is ahead            while a slower one still      waits at
pulls x, x_sf, topk_weights     lists its routes              D(
fills x for the next layer      pulls this one's              ) of dispatch
writes src_routes in the next D reads this one's              ) of dispatch
sends counts in the next D      scans this one's              ) of dispatch
combines its combine_acts       scatters rows into them       ) of linear2, and again (C
scatters the next layer's rows  combines this one's           the next D(, which the slower one
                                                              enters after its combine

The last row is why linear2 or combine alone may not be repeated back to back
(`kernel.KernelSpec.phase`), and the four in turn may. Linear1 reads and writes this rank's pools
only. A fused launch on the same buffers, before or after, is one more `D( (C`.

Two barriers of these five are what a launch needs, `D(` and one between linear2 and combine: the
fused kernel has just them; with few routes on one rank neither it nor dispatch has `D(`
(`Schedule.few_routes`), and with swapped operands it pulls nothing then. So three are of the
baseline's making, at the ends of dispatch and linear1 and once too often around linear2; on one
rank they are barriers of the grid. What one costs is what the combine kernel takes for no tokens,
which bounds what leaving three out could gain.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import tl_megamoe
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from ..farm import kernel_digest
from ..messages import STAGES
from .base import Layer, Prepared, Tolerance, no_gpu

TESTED = "torch 2.11.0, NVIDIA H200, 2026-11-29"
"""One rank."""


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
        return None

    def version(self) -> str:
        return f"{tl_megamoe.__version__} {kernel_digest()}"

    def prepare(self, layer: Layer) -> Prepared:
        """Load the phases; they run on the buffers and weights of our fused kernel.

        All ranks call it at the same time, and `compile_spec` must be made for that.
        """
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
        # A phase alone drops nothing from L2, without which evict_first only costs (device/l2.py).
        schedule = replace(schedule, evict_first=0)
        specs = unfused_specs(layer.problem, schedule, memory[0][0].capacity, layer.recipe)
        kernels = [compile_spec(spec) for spec in specs]
        # What is not written shows: fresh memory may hold the right result of an earlier cell.
        outputs = [torch.full_like(s.inputs.x, torch.nan, dtype=torch.bfloat16) for s in layer.sets]

        def launch(index: int) -> None:
            buffer, weights = memory[index]
            for kernel in kernels:
                kernel.launch(buffer, weights, outputs[index], layer.num_tokens, schedule)

        return Prepared(launch, outputs)
