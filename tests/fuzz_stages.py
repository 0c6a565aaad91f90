"""The two halves of a fuzzed launch, each held to the other's side of the intermediate pool.

What linear1 left behind is compared with the layer in float32, value by value; `y` with what
float32 makes of that very intermediate. Neither bound knows how many codes flip, so both are
narrow, and hold for any scale, clamp and routing weight.
"""

from __future__ import annotations

import torch
from fuzz_cases import Case
from fuzz_truth import Truth, combine, moved, products
from torch import Tensor

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.scaling import E4M3, E4M3_MAX, dequantize, e4m3_scale, group_amax
from tl_megamoe.swizzle import ROW_TILE, unpack_rows
from tl_megamoe.weights import PlainWeights

GATE_ERROR = 4e-3
"""Of gate and up, as a part of their root mean square: `reference.tolerances` has 3e-4 of it as a
standard deviation, and tens of millions of values are compared."""
ROUNDING = 1e-4
"""Of a value: exp and reciprocal of fast math, float32 products in another order."""
SUM_ERROR = (6e-3, 2e-3)
"""Of `y`: as a part of its rows, whose BF16 values flip by 2**-8 where float32 sums differ, and of
itself."""


def intermediate_of(buffer: SymmBuffer, rows: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """What linear1 left of some rows.

    Args:
        buffer: of the rank.
        rows: (rows,) int64, of the pools' memory.
        used: rows that the pools use, from the first; a multiple of 64.

    Returns:
        Codes (rows, intermediate) uint8 and stored scales (rows, intermediate/group) float32.
    """
    tiles = buffer.l2_acts.view(torch.uint8)[: used // ROW_TILE]
    return unpack_rows(tiles)[rows], buffer.l2_acts_sf[:, rows].T


def wrong_intermediate(
    case: Case, truth: Truth, codes: Tensor, sf: Tensor
) -> tuple[Tensor, Tensor]:
    """(rows,) bool each: rows that have a wrong scale, and rows that have a wrong value.

    A scale follows from the largest magnitude of its group, which is off by what the group's values
    are off by. A value is off by that and by half a step of its code.

    Args:
        case: its clamp and recipe.
        truth: of the rows.
        codes, sf: from `intermediate_of`.
    """
    recipe, weight = case.numeric, truth.weight[:, None]
    group, folds = recipe.intermediate_group, recipe.folds_topk_weight
    off = moved(truth.gate_up, case.clamp, GATE_ERROR) + ROUNDING * truth.h.abs()
    if not folds:
        off = off * (1 + ROUNDING)
        off = off * weight.abs()
    largest, most = group_amax(truth.h, group), group_amax(off, group)
    want = e4m3_scale(largest, recipe)
    if folds:
        scale_is_right = (sf - want * weight).abs() <= weight.abs() * (
            most / E4M3_MAX + ROUNDING * want
        )
        own = torch.where(weight == 0, want, sf / torch.where(weight == 0, 1.0, weight))
    else:
        low, high = (e4m3_scale(largest + side * most, recipe) for side in (-1, 1))
        power = torch.frexp(sf).mantissa == 0.5
        scale_is_right = (low <= sf) & (sf <= high) & power
        own = sf
    values = codes.view(E4M3).float()
    exponent = torch.where(values == 0, -100, torch.frexp(values).exponent)
    half_step = torch.ldexp(torch.ones_like(values), (exponent - 5).clamp(min=-10))

    def wide(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(group, 1)

    bound = off + wide(own.abs()) * half_step * (1 + ROUNDING)
    if folds:  # then the scale is not known, and it may be off
        bound = torch.where(weight == 0, bound + wide(most), bound)
    right = (values * wide(own) - truth.h).abs() <= bound
    return ~scale_is_right.all(1), ~right.all(1)


def wrong_sums(truth: Truth, plain: PlainWeights, codes: Tensor, sf: Tensor, y: Tensor) -> Tensor:
    """(tokens,) bool: tokens whose `y` is not what linear2 and combine make of an intermediate.

    Args:
        truth: of the tokens of all ranks.
        plain: weights of all experts.
        codes, sf: from `intermediate_of`, of all routes.
        y: (tokens, hidden) bf16.
    """
    h = dequantize(codes.view(E4M3), sf)
    rows = products(h, plain.l2, plain.l2_sf, truth.routes.groups).bfloat16()
    want = combine(rows, truth.routes).double()
    size = torch.zeros(len(y), dtype=torch.float64, device=y.device)
    size = size.index_add_(0, truth.routes.token, rows.double().square().sum(1)).sqrt()
    error = (y.double() - want).norm(dim=1)
    return ~(error <= SUM_ERROR[0] * size + SUM_ERROR[1] * want.norm(dim=1))
