"""Names that callers of DeepGEMM's Mega MoE know, with its argument order, for a changed import.

What differs from the SM90 kernels there:
- Weights come as e4m3 with float32 scales per 128 x 128, and `transform_weights_for_mega_moe_sm90`
  also tiles them: its result is for the kernel of this package only, and theirs for theirs.
- `activation` is `swiglu`, and activations are FP8: other values of `activation`, `mma_type` and
  `use_fp8_dispatch` are refused. There are no shared experts.
- The buffer is a `SymmBuffer`: `x`, `x_sf`, `topk_idx`, `topk_weights` are filled as there, and
  `x_sf` is (tokens, hidden/128) float32.
- The intermediate activations have one scale per 128 columns; pass `recipe=Recipe(...)` for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arguments import WeightPair
from .buffer import SymmBuffer
from .handshake import bare_card, exchange_cards
from .layout import Layout, make_layout
from .problem import SCALE_BLOCK, Problem
from .recipe import RecipeLike, as_recipe
from .virtual import VirtualGroup
from .weights import transform_weights

INPUT_VIEWS = (
    "x",
    "x_sf",
    "topk_idx",
    "topk_weights",
    "l1_acts",
    "l1_acts_sf",
    "l2_acts",
    "l2_acts_sf",
)
"""Views that DeepGEMM's slicing function returns, in its order."""


def get_token_alignment_for_sm90_mega_moe() -> int:
    """Tokens that `get_symm_buffer_for_mega_moe` rounds the capacity up to a multiple of.

    The kernel needs no alignment; the number keeps the capacities that callers compute with it.
    """
    return SCALE_BLOCK


def get_symm_buffer_size_for_sm90_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
    *,
    recipe: RecipeLike = None,
) -> tuple[int, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Size of a rank's buffer, and a function that cuts the views out of such an allocation.

    Args:
        num_ranks: ranks of the layer.
        num_experts: experts over all ranks.
        num_max_tokens_per_rank: capacity, the most tokens that a rank contributes.
        num_topk: routes of one token.
        hidden: model width.
        intermediate_hidden: width after SwiGLU.
        use_fp8_dispatch: True.
        activation: `swiglu`.
        recipe: `Recipe()` when None or one of DeepGEMM's tuples.

    Returns:
        Bytes, and a function from a contiguous tensor of so many bytes to x, x_sf, topk_idx,
        topk_weights, l1_acts, l1_acts_sf, l2_acts, l2_acts_sf.

    Raises:
        ValueError: an argument is wrong.
    """
    _check(use_fp8_dispatch, None, activation, 0)
    problem = _problem(num_ranks, num_experts, num_topk, hidden, intermediate_hidden)
    layout = make_layout(problem, num_max_tokens_per_rank, as_recipe(recipe))

    def views(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raw = buffer.view(torch.uint8)
        if raw.dim() != 1 or raw.numel() < layout.num_bytes:
            raise ValueError(
                f"buffer of shape {tuple(buffer.shape)} and dtype {buffer.dtype} must be one row "
                f"of {layout.num_bytes} bytes"
            )
        return tuple(_view(layout, raw, name) for name in INPUT_VIEWS)

    return layout.num_bytes, views


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    activation: str = "swiglu",
    *,
    mma_type: str | None = None,
    num_shared_experts: int = 0,
    device: torch.device | str | None = None,
    timeout_s: float = 60.0,
    recipe: RecipeLike = None,
    debug: bool = False,
) -> SymmBuffer:
    """This rank's buffer; all ranks of `group` call it.

    Args:
        group: process group of the ranks. None is one rank in one process, also where
            torch.distributed is initialised.
        num_experts: experts over all ranks.
        num_max_tokens_per_rank: capacity; rounded up to the token alignment, 128.
        num_topk: routes of one token.
        hidden: model width.
        intermediate_hidden: width after SwiGLU.
        use_fp8_dispatch: True or None.
        activation: `swiglu`.
        mma_type: `fp8xfp8` or None.
        num_shared_experts: 0.
        device, timeout_s, recipe, debug: as for `SymmBuffer`.

    Raises:
        ValueError: an argument is wrong, or differs between the ranks; raised on all of them.
        RuntimeError: as `SymmBuffer.from_process_group`.
    """
    if isinstance(group, VirtualGroup):
        raise ValueError(
            "group is a VirtualGroup, whose ranks share one process: call "
            "group.buffers(problem, capacity), which makes the buffers of all of them"
        )
    alignment = get_token_alignment_for_sm90_mega_moe()
    capacity = num_max_tokens_per_rank
    if type(capacity) is int:  # what it is else, the layout says better
        capacity = -(-capacity // alignment) * alignment
    ranks = 1 if group is None else group.size()
    try:
        _check(use_fp8_dispatch, mma_type, activation, num_shared_experts)
        problem = _problem(ranks, num_experts, num_topk, hidden, intermediate_hidden)
    except ValueError as error:
        if group is not None:  # the other ranks wait for this one's card
            exchange_cards(bare_card(error), group)
        raise
    if group is None:
        return SymmBuffer(problem, capacity, device, timeout_s, recipe=recipe, debug=debug)
    return SymmBuffer.from_process_group(
        problem, capacity, group, device, timeout_s, recipe=recipe, debug=debug
    )


get_symm_buffer_for_sm90_mega_moe = get_symm_buffer_for_mega_moe


def transform_weights_for_mega_moe_sm90(
    l1_weights: WeightPair, l2_weights: WeightPair
) -> tuple[WeightPair, WeightPair]:
    """Prepare one rank's stacked weights for `fp8_mega_moe`; see `weights.transform_weights`.

    Args:
        l1_weights: codes (E, 2*intermediate, hidden) e4m3, gate rows, then up rows; scales
            (E, 2*intermediate/128, hidden/128) float32, contiguous.
        l2_weights: codes (E, hidden, intermediate) e4m3; scales (E, hidden/128, intermediate/128)
            float32, contiguous.

    Returns:
        l1_weights and l2_weights for `fp8_mega_moe`. The codes have another shape than those given.

    Raises:
        ValueError: a shape, stride, dtype or device breaks one of these rules.
    """
    for name, pair in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(
                f"{name} must be a (codes, scales) pair, found {type(pair).__name__}: BF16 weights "
                "have no kernel here"
            )
    weights = transform_weights(l1_weights, l2_weights)
    return weights.l1, weights.l2


def _problem(
    num_ranks: int, num_experts: int, num_topk: int, hidden: int, intermediate: int
) -> Problem:
    return Problem(
        name=f"h{hidden}-i{intermediate}-e{num_experts}-top{num_topk}",
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        num_topk=num_topk,
        num_ranks=num_ranks,
    )


def _view(layout: Layout, raw: torch.Tensor, name: str) -> torch.Tensor:
    section = layout.sections[name]
    part = raw[section.offset : section.offset + section.num_bytes]
    return part.view(getattr(torch, section.dtype)).view(section.shape)


def _check(use_fp8_dispatch: Any, mma_type: Any, activation: Any, num_shared_experts: Any) -> None:
    for name, value, allowed in (
        ("use_fp8_dispatch", use_fp8_dispatch, (None, True)),
        ("mma_type", mma_type, (None, "fp8xfp8")),
        ("activation", activation, ("swiglu",)),
        ("num_shared_experts", num_shared_experts, (0,)),
    ):
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r} must be {' or '.join(map(repr, allowed))}: the kernel runs "
                "SwiGLU on FP8 activations and FP8 weights, and routed experts only"
            )
