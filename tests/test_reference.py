"""The float32 reference against a scalar loop, its edge cases, and what the comparisons catch."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from dataclasses import replace

import pytest
import torch

from tl_megamoe import Problem, Recipe, reference
from tl_megamoe.scaling import E4M3, dequantize, dequantize_blocks, quantize_rows
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import PlainWeights

TINY = Problem(name="tiny", hidden=256, intermediate=128, num_experts=3, num_topk=2, num_ranks=1)
WIDE = Problem(name="wide", hidden=512, intermediate=384, num_experts=6, num_topk=3, num_ranks=1)
POW2, NARROW = Recipe(scale="pow2"), Recipe(intermediate_group=64)

# ---- a scalar layer: Python floats, every float32 and e4m3 rounding spelled out

POSITIVE = [((m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7)) for e in range(16) for m in range(8)][:127]


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def e4m3(value: float) -> float:
    size = min(abs(value), 448.0)
    i = bisect_left(POSITIVE, size)
    if POSITIVE[i] != size:
        low, high = size - POSITIVE[i - 1], POSITIVE[i] - size
        i = i - 1 if low < high or (low == high and (i - 1) % 2 == 0) else i
    return math.copysign(POSITIVE[i], value)


def naive_product(
    a: list[float], a_sf: list[float], w: list[list[float]], w_sf: list[list[float]]
) -> list[float]:
    """One row times w.T. Float64 sums of a K block of e4m3 products are exact."""
    width = len(a) // len(a_sf)
    out = []
    for n, row in enumerate(w):
        acc = 0.0
        for k in range(len(a_sf)):
            raw = 0.0
            for j in range(k * width, (k + 1) * width):
                raw += a[j] * row[j]
            acc = f32(acc + f32(f32(raw) * f32(a_sf[k] * w_sf[n // 128][k * width // 128])))
        out.append(acc)
    return out


def naive_moe(
    problem: Problem, inputs: Inputs, weights: PlainWeights, recipe: Recipe, clamp: float | None
) -> torch.Tensor:
    group, inter = recipe.intermediate_group, problem.intermediate
    w1, w2 = weights.l1.float().tolist(), weights.l2.float().tolist()
    y = []
    for t in range(inputs.num_tokens):
        total = [0.0] * problem.hidden
        for slot in range(problem.num_topk):
            expert = int(inputs.topk_idx[t, slot])
            weight = float(inputs.topk_weights[t, slot])
            if not 0 <= expert < problem.num_experts:
                continue
            acc = naive_product(
                inputs.x[t].float().tolist(),
                inputs.x_sf[t].tolist(),
                w1[expert],
                weights.l1_sf[expert].tolist(),
            )
            h = []
            for gate, up in zip(acc[:inter], acc[inter:], strict=True):
                if clamp is not None:
                    gate, up = min(gate, clamp), max(-clamp, min(up, clamp))
                value = f32(f32(gate * f32(1 / f32(1 + f32(math.exp(-gate))))) * up)
                h.append(value if recipe.scale == "exact" else f32(value * weight))
            codes, scales = [], []
            for g in range(0, inter, group):
                amax = max(max(abs(v) for v in h[g : g + group]), f32(1e-10))
                sf = f32(amax * f32(1 / 448))
                if recipe.scale == "pow2":
                    mantissa, exponent = math.frexp(sf)
                    sf = 2.0 ** (exponent - (mantissa == 0.5))
                inverse = f32(1 / sf)
                codes += [e4m3(f32(v * inverse)) for v in h[g : g + group]]
                scales.append(f32(sf * weight) if recipe.scale == "exact" else sf)
            row = naive_product(codes, scales, w2[expert], weights.l2_sf[expert].tolist())
            rounded = torch.tensor(row).bfloat16().tolist()
            total = [f32(a + b) for a, b in zip(total, rounded, strict=True)]
        y.append(total)
    return torch.tensor(y).bfloat16()


def run(
    problem: Problem,
    inputs: Inputs,
    weights: PlainWeights,
    recipe: Recipe | None = None,
    clamp: float | None = None,
) -> torch.Tensor:
    return reference.moe(
        problem,
        inputs.x,
        inputs.x_sf,
        inputs.topk_idx,
        inputs.topk_weights,
        weights,
        recipe,
        clamp,
    )


@pytest.mark.parametrize(
    ("recipe", "clamp"),
    [
        (Recipe(), None),
        (Recipe(), 0.4),
        (POW2, None),
        (Recipe(scale="pow2", intermediate_group=64), 0.4),
        (NARROW, None),
    ],
    ids=str,
)
def test_against_scalars(seed: int, recipe: Recipe, clamp: float | None) -> None:
    inputs = random_inputs(TINY, 3, seed=seed)
    inputs.topk_idx[1, 0] = -1
    inputs.topk_idx[2, 1] = 3  # past the last expert: dropped
    weights = random_weights(TINY, seed=seed)
    expected = naive_moe(TINY, inputs, weights, recipe, clamp)
    actual = run(TINY, inputs, weights, recipe, clamp)
    # Float32 sums within a K block differ in the last bit; a rare code or BF16 flip may follow.
    assert reference.compare(actual, expected, max_rel_error=1e-3, max_token_error=3e-3)
    assert (actual == expected).float().mean() > 0.98


def test_close_to_unquantised(seed: int) -> None:
    inputs = random_inputs(WIDE, 32, seed=seed)
    weights = random_weights(WIDE, seed=seed)
    x = dequantize(inputs.x, inputs.x_sf)
    w1 = dequantize_blocks(weights.l1, weights.l1_sf)
    w2 = dequantize_blocks(weights.l2, weights.l2_sf)
    y = torch.zeros(32, WIDE.hidden)
    for t in range(32):
        for slot in range(WIDE.num_topk):
            e = int(inputs.topk_idx[t, slot])
            gate, up = (w1[e] @ x[t]).chunk(2)
            y[t] += inputs.topk_weights[t, slot] * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    for recipe in (Recipe(), POW2, NARROW):
        found = reference.compare(
            run(WIDE, inputs, weights, recipe), y, max_rel_error=0.05, max_token_error=0.1
        )
        assert found, found.reason
        assert found.rel_error > 0.01  # FP8 rounding is really there


# ---- dispatch and combine


def test_dispatch_order_and_drops() -> None:
    problem = replace(WIDE, num_ranks=2)
    idx = torch.tensor([[5, 3, -1], [3, 3, 6], [0, 4, 3]])
    inputs = random_inputs(WIDE, 3, seed=1)
    weights = torch.arange(9.0).view(3, 3)
    pool = reference.dispatch(inputs.x, inputs.x_sf, idx, weights, problem, rank=1)
    assert pool.counts == (4, 1, 1)
    assert pool.expert.tolist() == [0, 0, 0, 0, 1, 2]
    assert list(zip(pool.token.tolist(), pool.slot.tolist(), strict=True)) == [
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 2),
        (2, 1),
        (0, 0),
    ]
    assert pool.topk_weights.tolist() == [1, 3, 4, 8, 7, 0]
    assert torch.equal(pool.x.view(torch.uint8), inputs.x.view(torch.uint8)[pool.token])
    assert torch.equal(pool.x_sf, inputs.x_sf[pool.token])
    other = reference.dispatch(inputs.x, inputs.x_sf, idx, weights, problem, rank=0)
    assert other.counts == (1, 0, 0)


def test_combine_adds_in_slot_order() -> None:
    inputs = random_inputs(replace(TINY, num_topk=3), 1, seed=0)
    idx = torch.tensor([[2, 0, 1]])
    pool = reference.dispatch(
        inputs.x, inputs.x_sf, idx, torch.ones(1, 3), replace(TINY, num_topk=3)
    )
    assert pool.slot.tolist() == [1, 2, 0]
    # In slot order (2**24 + 1) - 2**24 loses the 1; in pool order it would be kept.
    rows = torch.tensor([[1.0], [-(2.0**24)], [2.0**24]]).bfloat16()
    assert reference.combine(rows, pool, 1).item() == 0.0
    assert reference.combine(rows[[1, 0, 2]], pool, 1).item() == 1.0


def test_any_number_of_ranks_gives_the_same(seed: int) -> None:
    inputs = random_inputs(WIDE, 20, seed=seed, mask=0.2)
    weights = random_weights(WIDE, seed=seed)
    whole = run(WIDE, inputs, weights)
    for ranks in (2, 3):
        problem = replace(WIDE, num_ranks=ranks)
        assert torch.equal(run(problem, inputs, weights), whole)
        received = 0
        for rank in range(ranks):
            pool = reference.dispatch(
                inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights, problem, rank
            )
            received += sum(pool.counts)
        assert received == (inputs.topk_idx >= 0).sum()


# ---- edge cases


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_no_routes_no_output(seed: int, tokens: int) -> None:
    inputs = random_inputs(TINY, tokens, mask=1.0, seed=seed)
    y = run(TINY, inputs, random_weights(TINY, seed=seed))
    assert y.shape == (tokens, TINY.hidden)
    assert y.dtype == torch.bfloat16
    assert not y.any()


def test_zero_and_negative_weights(seed: int) -> None:
    inputs = random_inputs(TINY, 4, seed=seed)
    weights = random_weights(TINY, seed=seed)
    y = run(TINY, inputs, weights)
    assert not run(TINY, replace(inputs, topk_weights=inputs.topk_weights * 0), weights).any()
    for recipe in (Recipe(), POW2):
        plus = run(TINY, inputs, weights, recipe)
        minus = run(TINY, replace(inputs, topk_weights=-inputs.topk_weights), weights, recipe)
        assert torch.equal(plus, -minus)
    assert y.any()


def test_same_expert_twice_counts_twice(seed: int) -> None:
    inputs = random_inputs(TINY, 4, seed=seed)
    weights = random_weights(TINY, seed=seed)
    inputs.topk_idx[:] = torch.tensor([1, 1])
    inputs.topk_weights[:] = 0.25
    once = inputs.topk_idx.clone()
    once[:, 1] = -1
    single = run(TINY, replace(inputs, topk_idx=once), weights)
    assert torch.equal(run(TINY, inputs, weights), 2 * single)


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_in_its_token(seed: int, value: float, clamp: float | None) -> None:
    inputs = random_inputs(TINY, 6, seed=seed)
    weights = random_weights(TINY, seed=seed)
    clean = run(TINY, inputs, weights, clamp=clamp)
    inputs.x_sf[2, 1] = value
    spoiled = run(TINY, inputs, weights, clamp=clamp)
    others = torch.arange(6) != 2
    assert torch.equal(spoiled[others], clean[others])
    assert not torch.equal(spoiled[2], clean[2])
    if math.isnan(value):
        assert spoiled[2].isnan().all()


def test_tf32_setting_is_restored() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with reference.exact_float32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        with pytest.raises(RuntimeError, match="inside"), reference.exact_float32():
            raise RuntimeError("inside")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_rows_in_parts_are_the_same_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(TINY, 30, seed=seed)
    weights = random_weights(TINY, seed=seed)
    whole = run(TINY, inputs, weights)
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", 7)
    assert reference.compare(run(TINY, inputs, weights), whole, max_rel_error=1e-3)


def test_weights_of_another_problem(seed: int) -> None:
    with pytest.raises(ValueError, match="l1 of shape"):
        run(WIDE, random_inputs(WIDE, 1), random_weights(TINY))


# ---- comparisons


def test_wrong_recipe_fails(seed: int) -> None:
    inputs = random_inputs(WIDE, 64, seed=seed)
    weights = random_weights(WIDE, seed=seed)
    right = run(WIDE, inputs, weights)
    assert reference.compare(right, right)
    for recipe in (POW2, NARROW):
        found = reference.compare(run(WIDE, inputs, weights, recipe), right)
        assert not found
        assert "relative error" in found.reason
        assert found.rel_error > 2 * reference.tolerances(64)[0]
    for tokens in (1, 3):  # the wider bound of few tokens still tells them apart
        few = replace(
            inputs,
            **{n: getattr(inputs, n)[:tokens] for n in ("x", "x_sf", "topk_idx", "topk_weights")},
        )
        assert not reference.compare(run(WIDE, few, weights, POW2), right[:tokens])


def test_reduced_precision_passes(seed: int) -> None:
    """Products off by 2**-13 of their size, as WGMMA's, stay within the bounds."""
    inputs = random_inputs(WIDE, 64, seed=seed)
    weights = random_weights(WIDE, seed=seed)
    right = run(WIDE, inputs, weights)
    generator = torch.Generator().manual_seed(seed)
    plain = reference.scaled_product

    def noisy(*args: torch.Tensor) -> torch.Tensor:
        out = plain(*args)
        noise = 2 * torch.rand(out.shape, generator=generator) - 1
        return out + noise * 2**-13 * out.norm(dim=1, keepdim=True) / out.shape[1] ** 0.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "scaled_product", noisy)
        found = reference.compare(run(WIDE, inputs, weights), right)
        codes = intermediate(inputs, weights)
    assert found, found.reason
    assert found.rel_error > 0
    assert reference.compare_codes(codes, intermediate(inputs, weights))


def intermediate(inputs: Inputs, weights: PlainWeights) -> torch.Tensor:
    pool = reference.dispatch(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights, WIDE)
    return reference.linear1(pool, weights.l1, weights.l1_sf)[0]


def test_compare_reasons() -> None:
    right = torch.ones(20, 8)
    right[3] = 0
    one_bad = right.clone()
    one_bad[7] *= 1.05
    found = reference.compare(one_bad, right)
    assert "token 7" in found.reason
    assert found.worst_token_error == pytest.approx(0.05)
    ghost = right.clone()
    ghost[3, 0] = 1e-6
    assert "token 3 has relative error inf" in reference.compare(ghost, right).reason
    hole = right.clone()
    hole[5, 2] = torch.nan
    found = reference.compare(hole, right)
    assert found.num_nan == 1
    assert "[5, 2]" in found.reason
    assert reference.compare(hole, hole.clone())
    assert not reference.compare(right, hole)
    assert reference.compare(right[:0], right[:0])
    with pytest.raises(ValueError, match="one shape"):
        reference.compare(right[:1], right)


def test_compare_codes_reasons(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = quantize_rows(torch.randn((50, 128), generator=generator))[0]
    raw = codes.view(torch.uint8)

    def changed(where: torch.Tensor, by: int) -> torch.Tensor:
        return torch.where(where, raw - by, raw).view(E4M3)

    large = codes.float().abs() > 32
    few = large & (torch.rand(raw.shape, generator=generator) < 0.01)
    assert few.any()
    assert reference.compare_codes(codes, codes)
    assert reference.compare_codes(changed(few, 1), codes)
    assert "more than one step" in reference.compare_codes(changed(few, 2), codes).reason
    assert "of the codes differ" in reference.compare_codes(changed(large, 1), codes).reason
    nan = torch.where(few, 0x7F, raw).to(torch.uint8).view(E4M3)
    assert not reference.compare_codes(nan, codes)
    assert reference.compare_codes(nan, nan)
    tiny = codes.float().abs() < 0.05
    assert reference.compare_codes(torch.where(tiny, 0, raw).to(torch.uint8).view(E4M3), codes)
