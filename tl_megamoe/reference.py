"""The layer in float32 torch: one function a phase, the whole layer, and comparisons with it.

Every rounding of the kernel is here, in the same order: K blocks of 128 columns multiplied and then
scaled, FP8 intermediate, BF16 rows, float32 sum over slots. What differs is what the hardware does
inside a K block, and the last bits of exp and of reciprocals. NaN stays in its token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe
from .scaling import E4M3, e4m3_scale, e4m3_steps, group_amax, to_e4m3
from .weights import PlainWeights, check_plain_weights

ROWS_AT_ONCE = 4096
"""Rows of one expert that are multiplied at once: bounds float32 temporaries to about 300 MB."""


@dataclass(frozen=True, slots=True)
class ReferencePool:
    """The rows one rank receives, by local expert, then token, then slot; no padding.

    Attributes:
        x: (rows, hidden) e4m3.
        x_sf: (rows, hidden/128) float32.
        topk_weights: (rows,) float32.
        expert: (rows,) int64, local expert.
        token: (rows,) int64.
        slot: (rows,) int64.
        counts: rows of each local expert.
    """

    x: Tensor
    x_sf: Tensor
    topk_weights: Tensor
    expert: Tensor
    token: Tensor
    slot: Tensor
    counts: tuple[int, ...]


def dispatch(
    x: Tensor,
    x_sf: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    problem: Problem,
    rank: int = 0,
) -> ReferencePool:
    """The pool of `rank` from the tokens of one source.

    Args:
        x: (tokens, hidden) e4m3.
        x_sf: (tokens, hidden/128) float32.
        topk_idx: (tokens, topk) int64, global experts; dropped outside 0..num_experts-1.
        topk_weights: (tokens, topk) float32.
        problem: the layer.
        rank: whose experts receive.
    """
    local = problem.num_local_experts
    experts = topk_idx.flatten() - rank * local
    routes = ((experts >= 0) & (experts < local)).nonzero().flatten()
    routes = routes[experts[routes].argsort(stable=True)]
    expert = experts[routes]
    token = routes // problem.num_topk
    return ReferencePool(
        x=_take_rows(x, token),
        x_sf=x_sf[token],
        topk_weights=topk_weights.flatten()[routes],
        expert=expert,
        token=token,
        slot=routes % problem.num_topk,
        counts=tuple(torch.bincount(expert, minlength=local).tolist()),
    )


def linear1(
    pool: ReferencePool,
    w: Tensor,
    w_sf: Tensor,
    recipe: Recipe | None = None,
    clamp: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Gate and up products, SwiGLU, FP8 codes of the intermediate rows.

    Args:
        pool: received rows.
        w: (local experts, 2*intermediate, hidden) e4m3, gate rows, then up rows.
        w_sf: (local experts, 2*intermediate/128, hidden/128) float32.
        recipe: how the intermediate is scaled; `Recipe()` when None.
        clamp: gate is capped at it, up at plus and minus it; not when None.

    Returns:
        Codes (rows, intermediate) e4m3 and stored scales (rows, intermediate/group) float32, which
        hold the routing weight when the recipe folds it.
    """
    recipe = recipe or Recipe()
    group, inter = recipe.intermediate_group, w.shape[1] // 2
    rows = pool.x.shape[0]
    codes = torch.empty((rows, inter), dtype=torch.uint8, device=w.device).view(E4M3)
    sf = torch.empty((rows, inter // group), dtype=torch.float32, device=w.device)
    for expert, part in _expert_parts(pool.counts):
        acc = scaled_product(pool.x[part], pool.x_sf[part], w[expert], w_sf[expert])
        h = swiglu(acc[:, :inter], acc[:, inter:], clamp)
        weight = pool.topk_weights[part, None]
        if not recipe.folds_topk_weight:
            h = h * weight
        scale = e4m3_scale(group_amax(h, group), recipe)
        scaled = h.unflatten(1, (inter // group, group)) * (1.0 / scale).unsqueeze(2)
        codes[part].copy_(to_e4m3(scaled.flatten(1)))
        sf[part] = scale * weight if recipe.folds_topk_weight else scale
    return codes, sf


def swiglu(gate: Tensor, up: Tensor, clamp: float | None = None) -> Tensor:
    """`gate * sigmoid(gate) * up` in float32, multiplied left to right, clamped first if asked."""
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * (1.0 / (1.0 + torch.exp(-gate))) * up


def linear2(
    codes: Tensor, sf: Tensor, w: Tensor, w_sf: Tensor, counts: tuple[int, ...] | list[int]
) -> Tensor:
    """The down product of the intermediate rows, rounded to BF16.

    Args:
        codes: (rows, intermediate) e4m3, from `linear1`.
        sf: (rows, intermediate/group) float32; the group follows from the shape.
        w: (local experts, hidden, intermediate) e4m3.
        w_sf: (local experts, hidden/128, intermediate/128) float32.
        counts: rows of each local expert, in the order of `codes`.

    Returns:
        (rows, hidden) bf16.
    """
    out = torch.empty((codes.shape[0], w.shape[1]), dtype=torch.bfloat16, device=w.device)
    for expert, part in _expert_parts(counts):
        out[part] = scaled_product(codes[part], sf[part], w[expert], w_sf[expert]).bfloat16()
    return out


def combine(rows: Tensor, pool: ReferencePool, num_tokens: int) -> Tensor:
    """Sum each token's rows over its slots in float32, in slot order, rounded once to BF16.

    Args:
        rows: (rows, hidden) bf16, from `linear2`.
        pool: where each row came from.
        num_tokens: rows of the result; a token without rows is 0.
    """
    y = torch.zeros((num_tokens, rows.shape[1]), dtype=torch.float32, device=rows.device)
    num_slots = int(pool.slot.max()) + 1 if len(pool.slot) else 0
    for slot in range(num_slots):
        chosen = (pool.slot == slot).nonzero().flatten()
        # A token has one row a slot, so no index repeats.
        y[pool.token[chosen]] += rows[chosen].float()
    return y.bfloat16()


def moe(
    problem: Problem,
    x: Tensor,
    x_sf: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: PlainWeights,
    recipe: Recipe | None = None,
    clamp: float | None = None,
) -> Tensor:
    """The whole layer for the tokens of one source.

    Args:
        problem: the layer, of any number of ranks.
        x: (tokens, hidden) e4m3.
        x_sf: (tokens, hidden/128) float32.
        topk_idx: (tokens, topk) int64; entries outside 0..num_experts-1 are dropped.
        topk_weights: (tokens, topk) float32.
        weights: those of all `num_experts` experts.
        recipe: as for `linear1`.
        clamp: as for `linear1`.

    Returns:
        (tokens, hidden) bf16.

    Raises:
        ValueError: the weights are not those of the problem.
    """
    whole = replace(problem, num_ranks=1)
    check_plain_weights(weights, whole)
    pool = dispatch(x, x_sf, topk_idx, topk_weights, whole)
    codes, sf = linear1(pool, weights.l1, weights.l1_sf, recipe, clamp)
    rows = linear2(codes, sf, weights.l2, weights.l2_sf, pool.counts)
    return combine(rows, pool, x.shape[0])


def scaled_product(a: Tensor, a_sf: Tensor, w: Tensor, w_sf: Tensor) -> Tensor:
    """`a @ w.T` in float32: each K block multiplied, added as `raw * (row scale * scale of w)`.

    Args:
        a: (rows, K) e4m3.
        a_sf: (rows, K/group) float32; the group, 128 or less, is the width of a K block.
        w: (N, K) e4m3.
        w_sf: (N/128, K/128) float32.

    Returns:
        (rows, N) float32.
    """
    group = a.shape[1] // a_sf.shape[1]
    column_sf = w_sf.repeat_interleave(SCALE_BLOCK, 0)
    acc = torch.zeros((a.shape[0], w.shape[0]), dtype=torch.float32, device=a.device)
    with exact_float32():
        for k in range(a_sf.shape[1]):
            columns = slice(k * group, (k + 1) * group)
            raw = a[:, columns].float() @ w[:, columns].float().T
            scale = a_sf[:, k, None] * column_sf[None, :, k * group // SCALE_BLOCK]
            acc += raw.mul_(scale)
    return acc


@contextmanager
def exact_float32() -> Iterator[None]:
    """Products in full float32 inside, whatever TF32 setting the caller has."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _take_rows(codes: Tensor, index: Tensor) -> Tensor:
    return codes.view(torch.uint8)[index].view(codes.dtype)


def _expert_parts(counts: tuple[int, ...] | list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, rows) in pool order, at most ROWS_AT_ONCE rows each."""
    start = 0
    for expert, count in enumerate(counts):
        for first in range(start, start + count, ROWS_AT_ONCE):
            yield expert, slice(first, min(first + ROWS_AT_ONCE, start + count))
        start += count


# ---- comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of a comparison; true when the result is right.

    Attributes:
        ok: every bound holds.
        rel_error: norm of the difference over the norm of the expected (of codes: the fraction that
            differs).
        worst_token_error: the largest such ratio of one row (of codes: steps apart).
        num_nan: NaNs in the actual result.
        reason: what is wrong, empty when ok.
    """

    ok: bool
    rel_error: float
    worst_token_error: float
    num_nan: int
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def tolerances(num_tokens: int, intermediate: int = 1024) -> tuple[float, float]:
    """Bounds of the whole layer: (relative error, worst token's relative error).

    A K block's products are added with about 14 bits in WGMMA, so gate and up are off by d = 1e-4
    to 3e-4 of their size, and so is their product. The reference quantises that product too, and
    most codes agree. A code flips where a rounding boundary lies within d: e4m3 steps are 1/8 to
    1/16 of a value, 0.09 on average, so d/0.09 = 0.1 to 0.3 % of the codes flip, each by 0.09 of
    its value: 0.09 * sqrt(0.003) = 5e-3 of the row. BF16 rows and sum flip as well, by less (2e-3
    of a value each, few of them). Hence 6e-3 over many tokens. Another recipe has unrelated
    roundings, 0.027 of a value in each of the two: 3.7e-2, far outside.

    Flips are few, so their number and sizes fluctuate. With F = 0.003 * tokens * intermediate of
    them a route, the square of the error is a sum of F * top-k squares whose kurtosis is 44, 62, 97
    at top-2, 3, 6 (sizes of SwiGLU values, their steps and softmax weights, simulated): a standard
    deviation of sqrt(20 / F) of its mean at any top-k. Three of them make a result's bound
    6e-3 * sqrt(1 + 3 * sqrt(20 / F)); it stays below a wrong recipe's 3.7e-2 however few the flips.
    The worst of many tokens is within (1 + 6 / sqrt(F)), F of one token. Below one flip a token
    (intermediate under 334) there is no mean to be near: the worst token has one flip of its
    largest value. That is a step of up to 1/8 of a value which, of a few hundred products of two
    normals, holds up to two thirds of the norm (5.5 to 7 beside sqrt(0.35 * intermediate)): 8e-2.

    Args:
        num_tokens: tokens compared that have a route.
        intermediate: columns of the intermediate.
    """
    flips = 0.003 * intermediate
    result = 6e-3 * (1 + 3 * (20 / (flips * max(num_tokens, 1))) ** 0.5) ** 0.5
    token = 6e-3 * (1 + 6 / flips**0.5)
    return min(result, 3.5e-2), token if flips >= 1 else max(token, 8e-2)


def compare(
    actual: Tensor,
    expected: Tensor,
    *,
    intermediate: int = 1024,
    max_rel_error: float | None = None,
    max_token_error: float | None = None,
) -> Comparison:
    """Compare a result with the reference, row by row.

    NaN and infinities must be at the same places; a row of zeros must be zero.

    Args:
        actual: (tokens, hidden), bf16 or float32.
        expected: the same shape.
        intermediate: columns of the layer's intermediate, for `tolerances`.
        max_rel_error: bound of the relative error; from `tolerances` when None.
        max_token_error: bound for one token; from `tolerances` when None.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(actual, expected)
    rel, token = tolerances(int((expected != 0).any(1).sum()), intermediate)
    rel = rel if max_rel_error is None else max_rel_error
    token = token if max_token_error is None else max_token_error
    a, e = actual.double(), expected.double()
    num_nan = int(a.isnan().sum())
    special = ~e.isfinite()
    same = (a == e) | (a.isnan() & e.isnan())
    strange = (special | ~a.isfinite()) & ~same
    if strange.any():
        row, column = strange.nonzero()[0].tolist()
        return Comparison(
            False,
            float("inf"),
            float("inf"),
            num_nan,
            f"{int(strange.sum())} values are NaN or infinite on one side only, the first at "
            f"[{row}, {column}]: {a[row, column]:g}, expected {e[row, column]:g}",
        )
    difference = torch.where(special, 0.0, a - e)
    size = torch.where(special, 0.0, e)
    rel_error = _ratio(difference.norm(), size.norm())
    row_errors = torch.stack([difference.norm(dim=1), size.norm(dim=1)], 1)
    zero = row_errors[:, 1] == 0
    ratios = torch.where(
        zero,
        torch.where(row_errors[:, 0] == 0, 0.0, torch.inf),
        row_errors[:, 0] / row_errors[:, 1].where(~zero, 1.0),
    )
    worst = float(ratios.max()) if len(ratios) else 0.0
    reasons = []
    if not rel_error <= rel:
        reasons.append(f"relative error {rel_error:.2e} exceeds {rel:.2e}")
    if not worst <= token:
        reasons.append(
            f"token {int(ratios.argmax())} has relative error {worst:.2e}, over {token:.2e}"
        )
    return Comparison(not reasons, rel_error, worst, num_nan, "; ".join(reasons))


def compare_codes(
    actual: Tensor, expected: Tensor, *, max_fraction: float = 0.02, slack: float = 0.5
) -> Comparison:
    """Compare FP8 codes: at most one e4m3 step apart, and few of them.

    Codes run to 448, the group's largest value. Where a code is small beside that, an error that is
    nothing beside the largest spans several steps, so codes closer than `slack` count as equal. An
    up of 4 sigma times a gate that is off by 4 times d = 3e-4 (`tolerances`) is off by 5e-3 sigma^2
    where the largest of 128 products is 6 to 8: 0.3 to 0.4 of 448. The fraction that flips by a
    step is 0.1 to 0.3 %.

    Args:
        actual: e4m3 of any shape.
        expected: e4m3 of the same shape.
        max_fraction: codes that may differ by a step.
        slack: difference in code values that always passes.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(actual, expected)
    steps = e4m3_steps(actual, expected)
    near = (actual.float() - expected.float()).abs() <= slack
    steps = torch.where(near, 0, steps)
    fraction = float((steps > 0).float().mean()) if steps.numel() else 0.0
    worst = int(steps.max()) if steps.numel() else 0
    num_nan = int(actual.float().isnan().sum())
    reasons = []
    if worst > 1:
        at = (steps > 1).nonzero()[0].tolist()
        reasons.append(
            f"{int((steps > 1).sum())} codes are more than one step apart, the first at {at}: "
            f"{float(actual[tuple(at)].float()):g}, expected {float(expected[tuple(at)].float()):g}"
        )
    if not fraction <= max_fraction:
        reasons.append(f"{fraction:.2%} of the codes differ, over {max_fraction:.2%}")
    return Comparison(not reasons, fraction, float(worst), num_nan, "; ".join(reasons))


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    top, bottom = float(numerator), float(denominator)
    if bottom == 0:
        return 0.0 if top == 0 else float("inf")
    return top / bottom


def _check_shapes(actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual of shape {tuple(actual.shape)} and expected of shape "
            f"{tuple(expected.shape)} must have one shape"
        )
