"""FP8 scales and codes: the one place that says how activations and weights are quantised.

The torch functions here and the device macro below compute the same numbers, operation by
operation. The kernel, the reference, the tests and every baseline take them from this file.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .problem import SCALE_BLOCK
from .recipe import Recipe

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite e4m3 value (S.1111.110); S.1111.111 is NaN and there is no infinity."""
E4M3_NAN_CODE = 0x7F
E4M3_INV_MAX = float(torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))
"""1/448 rounded to float32: a scale is one multiplication by it, not a division."""
MIN_AMAX = 1e-10
"""Smallest maximum a scale is made for, so that a row of zeros gets a finite inverse."""

# ---- torch


def e4m3_scale(amax: Tensor, recipe: Recipe | None = None) -> Tensor:
    """The scale factor of a group from the largest magnitude in it.

    Args:
        amax: any shape, float32. NaN counts as 0, as it does for the device's maximum.
        recipe: exact scales when None.

    Returns:
        float32 of the same shape: `max(amax, 1e-10) * float32(1/448)`, for a power-of-two recipe
        rounded up to the next power of two through the exponent bits, so exactly.
    """
    sf = torch.fmax(amax.float(), amax.new_tensor(MIN_AMAX, dtype=torch.float32)) * E4M3_INV_MAX
    if (recipe or Recipe()).scale == "exact":
        return sf
    bits = sf.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent.clamp(max=255) << 23).view(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """Saturating conversion of float32 to e4m3, round to nearest even.

    Finite values past 448 become 448, NaN stays NaN. torch's own conversion turns values past 464
    into NaN on some versions.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def group_amax(x: Tensor, group: int) -> Tensor:
    """Largest magnitude of each `group` columns, NaN left out: (..., K) -> (..., K/group)."""
    groups: Tensor = x.unflatten(-1, (x.shape[-1] // group, group))
    return groups.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)


def quantize_rows(
    x: Tensor, group: int = SCALE_BLOCK, recipe: Recipe | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3 with one scale per row and `group` columns.

    Args:
        x: (..., K), any float type; K a multiple of `group`.
        group: columns that share a scale.
        recipe: decides exact or power-of-two scales; exact when None.

    Returns:
        Codes (..., K) e4m3 and scales (..., K/group) float32.

    Raises:
        ValueError: K is not a multiple of `group`.
    """
    if x.shape[-1] % group:
        raise ValueError(
            f"x of shape {tuple(x.shape)} has {x.shape[-1]} columns, which is not a multiple of "
            f"group={group}, the columns of one scale. Pad the columns."
        )
    x = x.float()
    sf = e4m3_scale(group_amax(x, group), recipe)
    scaled = x.unflatten(-1, (x.shape[-1] // group, group)) * (1.0 / sf).unsqueeze(-1)
    return to_e4m3(scaled.flatten(-2)), sf


def dequantize(codes: Tensor, sf: Tensor) -> Tensor:
    """Float32 values of codes (..., K) with scales (..., K/group), for any group."""
    group = codes.shape[-1] // sf.shape[-1]
    groups: Tensor = codes.float().unflatten(-1, (sf.shape[-1], group))
    return (groups * sf.unsqueeze(-1)).flatten(-2)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights to e4m3 with one exact scale per 128 x 128 block.

    Args:
        w: (..., N, K), any float type; N and K multiples of 128.

    Returns:
        Codes (..., N, K) e4m3 and scales (..., N/128, K/128) float32, both contiguous.

    Raises:
        ValueError: N or K is not a multiple of 128.
    """
    n, k = w.shape[-2:]
    if n % SCALE_BLOCK or k % SCALE_BLOCK:
        raise ValueError(
            f"w of shape {tuple(w.shape)} must have rows and columns in multiples of {SCALE_BLOCK}"
            ", the block of one weight scale. Pad the weights."
        )
    blocks = w.float().unflatten(-1, (k // SCALE_BLOCK, SCALE_BLOCK))
    blocks = blocks.unflatten(-3, (n // SCALE_BLOCK, SCALE_BLOCK))
    sf = e4m3_scale(blocks.abs().amax((-3, -1)))
    codes = to_e4m3(blocks * (1.0 / sf)[..., :, None, :, None])
    return codes.view(torch.uint8).reshape(w.shape).view(E4M3), sf.contiguous()


def dequantize_blocks(codes: Tensor, sf: Tensor) -> Tensor:
    """Float32 values of weights (..., N, K) with scales (..., N/128, K/128)."""
    rows = sf.repeat_interleave(SCALE_BLOCK, -2)
    return codes.float() * rows.repeat_interleave(SCALE_BLOCK, -1)


@lru_cache(maxsize=8)
def _e4m3_order(device: torch.device) -> Tensor:
    """Position of each code in value order; both zeros share one, NaN is far from everything."""
    code = torch.arange(256, dtype=torch.int32, device=device)
    magnitude = code & 0x7F
    order = torch.where(code >= 128, -magnitude, magnitude)
    return torch.where(magnitude == E4M3_NAN_CODE, 1 << 20, order)


def e4m3_steps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable e4m3 values apart two code tensors are; 0 for two NaNs.

    Args:
        a: e4m3 of any shape.
        b: e4m3 of the same shape.

    Returns:
        int32 of that shape; about 2**20 where only one is NaN.
    """
    order = _e4m3_order(a.device)
    return (order[a.view(torch.uint8).int()] - order[b.view(torch.uint8).int()]).abs()


# ---- device

SCALING_CUDA = r"""
// The least power of two that is not below a positive scale, through the exponent bits; infinity stays.
TLMM_DEV float tlmm_pow2_ceil(float sf) {
  int bits = __float_as_int(sf), exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);
  return __int_as_float((exponent < 255 ? exponent : 255) << 23); }
// Its inverse, exact as well; 0 for infinity.
TLMM_DEV float tlmm_pow2_inverse(float sf) {
  int exponent = 254 - (__float_as_int(sf) >> 23);
  return __int_as_float((exponent > 0 ? exponent : 0) << 23); }
"""


def device_e4m3_scale(amax: Any, recipe: Recipe) -> Any:
    """`e4m3_scale` as a traced expression.

    Args:
        amax: largest magnitude of a group, a traced float32.
        recipe: exact or power-of-two scales.
    """
    import tilelang.language as T  # noqa: N812 - the reference needs no TileLang

    exact = T.max(amax, MIN_AMAX) * T.float32(E4M3_INV_MAX)
    return exact if recipe.scale == "exact" else T.call_extern("float32", "tlmm_pow2_ceil", exact)


def device_inverse(sf: Any, recipe: Recipe, fast_math: bool) -> Any:
    """`1 / sf` of a traced scale: approximate with `fast_math`, exact for a power of two."""
    import tilelang.language as T  # noqa: N812 - see above

    if recipe.scale == "pow2":
        return T.call_extern("float32", "tlmm_pow2_inverse", sf)
    return T.fast_rcp(sf) if fast_math else 1.0 / sf
