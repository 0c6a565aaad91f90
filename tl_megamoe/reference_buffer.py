"""A buffer without a kernel: the same inputs, computed by the float32 reference, on any device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import reference
from .arguments import check_bound, check_clamp, check_recipe, copy_inputs
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
from .schedule import Schedule
from .weights import MoEWeights, restore_weights

if TYPE_CHECKING:
    from .loading import Options


class ReferenceBuffer:
    """Inputs of one rank's layer, for `fp8_mega_moe` and the operators, as `SymmBuffer` has them.

    A launch computes what `reference.moe` does, orders of magnitude slower than the kernel. It is
    there to run a model where there is no SM90 GPU, and to compare with.

    Attributes:
        problem, capacity, recipe, device: as of a `SymmBuffer`.
        rank: 0.
        key: name for the operators.
        x, x_sf, topk_idx, topk_weights: inputs, as of a `SymmBuffer`.
        lock: held while a call brings its tokens in and runs.
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
        self.lock = threading.RLock()
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
        spec = QuantizeSpec.of(self.problem, self.capacity, self.recipe, num_shared)
        check_activations(spec, self, x, topk_idx, topk_weights)
        codes, sf = quantize_activations(x, self.recipe)
        routed = spec.num_routed_experts
        indices, weights = add_shared_routes(topk_idx, topk_weights, routed, 1, 0, num_shared)
        return self.fill(codes, sf, indices, weights)

    @torch.no_grad()
    def compute(
        self,
        y: Tensor,
        weights: MoEWeights,
        num_tokens: int,
        stats: Tensor | None,
        options: Options,
    ) -> None:
        """Write `y` (num_tokens, hidden) bfloat16; `calls.run` has checked the tensors.

        Raises:
            ValueError: an option that the kernel would refuse. A schedule changes no result here
                either.
        """
        check_recipe(options.recipe, self)
        check_clamp(options.activation_clamp)
        check_bound(self, num_tokens, options.token_bound)
        n = num_tokens
        inputs = (self.x[:n], self.x_sf[:n], self.topk_idx[:n], self.topk_weights[:n])
        plain = restore_weights(weights)
        y.copy_(reference.moe(self.problem, *inputs, plain, self.recipe, options.activation_clamp))
        experts = self.topk_idx[:n].flatten()
        valid = experts[(experts >= 0) & (experts < self.problem.num_experts)]
        received = torch.bincount(valid, minlength=self.problem.num_experts).int()
        (self.recv_stats if stats is None else stats).add_(received)

    def warmup(
        self,
        *,
        activation_clamp: bool = False,
        fast_math: bool = True,
        num_shared: int | None = 0,
    ) -> list[tuple[int, Schedule]]:
        """Nothing to load, so an empty list; the arguments are those of `SymmBuffer.warmup`."""
        if num_shared is not None:
            QuantizeSpec.of(self.problem, self.capacity, self.recipe, num_shared)
        return []

    def check_report(self) -> None:
        """Nothing: no wait of the reference can time out."""

    def destroy(self) -> None:
        """Let go of the memory; nothing of the buffer can be used after."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                delattr(self, name)

    def describe(self) -> str:
        """What the buffer is of, and its bytes."""
        inputs = (self.x, self.x_sf, self.topk_idx, self.topk_weights)
        num_bytes = sum(tensor.nbytes for tensor in inputs)
        return (
            f"{self.problem.name}, capacity {self.capacity}, the float32 reference, recipe "
            f"{self.recipe}: inputs of {num_bytes:,} bytes on {self.device}"
        )

    def __repr__(self) -> str:
        return f"ReferenceBuffer({self.problem.name!r}, capacity={self.capacity}, on {self.device})"
