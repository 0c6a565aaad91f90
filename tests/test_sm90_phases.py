"""Each stand-alone phase against its reference, on the GPU, one after the other on one buffer."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    ONE_RANK,
    PHASE_VARIANTS,
    PRESET_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    fit,
    variants,
)
from gpu_world import World, world

from tl_megamoe import reference
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule

pytestmark = pytest.mark.sm90

FLASH = ONE_RANK["deepseek-v4-flash"]
CASES = [
    pytest.param(SMALL, SMALL_CAPACITY, variants(SMALL)[name], tokens, routing, mask, id=case)
    for name in PHASE_VARIANTS
    for case, tokens, routing, mask in (
        (f"{name}-1", 1, "uniform", 0.0),
        (f"{name}-129-masked", 129, "uniform", 0.3),
        (f"{name}-1024-zipf", 1024, "zipf:1.2", 0.0),
        (f"{name}-500-hot1", 500, "hot1", 0.0),
    )
] + [
    pytest.param(FLASH, PRESET_CAPACITY, fit(FLASH), tokens, "uniform", 0.0, id=f"flash-{tokens}")
    for tokens in (64, 4096)
]
each_case = pytest.mark.parametrize(
    ("problem", "capacity", "schedule", "tokens", "routing", "mask"), CASES
)


def start(
    problem: Problem, capacity: int, tokens: int, routing: str, mask: float, seed: int
) -> World:
    w = world(problem, capacity)
    w.fill(tokens, seed, routing, mask)
    return w


@each_case
def test_phases_match_their_references(
    problem: Problem,
    capacity: int,
    schedule: Schedule,
    tokens: int,
    routing: str,
    mask: float,
    seed: int,
) -> None:
    w = start(problem, capacity, tokens, routing, mask, seed)
    b = w.buffer

    # dispatch: bitwise
    w.launch(schedule, "dispatch")
    pool = w.pool()
    assert b.expert_recv_count_sum.tolist() == list(pool.counts)
    rows = w.pool_rows(schedule)
    assert torch.equal(b.l1_acts.view(torch.uint8)[rows], pool.x.view(torch.uint8))
    assert torch.equal(b.l1_acts_sf[:, rows].T, pool.x_sf)
    assert torch.equal(b.l1_topk_weights[rows], pool.topk_weights)
    assert w.counters_are_zero()

    # linear1: codes within one step; a scale is off by what its largest value is off by
    w.launch(schedule, "linear1")
    codes, sf = reference.linear1(pool, w.plain.l1, w.plain.l1_sf)
    got_codes = b.l2_acts.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    got_sf = b.l2_acts_sf[:, rows].T.contiguous()
    same = reference.compare_codes(got_codes, codes)
    assert same, same.reason
    torch.testing.assert_close(got_sf, sf, rtol=2e-3, atol=0.0)
    assert w.counters_are_zero()

    # linear2: from the codes the kernel wrote, so that only its own rounding differs
    w.launch(schedule, "linear2")
    expected = reference.linear2(got_codes, got_sf, w.plain.l2, w.plain.l2_sf, pool.counts)
    got = b.combine_acts[pool.slot, pool.token]
    # One bf16 step (2**-8) in the few values that FP32 accumulation moves over a boundary.
    same = reference.compare(got, expected, max_rel_error=2e-3, max_token_error=4e-3)
    assert same, same.reason
    untouched = torch.ones(b.combine_acts.shape[:2], dtype=torch.bool, device="cuda")
    untouched[pool.slot, pool.token] = False
    assert b.combine_acts[untouched].isnan().all()

    # combine: bitwise
    y = w.launch(schedule, "combine")
    assert torch.equal(y, reference.combine(got, pool, tokens))


def test_wrong_recipe_fails(seed: int) -> None:
    """Power-of-two scales are told from exact ones by the bounds of the fused test."""
    from tl_megamoe.recipe import Recipe

    w = start(SMALL, SMALL_CAPACITY, 512, "uniform", 0.0, seed)
    y = w.launch(variants(SMALL)["wide128"])
    assert reference.compare(y, w.expected(), intermediate=SMALL.intermediate)
    other = w.expected(recipe=Recipe(scale="pow2"))
    assert not reference.compare(y, other, intermediate=SMALL.intermediate)
