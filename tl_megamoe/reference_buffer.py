"""A buffer without a kernel: the same inputs, computed by the float32 reference, on any device."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from . import reference
from .arguments import check_bound, check_clamp, check_recipe
from .buffer import copy_inputs
from .launch import Launcher
from .layout import make_layout
from .problem import Problem
from .quantize import (
    QuantizeSpec,
    add_shared_routes,
    check_activations,
    quantize_activations,
)
from .recipe import RecipeLike, as_recipe
from .registry import register
from .weights import MoEWeights, restore_weights


class ReferenceBuffer:
    """Inputs of one rank's layer, for `fp8_mega_moe` and the operators, as `SymmBuffer` has them.

    A launch computes what `reference.moe` does, orders of magnitude slower than the kernel. It is
    there to run a model where there is no SM90 GPU, and to compare with.

    Attributes:
        problem, capacity, recipe, device: as of a `SymmBuffer`.
        rank: 0.
        key: name for the operators.
        x, x_sf, topk_idx, topk_weights: inputs, as of a `SymmBuffer`.
        recv_stats: (experts,) int32, to which the rows that each expert received are added.

    Args:
        problem: of one rank.
        capacity: the most tokens of a launch.
        device: any torch device; the CPU when None.
        recipe: `Recipe()` when None or one of DeepGEMM's tuples.

    Raises:
        ValueError: more than one rank, or a bad capacity or recipe.
    """

    def __init__(
        self,
        problem: Problem,
        capacity: int,
        device: torch.device | str | None = None,
        *,
        recipe: RecipeLike = None,
    ) -> None:
        if problem.num_ranks != 1:
            raise ValueError(
                f"num_ranks={problem.num_ranks} of problem {problem.name!r}: the reference "
                "computes one rank, which has all experts. Load the problem with num_ranks=1, or "
                "use a SymmBuffer on SM90 GPUs."
            )
        layout = make_layout(problem, capacity, as_recipe(recipe))
        self.problem = problem
        self.capacity = capacity
        self.recipe = layout.recipe
        self.device = torch.empty(0, device="cpu" if device is None else device).device
        self.rank = 0

        def section(name: str) -> Tensor:
            s = layout.sections[name]
            return torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=self.device)

        self.x, self.x_sf = section("x"), section("x_sf")
        self.topk_idx, self.topk_weights = section("topk_idx").fill_(-1), section("topk_weights")
        self.recv_stats = section("recv_stats")
        self.lock = threading.Lock()
        self.launcher = Launcher(
            self.recv_stats, (self.x, self.x_sf, self.topk_idx, self.topk_weights)
        )  # which never learns a launch
        self.key = register(self)

    def fill(self, x: Tensor, x_sf: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> int:
        """Copy the tokens of a launch into the first rows; see `SymmBuffer.fill`."""
        return copy_inputs(self, x, x_sf, topk_idx, topk_weights)

    def quantize(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_shared: int = 0
    ) -> int:
        """Quantise the tokens of a launch into the first rows; see `SymmBuffer.quantize`."""
        check_activations(QuantizeSpec.of(self, num_shared), self, x, topk_idx, topk_weights)
        codes, sf = quantize_activations(x, self.recipe)
        routed = self.problem.num_experts - num_shared
        indices, weights = add_shared_routes(topk_idx, topk_weights, routed, 1, 0, num_shared)
        return self.fill(codes, sf, indices, weights)

    def check_options(self, num_tokens: int, options: tuple[Any, ...]) -> None:
        """Raise ValueError where the kernel would; the schedule changes no result here either."""
        recipe, activation_clamp, _, token_bound, _, _ = options
        check_recipe(recipe, self)
        check_clamp(activation_clamp)
        check_bound(self, num_tokens, token_bound)

    def compute(
        self,
        y: Tensor,
        weights: MoEWeights,
        num_tokens: int,
        stats: Tensor | None,
        activation_clamp: float | None,
    ) -> None:
        """Write `y` (num_tokens, hidden) bfloat16; the arguments have been checked."""
        n = num_tokens
        inputs = (self.x[:n], self.x_sf[:n], self.topk_idx[:n], self.topk_weights[:n])
        plain = restore_weights(weights)
        y.copy_(reference.moe(self.problem, *inputs, plain, self.recipe, activation_clamp))
        experts = self.topk_idx[:n].flatten()
        valid = experts[(experts >= 0) & (experts < self.problem.num_experts)]
        received = torch.bincount(valid, minlength=self.problem.num_experts).int()
        (self.recv_stats if stats is None else stats).add_(received)

    def warmup(self, **_: Any) -> list[Any]:
        """Nothing to load: the reference runs at once."""
        return []

    def __repr__(self) -> str:
        return f"ReferenceBuffer({self.problem.name!r}, capacity={self.capacity}, on {self.device})"
