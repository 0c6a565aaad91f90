"""BF16 activations and model routes into a buffer's inputs: one launch, and its twins in torch.

A model's layer has BF16 activations and routes to `num_experts` experts; the kernel reads FP8
activations and, where a layer has shared experts, sees S more experts a rank and S more routes a
token. The launch here does both; phases/quantize.py is its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .arguments import check_input, check_tokens
from .native import private_cache
from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe
from .scaling import E4M3, E4M3_NAN_CODE, quantize_rows

if TYPE_CHECKING:
    from .buffer import SymmBuffer
    from .reference_buffer import ReferenceBuffer

ROW_BYTES = 16
"""What rows of x are aligned to: the kernel reads them 16 bytes at a time."""
BF16_BYTES = 2
INDEX_DTYPES = (torch.int64, torch.int32)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSpec:
    """What a compiled quantize kernel depends on. Sizes are the buffer's, shared experts included.

    Attributes:
        hidden: model width, a multiple of 128.
        num_topk: routes of a token.
        num_shared: shared experts, of which every rank has its own copies; may be 0.
        num_local_experts: experts of a rank.
        num_experts: experts over all ranks.
        capacity: tokens of the buffer.
        scale: `exact` or `pow2`, as in `Recipe`.

    Raises:
        ValueError: sizes that no buffer has, or that leave no expert or no route but shared ones.
    """

    hidden: int
    num_topk: int
    num_shared: int
    num_local_experts: int
    num_experts: int
    capacity: int
    scale: Literal["exact", "pow2"]

    def __post_init__(self) -> None:
        for field in ("hidden", "num_topk", "num_local_experts", "num_experts", "capacity"):
            _check_integer(field, getattr(self, field), 1)
        _check_integer("num_shared", self.num_shared, 0)
        if self.hidden % SCALE_BLOCK:
            raise ValueError(
                f"hidden={self.hidden} is not a multiple of {SCALE_BLOCK}, the columns of one "
                "scale. Pad the layer."
            )
        if self.num_experts % self.num_local_experts:
            raise ValueError(
                f"num_local_experts={self.num_local_experts} does not divide num_experts="
                f"{self.num_experts}: every rank has as many experts, shared ones included"
            )
        for field in ("num_topk", "num_local_experts"):
            if self.num_shared >= getattr(self, field):
                raise ValueError(
                    f"num_shared={self.num_shared} must be below {field}={getattr(self, field)} "
                    "of the buffer, which counts the shared experts too. Make the buffer for a "
                    "problem with num_experts + num_shared * num_ranks experts and "
                    "num_topk + num_shared routes."
                )
        Recipe(scale=self.scale)

    @classmethod
    def of(
        cls, problem: Problem, capacity: int, recipe: Recipe, num_shared: int = 0
    ) -> QuantizeSpec:
        """The spec of a buffer.

        Args:
            problem: of the buffer: it counts the shared experts of every rank.
            capacity, recipe: of the buffer.
            num_shared: shared experts.

        Raises:
            ValueError: more shared experts than the problem has experts or routes for.
        """
        return cls(
            hidden=problem.hidden,
            num_topk=problem.num_topk,
            num_shared=num_shared,
            num_local_experts=problem.num_local_experts,
            num_experts=problem.num_experts,
            capacity=capacity,
            scale=recipe.scale,
        )

    @property
    def top_k(self) -> int:
        """Routes of a token that the model chooses."""
        return self.num_topk - self.num_shared

    @property
    def num_ranks(self) -> int:
        """Ranks that the experts are spread over."""
        return self.num_experts // self.num_local_experts

    @property
    def num_routed_experts(self) -> int:
        """Experts that the model chooses from."""
        return self.num_experts - self.num_shared * self.num_ranks


class QuantizeKernel:
    """A loaded quantize kernel and how to call it.

    Attributes:
        spec: what it was made for.
        function: the TVM-FFI function of phases/quantize.py's program.
    """

    def __init__(self, spec: QuantizeSpec, function: Any) -> None:
        self.spec = spec
        self.function = function
        self._row = spec.hidden * BF16_BYTES // ROW_BYTES
        self._routes = (spec.top_k, 1, 1)  # strides, and that it is the wider dtype
        self._top_k = spec.top_k

    def _is_usual(self, device: torch.device, x: Tensor, idx: Tensor, weights: Tensor) -> bool:
        """Whether these are contiguous int64 and float32 routes of contiguous rows, all in order.

        Of everything else, right or wrong, `check_activations` takes longer to say what it is.
        """
        if not (
            type(x) is type(idx) is type(weights) is Tensor
            and x.dtype is torch.bfloat16
            and idx.dtype is torch.int64
            and weights.dtype is torch.float32
        ):
            return False
        shape = x.shape
        return (
            len(shape) == 2
            and shape[1] == self.spec.hidden
            and shape[0] <= self.spec.capacity
            and idx.shape == weights.shape == (shape[0], self._top_k)
            and x.device == idx.device == weights.device == device
            and x.is_contiguous()
            and idx.is_contiguous()
            and weights.is_contiguous()
            and not x.data_ptr() % ROW_BYTES
        )

    def launch(self, buffer: SymmBuffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Write the first rows of the buffer's inputs, on torch's current stream.

        One launch; none without tokens. Returns at once. Rows from the number of tokens on stay as
        they are.

        Args:
            buffer: of the problem, capacity and recipe of the spec.
            x: (tokens, hidden) bfloat16; columns contiguous, rows any multiple of 16 bytes apart
                from an address that is one. NaN and infinity spoil their own token only.
            topk_idx: (tokens, top_k) int64 or int32, of any strides: expert 0 to
                `num_routed_experts` - 1, anything else is stored as -1, no route.
            topk_weights: (tokens, top_k) float32 or bfloat16, of any strides.

        Raises:
            ValueError: a shape, dtype, device or alignment that breaks these rules; more tokens
                than the capacity.
        """
        launcher = buffer.launcher
        if self._is_usual(buffer.device, x, topk_idx, topk_weights):
            tokens = x.shape[0]
            if tokens:
                self.function(
                    *launcher.inputs,
                    x.data_ptr(),
                    self._row,
                    topk_idx.data_ptr(),
                    *self._routes,
                    topk_weights.data_ptr(),
                    *self._routes,
                    buffer.rank,
                    tokens,
                )
            return
        tokens = check_activations(self.spec, buffer, x, topk_idx, topk_weights)
        if not tokens:
            return
        self.function(
            *launcher.inputs,
            x.data_ptr(),
            # A single row's stride says nothing; the program counts it in 16-byte loads.
            x.stride(0) * BF16_BYTES // ROW_BYTES if tokens > 1 else 0,
            topk_idx.data_ptr(),
            *topk_idx.stride(),
            int(topk_idx.dtype is torch.int64),
            topk_weights.data_ptr(),
            *topk_weights.stride(),
            int(topk_weights.dtype is torch.float32),
            buffer.rank,
            tokens,
        )


def check_activations(
    spec: QuantizeSpec,
    buffer: SymmBuffer | ReferenceBuffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
) -> int:
    """The number of tokens, of arguments that `QuantizeKernel.launch` can take.

    Tensors reach the kernel as addresses: nothing else checks them.

    Args:
        spec: of the buffer.
        buffer: whose device the tensors must be on.
        x, topk_idx, topk_weights: as for `QuantizeKernel.launch`.

    Raises:
        ValueError: as `QuantizeKernel.launch`.
    """
    tokens = check_tokens(x, spec.hidden, spec.capacity)
    routes = "top_k" if not spec.num_shared else f"top_k without the {spec.num_shared} shared"
    advice = ": load the model with dtype=torch.bfloat16"
    for name, value, columns, what, dtypes in (
        ("x", x, spec.hidden, "hidden", (torch.bfloat16,)),
        ("topk_idx", topk_idx, spec.top_k, routes, INDEX_DTYPES),
        ("topk_weights", topk_weights, spec.top_k, routes, WEIGHT_DTYPES),
    ):
        shape = (tokens, columns)
        check_input(name, value, shape, what, dtypes, buffer.device, advice * (name == "x"))
    apart = x.stride(0) * x.element_size() if tokens > 1 else 0
    if tokens and (x.stride(1) != 1 or apart % ROW_BYTES or x.data_ptr() % ROW_BYTES):
        raise ValueError(
            f"x at {x.data_ptr():#x} with strides {x.stride()} must have contiguous columns "
            f"and rows at multiples of {ROW_BYTES} bytes, as the kernel reads it. Pass "
            "x.contiguous(), or x.clone() of a tensor that starts elsewhere."
        )
    return tokens


@lru_cache(maxsize=64)
def compile_quantize(spec: QuantizeSpec) -> QuantizeKernel:
    """Compile a quantize kernel, or load it from this process or tilelang's disk cache.

    Needs no GPU: the target is always sm_90a.

    Raises:
        RuntimeError: nvcc failed; the message holds its output.
    """
    from .launch import raw_function

    return QuantizeKernel(spec, raw_function(compile_program(spec)))


def compile_program(spec: QuantizeSpec) -> Any:
    """tilelang's object of a quantize kernel, which knows its text and its module.

    Raises:
        RuntimeError: nvcc failed; the message holds its output.
        ValueError: as `native.private_cache`.
    """
    private_cache()
    import tilelang

    from .kernel import TARGET
    from .phases.quantize import PASS_CONFIGS, build_quantize

    return tilelang.compile(build_quantize(spec), target=TARGET, pass_configs=PASS_CONFIGS)


# ---- twins in torch


def quantize_activations(x: Tensor, recipe: Recipe | None = None) -> tuple[Tensor, Tensor]:
    """What the launch writes to `x` and `x_sf`, to the bit, on any device.

    Args:
        x: (tokens, hidden), any float type; hidden a multiple of 128.
        recipe: decides exact or power-of-two scales; exact when None.

    Returns:
        Codes (tokens, hidden) e4m3 and scales (tokens, hidden/128) float32, by the rule of
        scaling.py. NaN does not count for a scale and becomes the code 0x7f; a group with an
        infinity has an infinite scale, zeros for its finite values and NaN for the infinity.

    Raises:
        ValueError: hidden is not a multiple of 128.
    """
    codes, sf = quantize_rows(x, SCALE_BLOCK, recipe)
    # The device knows one NaN code; torch keeps the sign, which differs from one processor to
    # another where infinity meets a zero.
    return codes.view(torch.uint8).masked_fill(codes.isnan(), E4M3_NAN_CODE).view(E4M3), sf


def add_shared_routes(
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_ranks: int,
    rank: int,
    num_shared: int,
) -> tuple[Tensor, Tensor]:
    """What the launch writes to `topk_idx` and `topk_weights`, on any device.

    With L = num_experts / num_ranks and S = num_shared, expert e becomes e + e // L * S, anything
    outside 0..num_experts-1 becomes -1, and S slots are added: rank * (L + S) + L + s with weight
    1, the rank's own copies of the shared experts.

    Args:
        topk_idx: (tokens, top_k), any integer type.
        topk_weights: (tokens, top_k), any float type.
        num_experts: routed experts over all ranks, without the shared ones.
        num_ranks: divides num_experts.
        rank: whose tokens these are.
        num_shared: shared experts; may be 0.

    Returns:
        (tokens, top_k + num_shared) int64 and float32.

    Raises:
        ValueError: shapes that differ, or a number that breaks a rule above.
    """
    if topk_idx.dim() != 2 or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"topk_idx of shape {tuple(topk_idx.shape)} and topk_weights of shape "
            f"{tuple(topk_weights.shape)} must both be (tokens, top_k)"
        )
    _check_integer("num_experts", num_experts, 1)
    _check_integer("num_ranks", num_ranks, 1)
    _check_integer("num_shared", num_shared, 0)
    if num_experts % num_ranks:
        raise ValueError(f"num_ranks={num_ranks} does not divide num_experts={num_experts}")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} must be 0 to {num_ranks - 1}, num_ranks={num_ranks}")
    local, tokens = num_experts // num_ranks, topk_idx.shape[0]
    idx = topk_idx.long()
    routed = (idx >= 0) & (idx < num_experts)
    idx = torch.where(routed, idx + idx // local * num_shared, -1)
    first = rank * (local + num_shared) + local
    shared = torch.arange(first, first + num_shared, dtype=torch.int64, device=idx.device)
    weights = topk_weights.float()
    return (
        torch.cat([idx, shared.expand(tokens, num_shared)], 1),
        torch.cat([weights, weights.new_ones(tokens, num_shared)], 1),
    )


def _check_integer(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
