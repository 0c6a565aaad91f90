"""Checks of what the op is called with, before anything is compiled or launched."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe, as_recipe
from .recipe import RecipeLike as RecipeLike

ALIGNMENT = 16
"""Bytes that the kernel's vector accesses to caller's tensors are aligned to."""
WeightPair = tuple[torch.Tensor, torch.Tensor]


class BufferLike(Protocol):
    """What checks ask of a buffer."""

    problem: Problem
    capacity: int
    recipe: Recipe
    device: torch.device


def weight_shapes(problem: Problem) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the pre-tiled weights and their scales, by argument name."""
    local = problem.num_local_experts
    hidden, intermediate = problem.hidden // SCALE_BLOCK, problem.intermediate // SCALE_BLOCK
    tile = (SCALE_BLOCK, SCALE_BLOCK)
    return {
        "l1_weights": ((local, 2 * intermediate, hidden, *tile), (local, 2 * intermediate, hidden)),
        "l2_weights": ((local, hidden, intermediate, *tile), (local, hidden, intermediate)),
    }


def check_tensor(
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    buffer: BufferLike,
) -> None:
    """Raise ValueError unless `tensor` is contiguous, aligned and as the rest says."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, found {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, found {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} for problem {buffer.problem.name!r}, "
            f"found {tuple(tensor.shape)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} must start at a multiple of {ALIGNMENT} bytes (16-byte stores, TMA), found "
            f"{tensor.data_ptr():#x}. Clone it."
        )
    if tensor.device != buffer.device:
        raise ValueError(
            f"{name} must be on {buffer.device} like the buffer, is on {tensor.device}"
        )


def check_capacity(name: str, tokens: int, capacity: int) -> None:
    """Raise ValueError for more tokens than a buffer is made for."""
    if tokens > capacity:
        raise ValueError(
            f"{name} has {tokens} tokens, more than capacity={capacity} of the buffer. Make the "
            "buffer with a larger capacity, or split the batch."
        )


def check_tokens(x: Any, hidden: int, capacity: int) -> int:
    """The number of tokens of activations that fit a buffer.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] != hidden:
        found = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x must have shape (tokens, hidden={hidden}), found {found}")
    tokens = int(x.shape[0])
    check_capacity("x", tokens, capacity)
    return tokens


def check_input(
    name: str,
    value: Any,
    shape: tuple[int, int],
    columns: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    advice: str = "",
) -> None:
    """Raise ValueError unless an input has a row a token, and dtype and device fit.

    Args:
        name, value: the input.
        shape: (tokens, columns).
        columns: what the columns are.
        dtypes: any of them.
        device: of the buffer.
        advice: what to do about another dtype.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, found {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} must be (tokens, {columns}) = {shape}; tokens "
            "is the number of rows of x"
        )
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} of dtype {value.dtype} must be {expected}{advice}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, the buffer on {device}")


def copy_inputs(
    buffer: Any,
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> int:
    """`SymmBuffer.fill`, of anything that has its inputs. Rows that are there are not copied."""
    check_grad(x=x, x_sf=x_sf, topk_weights=topk_weights)
    p = buffer.problem
    tokens = check_tokens(x, p.hidden, buffer.capacity)
    arguments = (
        ("x", x, buffer.x, "hidden"),
        ("x_sf", x_sf, buffer.x_sf, "hidden/128"),
        ("topk_idx", topk_idx, buffer.topk_idx, "num_topk"),
        ("topk_weights", topk_weights, buffer.topk_weights, "num_topk"),
    )
    for name, value, target, columns in arguments:
        shape = (tokens, target.shape[1])
        check_input(name, value, shape, columns, (target.dtype,), buffer.device)
    for _, value, target, _ in arguments:
        if value.data_ptr() != target.data_ptr() or not value.is_contiguous():
            target[:tokens].copy_(value)
    return tokens


def check_y(y: Any, buffer: BufferLike) -> int:
    """The number of tokens of an output that fits the buffer.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(y, torch.Tensor) or y.dim() != 2:
        found = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        raise ValueError(f"y must be a (num_tokens, hidden) tensor, found {found}")
    num_tokens = int(y.shape[0])
    check_capacity("y", num_tokens, buffer.capacity)
    check_tensor("y", y, (num_tokens, buffer.problem.hidden), torch.bfloat16, buffer)
    return num_tokens


def check_weights(name: str, pair: Any, buffer: BufferLike) -> None:
    """Raise ValueError unless `pair` is what `transform_weights` makes of this rank's experts."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"{name} must be a (weight, scale) pair from transform_weights, found "
            f"{type(pair).__name__}"
        )
    weight, scale = weight_shapes(buffer.problem)[name]
    try:
        check_tensor(f"{name}[0]", pair[0], weight, torch.float8_e4m3fn, buffer)
    except ValueError as error:
        raise ValueError(f"{error}. Prepare weights with transform_weights.") from None
    check_tensor(f"{name}[1]", pair[1], scale, torch.float32, buffer)


def check_activation(activation: Any) -> None:
    """Raise ValueError for an activation function that the kernel does not have."""
    if activation != "swiglu":
        raise ValueError(f"activation={activation!r} must be 'swiglu'")


def check_grad(**tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError where autograd would follow one of these into the layer."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{name} requires grad, and the MoE layer has no backward pass: call the model "
                    "under torch.inference_mode() or torch.no_grad(), or detach it"
                )


def check_clamp(clamp: Any) -> None:
    """Raise ValueError unless the clamp is None or a positive number."""
    if clamp is None:
        return
    number = isinstance(clamp, (int, float)) and not isinstance(clamp, bool)
    if not number or not (math.isfinite(clamp) and clamp > 0):
        raise ValueError(f"activation_clamp={clamp!r} must be a positive number or None")


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError unless `timeout_s` is a bound that the kernel can count in milliseconds."""
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 2**31 / 1000:
        raise ValueError(f"timeout_s={timeout_s!r} must be a positive number below {2**31 // 1000}")


def check_bound(buffer: BufferLike, num_tokens: int, token_bound: int | None) -> int:
    """The tokens that the schedule is chosen for: the same number on all ranks.

    Raises:
        ValueError: below num_tokens, or over the capacity.
    """
    if token_bound is None:
        token_bound = num_tokens if buffer.problem.num_ranks == 1 else buffer.capacity
    if type(token_bound) is not int or not 0 <= num_tokens <= token_bound <= buffer.capacity:
        raise ValueError(
            f"token_bound={token_bound!r} must be an integer from num_tokens={num_tokens} to "
            f"capacity={buffer.capacity}: the most tokens that any rank has in this launch, the "
            "same on all ranks"
        )
    return token_bound


def check_recipe(recipe: RecipeLike, buffer: BufferLike) -> None:
    """Raise ValueError for another recipe than the buffer's, which None and the tuples mean."""
    if not isinstance(recipe, Recipe):
        as_recipe(recipe)
    elif recipe != buffer.recipe:
        raise ValueError(
            f"recipe={recipe} differs from the buffer's, {buffer.recipe}, for which its pools are "
            f"laid out. Make the buffer with recipe={recipe!r}, or pass recipe=None."
        )
