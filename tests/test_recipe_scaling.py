"""Scales and codes, to the last bit."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_megamoe import Recipe
from tl_megamoe.recipe import as_recipe
from tl_megamoe.scaling import (
    E4M3,
    E4M3_INV_MAX,
    E4M3_MAX,
    dequantize,
    dequantize_blocks,
    e4m3_scale,
    e4m3_steps,
    quantize_blocks,
    quantize_rows,
    to_e4m3,
)

POW2 = Recipe(scale="pow2")
ALL_CODES = torch.arange(256, dtype=torch.uint8).view(E4M3)


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@given(st.floats(1e-12, 1e30, width=64))
def test_exact_scale_is_one_float32_product(amax: float) -> None:
    amax = float32(amax)
    expected = float32(float32(max(amax, float32(1e-10))) * E4M3_INV_MAX)
    assert e4m3_scale(torch.tensor(amax)).item() == expected
    assert float32(1 / 448) == E4M3_INV_MAX


@given(st.floats(1e-12, 1e30, width=64))
def test_pow2_scale_is_the_next_power(amax: float) -> None:
    exact = Fraction(e4m3_scale(torch.tensor(float32(amax))).item())
    pow2 = e4m3_scale(torch.tensor(float32(amax)), POW2).item()
    assert math.frexp(pow2)[0] == 0.5
    assert exact <= Fraction(pow2) < 2 * exact


def test_pow2_keeps_exact_powers() -> None:
    amax = torch.tensor([2.0**k * 448 for k in range(-20, 20)])
    sf = e4m3_scale(amax)
    power = sf == torch.tensor([2.0**k for k in range(-20, 20)])
    assert power.any()
    assert torch.equal(e4m3_scale(amax, POW2)[power], sf[power])


@pytest.mark.parametrize("recipe", [Recipe(), POW2], ids=str)
def test_scale_of_zero_nan_and_infinity(recipe: Recipe) -> None:
    sf = e4m3_scale(torch.tensor([0.0, torch.nan, torch.inf]), recipe)
    assert sf[0] == sf[1] > 0
    assert torch.isfinite(1 / sf[0])
    assert sf[2] == torch.inf


def test_conversion_saturates_and_keeps_nan() -> None:
    x = torch.tensor([447.0, 449.0, 1e6, torch.inf, -1e6, torch.nan, -0.0])
    got = to_e4m3(x).float()
    assert got[:5].tolist() == [448, 448, 448, 448, -448]
    assert got[5].isnan()
    finite = ALL_CODES.float()
    finite = finite[~finite.isnan()]
    assert torch.equal(to_e4m3(finite).float(), finite)
    assert finite.max() == E4M3_MAX


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("recipe", [Recipe(), POW2], ids=str)
def test_rows_round_trip(seed: int, group: int, recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((9, 256), generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    codes, sf = quantize_rows(x, group, recipe)
    assert (codes.dtype, codes.shape, sf.shape) == (E4M3, x.shape, (9, 256 // group))
    assert codes.float().abs().max() <= E4M3_MAX
    groups = x.unflatten(1, (-1, group))
    # Half a step of 2**-3 below the leading bit, or half the smallest step of the group.
    bound = torch.maximum(groups.abs() / 16, sf[..., None] * 2**-10) * (1 + 1e-6)
    error = dequantize(codes, sf).unflatten(1, (-1, group)) - groups
    assert (error.abs() <= bound).all()
    if recipe.scale == "exact":
        largest = codes.float().unflatten(1, (-1, group)).abs().amax(2)
        assert (largest == E4M3_MAX).all()


def test_nan_spoils_its_group_element_only() -> None:
    x = torch.ones((2, 256))
    x[0, 3] = torch.nan
    x[1, 200] = torch.inf
    codes, sf = quantize_rows(x)
    values = dequantize(codes, sf)
    assert values.isnan().sum() == 1 + 128  # infinity leaves nothing of its group to scale
    assert values[0, 3].isnan()
    assert values[1, 128:].isnan().all()


def test_rows_refuse_partial_groups() -> None:
    with pytest.raises(ValueError, match="100 columns, which is not a multiple of group=128"):
        quantize_rows(torch.ones(2, 100))


def test_blocks_round_trip(seed: int) -> None:
    w = torch.randn((2, 256, 384), generator=torch.Generator().manual_seed(seed))
    w[1, 128:, :128] *= 1000
    codes, sf = quantize_blocks(w)
    assert sf.shape == (2, 2, 3)
    assert sf.is_contiguous()
    assert sf[1, 1, 0] > 100 * sf[1, 0, 0]
    block = w[1, 128:, :128]
    assert torch.equal(sf[1, 1, 0], e4m3_scale(block.abs().max()))
    error = (dequantize_blocks(codes, sf) - w).abs()
    rows = sf.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert (error <= torch.maximum(w.abs() / 16, rows * 2**-10) * (1 + 1e-6)).all()
    with pytest.raises(ValueError, match="multiples of 128"):
        quantize_blocks(w[:, :100])


def test_steps_count_representable_values() -> None:
    finite = ALL_CODES[~ALL_CODES.float().isnan()]
    order = finite.float().argsort(stable=True)
    ascending = finite.view(torch.uint8)[order].view(E4M3)
    values = ascending.float()
    steps = e4m3_steps(ascending[:-1], ascending[1:])
    assert torch.equal(steps == 0, values[:-1] == values[1:])  # the two zeros
    assert set(steps.tolist()) == {0, 1}
    nan = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(E4M3)
    assert e4m3_steps(nan, nan).tolist() == [0, 0]
    assert e4m3_steps(nan[:1], nan[1:]).item() == 0
    assert e4m3_steps(nan[:1], finite[:1]).item() > 1000


@pytest.mark.parametrize("recipe", [Recipe(), (1, 128, 128), [128, 128, 128], None])
def test_as_recipe(recipe: object) -> None:
    assert as_recipe(recipe) == Recipe()


@pytest.mark.parametrize("recipe", [(1, 1, 128), (1, 64, 128), [[1], 2], "exact"])
def test_as_recipe_refuses(recipe: object) -> None:
    with pytest.raises(ValueError, match=r"recipe=.*Recipe, \(1, 128, 128\) or \(128, 128, 128\)"):
        as_recipe(recipe)


def test_recipe_choices() -> None:
    with pytest.raises(ValueError, match="scale='ue8m0'"):
        Recipe(scale="ue8m0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="intermediate_group=32"):
        Recipe(intermediate_group=32)  # type: ignore[arg-type]
    assert str(POW2) == "pow2-128"
    assert Recipe().folds_topk_weight
    assert not POW2.folds_topk_weight
