"""The fuzzer's checks of numbers: the reference against float64, the rounding of quantisation."""

from __future__ import annotations

from dataclasses import replace

import torch
from fuzz_cases import Case
from fuzz_routes import Routes
from fuzz_truth import SMALLEST_STEP, joined, judge, make_inputs, make_truth
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.explorer.findings import same_bits
from tl_megamoe.quantize import quantize_activations
from tl_megamoe.scaling import (
    E4M3,
    E4M3_MAX,
    MIN_AMAX,
    dequantize,
    dequantize_blocks,
    quantize_blocks,
    quantize_rows,
)
from tl_megamoe.synthetic import Inputs, random_weights
from tl_megamoe.weights import PlainWeights

E4M3_VALUES = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
"""All finite values that are not negative, ascending."""

# ---- the reference against float64


def check_reference(case: Case) -> str:
    """The whole layer against loops in float64; any number of ranks; no routes."""
    weights = random_weights(replace(case.problem, num_ranks=1), seed=case.seed)
    plain = replace(weights, l1_sf=weights.l1_sf * case.w_scale, l2_sf=weights.l2_sf * case.w_scale)
    inputs = make_inputs(case)
    expected = torch.cat([naive_moe(case, own, plain) for own in inputs])
    if not len(expected):
        return ""
    every = joined(inputs)
    routes = Routes.of(every.topk_idx, case)
    truth = make_truth(every, routes, plain, case.numeric, case.clamp)
    told = [
        reference.moe(
            case.problem, i.x, i.x_sf, i.topk_idx, i.topk_weights, plain, case.numeric, case.clamp
        )
        for i in inputs
    ]
    for name, y in (("reference.moe", torch.cat(told)), ("make_truth", truth.y)):
        if reference.compare(y, expected, intermediate=case.intermediate):
            continue
        if reason := judge(case, y, replace(truth, y=expected)):
            return f"{name}: {reason}"
    return ""


def nearest_e4m3(x: Tensor) -> Tensor:
    """Values rounded to those that e4m3 has; a tie may fall to either side."""
    size = x.abs().clamp(max=E4M3_MAX)
    above = torch.bucketize(size, E4M3_VALUES).clamp(max=len(E4M3_VALUES) - 1)
    low, high = E4M3_VALUES[(above - 1).clamp(min=0)], E4M3_VALUES[above]
    return torch.where(size - low < high - size, low, high).copysign(x)


def naive_moe(case: Case, own: Inputs, plain: PlainWeights) -> Tensor:
    """The layer for one rank's tokens in float64, a route at a time."""
    recipe, inter = case.numeric, case.intermediate
    group, pow2 = recipe.intermediate_group, recipe.scale == "pow2"
    x = own.x.double() * own.x_sf.double().repeat_interleave(128, 1)
    y = torch.zeros(own.num_tokens, case.hidden, dtype=torch.float64)

    def dense(codes: Tensor, sf: Tensor) -> Tensor:
        wide = sf.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.double() * wide

    for token in range(own.num_tokens):
        for slot in range(case.num_topk):
            expert, weight = int(own.topk_idx[token, slot]), own.topk_weights[token, slot].double()
            if not 0 <= expert < case.num_experts:
                continue
            gate, up = (dense(plain.l1[expert], plain.l1_sf[expert]) @ x[token]).split(inter)
            if case.clamp is not None:
                gate, up = gate.clamp(max=case.clamp), up.clamp(-case.clamp, case.clamp)
            h = gate / (1 + torch.exp(-gate)) * up * (weight if pow2 else 1.0)
            groups = h.view(-1, group)
            scale = groups.abs().amax(1, keepdim=True).clamp(min=MIN_AMAX) / E4M3_MAX
            if pow2:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            h = (nearest_e4m3(groups / scale) * scale * (1.0 if pow2 else weight)).view(-1)
            row = dense(plain.l2[expert], plain.l2_sf[expert]) @ h
            y[token] += row.bfloat16().double()
    return y.bfloat16()


# ---- quantisation


def check_scaling(case: Case) -> str:
    """Codes are the nearest, scales as small as they may be, powers of two move scales alone."""
    generator = torch.Generator().manual_seed(case.seed)
    recipe, group = case.numeric, case.numeric.intermediate_group
    x = torch.randn((case.tokens[0], case.hidden), generator=generator) * case.x_scale
    x *= torch.pow(10.0, 4 * torch.rand((len(x), 1), generator=generator) - 2)
    x[torch.rand(x.shape, generator=generator) < case.mask / 2] = 0.0
    codes, sf = quantize_rows(x, group, recipe)
    if reason := _nearest(x, dequantize(codes, sf), sf.repeat_interleave(group, 1)):
        return reason
    amax = x.unflatten(1, (-1, group)).abs().amax(2).double().clamp(min=MIN_AMAX)
    ratio = sf.double() * E4M3_MAX / amax
    high = 2.0 if recipe.scale == "pow2" else 1.0
    if len(x) and not (1 - 1e-6 <= float(ratio.min()) and float(ratio.max()) <= high + 1e-6):
        return f"scales are {float(ratio.min())} to {float(ratio.max())} of the smallest"
    if recipe.scale == "pow2" and not (torch.frexp(sf).mantissa == 0.5).all():
        return "a scale is no power of two"
    if len(x) and float(x.abs().unflatten(1, (-1, group)).amax(2).min()) > 4 * MIN_AMAX:
        moved, moved_sf = quantize_rows(x * 0.5, group, recipe)
        if not (same_bits(moved, codes) and same_bits(moved_sf * 2, sf)):
            return "half of the values have other codes, or not half of the scales"
    twin = quantize_activations(x.bfloat16(), recipe)
    plain = quantize_rows(x.bfloat16(), 128, recipe)
    if not all(same_bits(a, b) for a, b in zip(twin, plain, strict=True)):
        return "quantize_activations and quantize_rows differ"
    w = torch.randn((2, 256, case.hidden), generator=generator) * case.w_scale
    codes, sf = quantize_blocks(w)
    wide = sf.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return _nearest(w, dequantize_blocks(codes, sf), wide)


def _nearest(x: Tensor, got: Tensor, sf: Tensor) -> str:
    """Half a step of three bits behind the leading one, or of the smallest values."""
    bound = torch.maximum(x.abs() / 16, sf * SMALLEST_STEP / 2) * (1 + 1e-5)
    far = ~((got - x).abs() <= bound)
    return f"{int(far.sum())} values are rounded by more than half a step" if far.any() else ""
