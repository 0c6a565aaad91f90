"""What a fuzzed launch gets, and what it must give: inputs, the layer in float32, bounds.

The layer is computed for the tokens of all ranks at once, experts with about as many rows together,
and nothing waits for the GPU: thousands of small layers a minute. Its scales are applied before the
products, `reference.moe` applies them after: a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from fuzz_cases import Case
from fuzz_routes import Groups, Routes
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import E4M3_MAX, MIN_AMAX, dequantize, e4m3_scale, group_amax, to_e4m3
from tl_megamoe.synthetic import Inputs, random_inputs
from tl_megamoe.weights import PlainWeights

GATE_ERROR = 2e-3
"""Of gate and up, as a part of their root mean square: seven times `reference.tolerances`' d."""
SILU_LEAST = -1.2785
"""Where `x * sigmoid(x)` is least: beside a small clamp, far larger than what the clamp leaves."""
SLACK = 1.3
"""Times the bounds of `reference.tolerances`, where they are exceeded."""
SMALLEST_STEP = 2.0**-9
"""Between the smallest e4m3 values."""
NO_EXPERT = (-1, -(2**31), 2**31, 2**40, -(2**63))
"""Experts of dropped routes, and the number of experts: a cut to 32 bits would make some of them
experts."""


# ---- inputs


def make_inputs(case: Case, device: torch.device | str = "cpu") -> list[Inputs]:
    """The tokens of every rank."""
    whole = replace(case.problem, num_ranks=1)
    every = random_inputs(whole, sum(case.tokens), case.routing, case.mask, case.seed, device)
    generator = torch.Generator(every.x.device).manual_seed(case.seed)
    weights = route_weights(case, every.topk_weights, generator)
    outside = torch.tensor((*NO_EXPERT, case.num_experts), device=every.x.device)
    which = torch.randint(
        len(outside), every.topk_idx.shape, generator=generator, device=every.x.device
    )
    idx = torch.where(every.topk_idx < 0, outside[which], every.topk_idx)
    tensors = (every.x, every.x_sf * case.x_scale, idx, weights)
    parts = zip(*(t.split(case.tokens) for t in tensors), strict=True)
    return [Inputs(*(t.contiguous() for t in part)) for part in parts]


def route_weights(case: Case, softmax: Tensor, generator: torch.Generator) -> Tensor:
    """Routing weights of the case's law, from those of a softmax."""
    draw = torch.rand(softmax.shape, generator=generator, device=softmax.device)
    return {
        "softmax": softmax,
        "zero": softmax * 0.0,
        "some-zero": softmax * (draw < 0.5),
        "negative": -softmax,
        "signed": torch.where(draw < 0.5, softmax, -softmax),
        "wide": torch.pow(10.0, 9 * draw - 6),
    }[case.weights]


def joined(inputs: list[Inputs]) -> Inputs:
    """The tokens of all ranks, one after the other."""

    def cat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors])

    x = cat([i.x for i in inputs]).view(inputs[0].x.dtype)
    rest = ([getattr(i, n) for i in inputs] for n in ("x_sf", "topk_idx", "topk_weights"))
    return Inputs(x, *map(cat, rest))


# ---- the layer


def products(a: Tensor, w: Tensor, w_sf: Tensor, groups: Groups) -> Tensor:
    """`a @ w.T` of every row with the weights of its expert, in float32.

    Args:
        a: (rows, K) float32, by expert.
        w: (experts, N, K) e4m3.
        w_sf: (experts, N/128, K/128) float32.
        groups: of `Routes`.

    Returns:
        (rows, N) float32.
    """
    rows, columns = len(a), w.shape[1]
    out = a.new_empty((rows + 1, columns))  # the last row is what fills groups up, and is dropped
    a = torch.cat([a, a.new_zeros((1, a.shape[1]))])
    with reference.exact_float32():
        for experts, index in groups:
            codes = w.view(torch.uint8)[experts].view(w.dtype).float()
            tiles = codes.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
            tiles *= w_sf[experts][:, :, None, :, None]
            out[index] = torch.bmm(a[index], codes.transpose(1, 2))
    return out[:-1]


@dataclass(frozen=True, slots=True)
class Truth:
    """A layer in float32, and what the bounds of its result depend on.

    Attributes:
        y: (tokens, hidden) bf16.
        rows: (routes, hidden) bf16, from linear2.
        gate_up: (routes, 2*intermediate) float32, from linear1.
        h: (routes, intermediate) float32, which is quantised.
        weight: (routes,) float32.
        routes: their places.
    """

    y: Tensor
    rows: Tensor
    gate_up: Tensor
    h: Tensor
    weight: Tensor
    routes: Routes


def make_truth(
    inputs: Inputs,
    routes: Routes,
    plain: PlainWeights,
    recipe: Recipe,
    clamp: float | None = None,
) -> Truth:
    """The layer.

    Args:
        inputs: tokens of all ranks.
        routes: theirs.
        plain: weights of all experts.
        recipe, clamp: as for `reference.moe`.
    """
    token, slot = routes.token, routes.slot
    x = dequantize(inputs.x.view(torch.uint8)[token].view(inputs.x.dtype), inputs.x_sf[token])
    weight = inputs.topk_weights[token, slot]
    gate_up = products(x, plain.l1, plain.l1_sf, routes.groups)
    h = reference.swiglu(*gate_up.chunk(2, dim=1), clamp)
    if not recipe.folds_topk_weight:
        h = h * weight[:, None]
    group = recipe.intermediate_group
    scale = e4m3_scale(group_amax(h, group), recipe)
    codes = to_e4m3((h.unflatten(1, (-1, group)) * (1.0 / scale).unsqueeze(2)).flatten(1))
    read = dequantize(codes, scale * weight[:, None] if recipe.folds_topk_weight else scale)
    rows = products(read, plain.l2, plain.l2_sf, routes.groups).bfloat16()
    y = combine(rows, routes)
    return Truth(y, rows, gate_up, h, weight, routes)


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """Sums over slots, one after the other in float32; (tokens, hidden) bf16."""
    rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
    y = torch.zeros((len(routes.where), rows.shape[1]), device=rows.device)
    for slot in range(routes.where.shape[1]):
        y += rows[routes.where[:, slot]].float()
    return y.bfloat16()


# ---- bounds


def is_close(y: Tensor, truth: Truth, intermediate: int) -> Tensor:
    """Whether `y` is within `reference.tolerances`, as a tensor: nothing waits for the GPU.

    Args:
        y: (tokens, hidden) bf16.
        truth: of the same tokens.
        intermediate: columns.
    """
    share, worst = reference.tolerances(truth.routes.num_routed, intermediate)
    want = truth.y.double()
    error, size = (y.double() - want).norm(dim=1), want.norm(dim=1)
    return (error <= worst * size).all() & (error.norm() <= share * size.norm())


def judge(case: Case, y: Tensor, truth: Truth) -> str:
    """Why `y` is not what the reference gives, where `is_close` alone refuses it.

    Its bounds are shares of `y`, too strict here for four reasons. Rows with weights of both signs
    cancel: the bound is a share of the rows' own sizes, added up where they are of one token and
    expert, since those rows and their errors are the same but for their weights. Below MIN_AMAX a
    scale stays, so that a code which flips is worth a step of it, however small the row: such steps
    in all columns come on top. Where gates are large beside a clamp, a small error of one moves a
    value from nothing to all: so does `sway`. Few groups have a power of two each, and one that is
    the next one moves a row by another rounding of it.

    Of a few hundred columns a token has one code or two that flip, so no multiple of their mean
    bounds the worst of many thousand tokens: a token may be off by all of its own codes that are
    near enough to a boundary (`flips`).

    Args:
        case: whose result it is.
        y: (tokens, hidden) bf16.
        truth: of all its tokens.
    """
    if not y.isfinite().all():
        return f"{int((~y.isfinite()).sum())} values of y are NaN or infinite"
    tokens, recipe = len(y), case.numeric
    rows, weight = truth.rows.double(), truth.weight.double().abs()
    pow2 = recipe.scale == "pow2"
    step = MIN_AMAX / E4M3_MAX * SMALLEST_STEP * (2 if pow2 else 1)
    steps = step * (torch.ones_like(weight) if pow2 else weight)

    def alone(sizes: Tensor) -> Tensor:
        zeros = torch.zeros(tokens, dtype=torch.float64, device=y.device)
        return zeros.index_add_(0, truth.routes.token, sizes.square()).sqrt()

    def together(sizes: Tensor) -> Tensor:
        zeros = torch.zeros(tokens * case.num_experts, dtype=torch.float64, device=y.device)
        same = truth.routes.token * case.num_experts + truth.routes.expert
        sums = zeros.index_add_(0, same, sizes * truth.weight.sign())
        return sums.view(tokens, case.num_experts).norm(dim=1)

    # Where the weight is in the intermediate, rows of one token and expert have codes of their own.
    by_token = together if recipe.folds_topk_weight else alone
    error = (y.double() - truth.y.double()).norm(dim=1)
    # Each row is rounded to BF16: a quarter of its bound is several times that.
    size = torch.maximum(by_token(rows.norm(dim=1)), alone(rows.norm(dim=1)) / 4)
    # A row is its intermediate times a standard normal and scales below 1.5 / sqrt(columns).
    spread = 1.5 * case.w_scale * case.hidden**0.5
    part = weight / case.intermediate**0.5
    extra = spread * torch.hypot(together(sway(case, truth.gate_up) * part), alone(2 * steps))
    one = spread * by_token(flips(case, truth) / case.intermediate**0.5)
    # Tokens that the sum over all hangs on; one, where one weight is far larger than the others.
    squares = size.square()
    filled = max(1, int(squares.sum() ** 2 / squares.square().sum().clamp(min=1e-300)))
    # Gates of large scales are all or nothing: half the values count. The bounds are three standard
    # deviations, which one case in many hundreds exceeds: here five.
    share, worst = reference.tolerances(filled, max(case.intermediate // 2, 64))
    share, worst = min(SLACK * share, 3.5e-2), SLACK * worst  # below what another recipe gives
    num_groups = filled * case.num_topk * case.intermediate / recipe.intermediate_group
    if pow2 and num_groups < 2500:
        share, worst = max(share, 4.5e-2), max(worst, 8e-2)
    bound = torch.maximum(worst * size, one) + extra
    if (excess := error - bound).max() > 0:
        t = int(excess.argmax())
        rank = [t < end for end in ends(case.tokens)].index(True)
        return (
            f"rank {rank}, token {t - sum(case.tokens[:rank])} of {case.tokens[rank]} is off by "
            f"{float(error[t]):.2e}, over {float(bound[t]):.2e}"
        )
    total, most = float(error.norm()), share * float(size.norm()) + float(extra.norm())
    return "" if total <= most else f"y is off by {total:.2e}, over {most:.2e}"


def ends(counts: tuple[int, ...]) -> list[int]:
    """Where the tokens of every rank end among those of all."""
    return [sum(counts[: rank + 1]) for rank in range(len(counts))]


def sway(case: Case, gate_up: Tensor) -> Tensor:
    """(rows,) float64: how far WGMMA's errors may move each row of the intermediate, as a norm."""
    return moved(gate_up, case.clamp, GATE_ERROR).double().norm(dim=1)


def flips(case: Case, truth: Truth) -> Tensor:
    """(rows,) float64: how far the codes move that WGMMA's errors may flip, as a norm; with the
    routing weight, which is in the intermediate or in its scale."""
    recipe, group = case.numeric, case.numeric.intermediate_group
    off = moved(truth.gate_up, case.clamp, GATE_ERROR)
    if not recipe.folds_topk_weight:
        off = off * truth.weight[:, None].abs()
    scale = e4m3_scale(group_amax(truth.h, group), recipe).repeat_interleave(group, 1)
    low, high = (to_e4m3((truth.h + side * off) / scale).float() for side in (-1, 1))
    step = ((high - low) * scale).double().norm(dim=1)
    return step * truth.weight.double().abs() if recipe.folds_topk_weight else step


def moved(gate_up: Tensor, clamp: float | None, error: float) -> Tensor:
    """(rows, intermediate) float32: how far SwiGLU moves when gate and up are off.

    Args:
        gate_up: (rows, 2*intermediate) float32.
        clamp: of the activation.
        error: of gate and up, as a part of the root mean square of their row.
    """
    off = error * gate_up.square().mean(1, keepdim=True).sqrt()
    gate, up = gate_up.chunk(2, dim=1)
    h = reference.swiglu(gate, up, clamp)
    least = torch.full_like(gate, SILU_LEAST).clamp(gate - off, gate + off)
    out = torch.zeros_like(h)
    for g in (gate - off, gate + off, least):
        for u in (up - off, up + off):
            out = torch.maximum(out, (reference.swiglu(g, u, clamp) - h).abs())
    return out
