"""One problem on the GPU: weights, buffer, inputs, and the kernels' results in reference order."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import lru_cache

import torch

from tl_megamoe import reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.device.walk import first_blocks
from tl_megamoe.kernel import KernelSpec, compile_kernel
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import COUNTER_BITS, Schedule
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import MoEWeights, PlainWeights, transform_weights


@dataclass
class World:
    """A problem with its weights and one poisoned buffer; `inputs` are those last filled in."""

    problem: Problem
    plain: PlainWeights
    weights: MoEWeights
    buffer: SymmBuffer
    inputs: Inputs | None = None

    def fill(self, num_tokens: int, seed: int, routing: str = "uniform", mask: float = 0.0) -> None:
        """Random tokens into the buffer; everything else in it becomes NaN."""
        self.set(random_inputs(self.problem, num_tokens, routing, mask, seed, "cuda"))

    def set(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.buffer.poison()
        self.buffer.topk_idx.fill_(2**40)  # rows past num_tokens must not be read
        self.buffer.topk_weights.fill_(torch.nan)
        self.buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)

    def launch(
        self,
        schedule: Schedule,
        phase: str = "fused",
        *,
        clamp: float | None = None,
        fast_math: bool = True,
    ) -> torch.Tensor:
        """Run a kernel; `y` starts as NaN."""
        assert self.inputs is not None
        spec = KernelSpec(
            problem=self.problem,
            schedule=schedule,
            capacity=self.buffer.capacity,
            phase=phase,
            clamp=clamp is not None,
            fast_math=fast_math,
        )
        n = self.inputs.num_tokens
        y = torch.full((n, self.problem.hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
        kernel = compile_kernel(spec)
        kernel.launch(self.buffer, self.weights, y, n, schedule, activation_clamp=clamp)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            self.buffer.check_report()
            raise
        return y

    def pool(self) -> reference.ReferencePool:
        """What dispatch must deliver."""
        i = self.inputs
        assert i is not None
        return reference.dispatch(i.x, i.x_sf, i.topk_idx, i.topk_weights, self.problem)

    def expected(self, clamp: float | None = None, recipe: Recipe | None = None) -> torch.Tensor:
        """The layer by the reference."""
        i = self.inputs
        assert i is not None
        return reference.moe(
            self.problem, i.x, i.x_sf, i.topk_idx, i.topk_weights, self.plain, recipe, clamp
        )

    def pool_rows(self, schedule: Schedule) -> torch.Tensor:
        """Pool rows in the order of `pool()`: by expert, token, slot (read from the metadata)."""
        counts = self.buffer.expert_recv_count_sum.tolist()
        first = first_blocks(counts, schedule.block_m)
        rows = []
        for expert, count in enumerate(counts):
            start = first[expert] * schedule.block_m
            source = self.buffer.token_src_metadata[start : start + count].long()
            assert (source >> COUNTER_BITS == 0).all()
            within = source & ((1 << COUNTER_BITS) - 1)
            slot, token = within // self.buffer.capacity, within % self.buffer.capacity
            rows.append(start + (token * self.problem.num_topk + slot).argsort())
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.long, device="cuda")

    def counters_are_zero(self) -> bool:
        """Whether the launch left its counters as it found them."""
        offsets = self.buffer.layout.workspace_offsets
        sends = self.buffer.workspace[
            offsets["expert_send_count"] : offsets["expert_recv_count_sum"]
        ]
        arrivals = (self.buffer.l1_arrival_count, self.buffer.l2_arrival)
        return not any(bool(c.any()) for c in (sends, *arrivals))


@lru_cache(maxsize=1)
def world(problem: Problem, capacity: int) -> World:
    """The world of a problem; the one before it is freed, so group tests by problem."""
    gc.collect()
    torch.cuda.empty_cache()
    plain = random_weights(problem, "cuda", seed=1)
    weights = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)
    return World(problem, plain, weights, SymmBuffer(problem, capacity, timeout_s=5.0))
