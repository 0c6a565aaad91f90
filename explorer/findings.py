"""What the checks look at on one rank after a launch, and the bounds they hold it to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import E4M3, dequantize
from tl_megamoe.swizzle import unpack_rows

from .layer import Layer
from .places import counters_are_zero, first_places, kernel_places, ring_rows, rows_left

ACCUMULATOR_ERROR = (5e-4, 1e-3)
"""Bounds of linear1's FP32 accumulators: of all rows, of one row. `reference.tolerances` has them
off by 1e-4 to 3e-4 of a row; a K block or a scale that is missing shows as 1e-1."""
ROW_ERROR = (2e-3, 4e-3)
"""Bounds of linear2's rows: one BF16 step (2**-8) in the few values that FP32 accumulation moves
over a rounding boundary."""
SCALE_ERROR = 2e-3
"""Bound of a stored scale: it is off by what the largest of its values is off by."""
FLIPPED_GROUPS = 5e-3
"""Most groups whose power of two may be the next one: their largest value lies within 3e-4 of a
power of two, which for values spread over a binade is 4e-4 of the groups."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found on one rank; `reason` is empty when all is right.

    Attributes:
        size: orders the ranks by their errors.
        error: the same as text.
        reason: what is wrong.
        bounds: of the result and of a token, where they are the rank's own.
    """

    size: float
    error: str
    reason: str = ""
    bounds: tuple[float, float] | None = None


def wrong(reason: str) -> Found:
    """A rank on which something is wrong that has no size."""
    return Found(float("inf"), "-", reason)


def pool_found(layer: Layer, rank: int, block_m: int, *, in_order: bool) -> Found:
    """A rank's receive pool after dispatch, alone or (`in_order`) in the fused kernel."""
    buffer, received = layer.ranks.buffers[rank], layer.received(rank)
    pool = received.pool
    counts = buffer.expert_recv_count_sum.tolist()
    if counts != list(pool.counts):
        expert = next(e for e, n in enumerate(counts) if n != pool.counts[e])
        return wrong(
            f"local expert {expert} received {counts[expert]} rows, expected {pool.counts[expert]}"
        )
    places = kernel_places(buffer, counts, block_m)
    left = rows_left(buffer, places, counts, block_m, in_order=in_order)
    rows = ring_rows(buffer, places[left], block_m)
    return bitwise_found(
        {
            "token_src_metadata": (
                buffer.token_src_metadata[places],
                received.metadata(buffer.capacity).int(),
            ),
            "l1_topk_weights": (buffer.l1_topk_weights[places], pool.topk_weights),
            "l1_acts": (buffer.l1_acts.view(torch.uint8)[rows], pool.x.view(torch.uint8)[left]),
            "l1_acts_sf": (buffer.l1_acts_sf[:, rows].T.contiguous(), pool.x_sf[left]),
        },
        buffer,
    )


def intermediate_found(
    layer: Layer, rank: int, block_m: int, places: Tensor, recipe: Recipe | None = None
) -> Found:
    """A rank's intermediate pool after linear1, where the ring holds all of it.

    Args:
        layer: with the inputs of the launch.
        rank: whose pool.
        block_m: rows of a pool block.
        places: pool rows of the received rows.
        recipe: of the reference; that of the buffers when None.
    """
    recipe = recipe or layer.recipe
    buffer = layer.ranks.buffers[rank]
    rows = ring_rows(buffer, places, block_m)
    codes = unpack_rows(buffer.l2_acts.view(torch.uint8))[rows].view(E4M3)
    sf = _per_64_columns(buffer.l2_acts_sf[:, rows].T, layer.recipe)
    want_codes, want_sf = layer.intermediate_of(layer.received(rank), recipe)
    want_sf = _per_64_columns(want_sf, recipe)
    flipped = torch.zeros_like(want_sf, dtype=torch.bool)
    if recipe.scale == "pow2":
        flipped = (sf == 2 * want_sf) | (2 * sf == want_sf)
        if flipped.sum() > max(2, FLIPPED_GROUPS * flipped.numel()):
            part = float(flipped.float().mean())
            return wrong(f"{part:.2%} of the powers of two are the next one")
        got, want = dequantize(codes, sf), dequantize(want_codes, want_sf)
        step = want.abs() / 8 + torch.maximum(sf, want_sf).abs().repeat_interleave(64, 1)
        far = (got - want).abs() > step
        far &= flipped.repeat_interleave(64, 1)
        if far.any():
            return wrong(f"{int(far.sum())} values with the next power of two are far off")
    limit = SCALE_ERROR * want_sf.abs() * (recipe.scale == "exact")
    off = ~((sf - want_sf).abs() <= limit) & ~(sf.isnan() & want_sf.isnan()) & ~flipped
    off &= ~(sf == want_sf)  # infinities
    if off.any():
        row, group = off.nonzero()[0].tolist()
        return wrong(
            f"{int(off.sum())} scales are off, the first of received row {row}, columns from "
            f"{64 * group}: {float(sf[row, group]):g}, expected {float(want_sf[row, group]):g}"
        )
    keep = ~flipped.repeat_interleave(64, 1)
    kept = [c.view(torch.uint8)[keep].view(E4M3) for c in (codes, want_codes)]
    same = reference.compare_codes(*kept)
    error = f"{same.worst_token_error:.0f} step, {same.rel_error:.2%}"
    reason = same.reason or _counters_reason(buffer)
    return Found(same.worst_token_error + same.rel_error, error, reason)


def accumulators_found(layer: Layer, rank: int, block_m: int, accumulators: Tensor) -> Found:
    """A rank's (ring rows, 2*intermediate) float32 accumulators of linear1."""
    pool, plain = layer.received(rank).pool, layer.plain_of(rank)
    buffer = layer.ranks.buffers[rank]
    places = first_places(pool.counts, block_m, buffer.device)
    got = accumulators[ring_rows(buffer, places, block_m)]
    want = torch.empty_like(got)
    start = 0
    for expert, count in enumerate(pool.counts):
        part = slice(start, start + count)
        want[part] = reference.scaled_product(
            pool.x[part], pool.x_sf[part], plain.l1[expert], plain.l1_sf[expert]
        )
        start += count
    rel, row = ACCUMULATOR_ERROR
    same = reference.compare(got, want, max_rel_error=rel, max_token_error=row)
    error = f"{same.rel_error:.1e}, token {same.worst_token_error:.1e}"
    return Found(same.rel_error, error, same.reason or _counters_reason(buffer))


def scattered_found(layer: Layer, rank: int) -> Found:
    """The rows that came back to a rank's tokens after linear2."""
    pool, buffer = layer.routes(rank), layer.ranks.buffers[rank]
    rel, row = ROW_ERROR
    same = reference.compare(
        buffer.combine_acts[pool.slot, pool.token],
        layer.rows(rank),
        max_rel_error=rel,
        max_token_error=row,
    )
    error = f"{same.rel_error:.1e}, token {same.worst_token_error:.1e}"
    reason = same.reason or _counters_reason(buffer)
    untouched = torch.ones(buffer.combine_acts.shape[:2], dtype=torch.bool, device=buffer.device)
    untouched[pool.slot, pool.token] = False
    if not reason and not buffer.combine_acts[untouched].isnan().all():
        reason = "rows of combine_acts without a route were written"
    return Found(same.rel_error, error, reason)


def layer_found(layer: Layer, rank: int, y: Tensor, expected: Tensor) -> Found:
    """A rank's `y` after a launch of the fused kernel, and its counters."""
    tokens = int((expected != 0).any(1).sum())  # those with a route
    bounds = reference.tolerances(tokens, layer.problem.intermediate)
    same = reference.compare(y, expected, max_rel_error=bounds[0], max_token_error=bounds[1])
    error = f"{same.rel_error:.1e}, token {same.worst_token_error:.1e}"
    reason = same.reason or _counters_reason(layer.ranks.buffers[rank])
    return Found(same.rel_error, error, reason, bounds)


def bitwise_found(
    pairs: Mapping[str, tuple[Tensor, Tensor]], buffer: SymmBuffer | None = None
) -> Found:
    """Named (actual, expected) tensors that must be equal to the bit; counters too if asked."""
    for name, (actual, expected) in pairs.items():
        if actual.shape != expected.shape:
            return wrong(f"{name} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
        differing = _bits(actual) != _bits(expected)
        if differing.any():
            at = differing.nonzero()[0].tolist()
            return wrong(f"{int(differing.sum())} elements of {name} differ, the first at {at}")
    return Found(0.0, "bitwise", "" if buffer is None else _counters_reason(buffer))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaNs and zeros' signs included."""
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])


def _counters_reason(buffer: SymmBuffer) -> str:
    return "" if counters_are_zero(buffer) else "counters are not zero after the launch"


def _per_64_columns(sf: Tensor, recipe: Recipe) -> Tensor:
    """(rows, intermediate/64) scales, whatever the group of the recipe."""
    return sf.repeat_interleave(recipe.intermediate_group // 64, 1)
