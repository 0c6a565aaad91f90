"""Tier 4, edge cases: strange values and routings, recipes, rings that wrap, refused arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_cases import (
    CLAMP_CASES,
    EXACT_MATH,
    MODES,
    ON_RANKS,
    RANKS_CAPACITY,
    RECIPE_SPLITS,
    SMALL,
    SMALL_CAPACITY,
    WRAPS_RECIPE,
    duplicates_on,
    each_rank_count,
    fit,
    of_mode,
    rank_mode,
    rank_schedules,
    real_ranks,
    ring_blocks,
    schedules,
    variants,
)
from gpu_world import walks, world

from tl_megamoe import fp8_mega_moe, reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.explorer.findings import intermediate_found
from tl_megamoe.explorer.places import kernel_places, num_blocks
from tl_megamoe.op import prepare
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import ScheduleError

pytestmark = pytest.mark.sm90

modes = pytest.mark.parametrize("mode", MODES)  # on top, so that it varies fastest
each_number = pytest.mark.parametrize("num_ranks", each_rank_count())


# ---- values


@modes
def test_weights_of_zero_and_below(mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(300, shared_seed)
    weights = w.inputs[0].topk_weights.clone()
    weights[::3] = 0.0
    weights[1::3] *= -1.0
    w.change(topk_weights=weights)
    w.check(of_mode(variants(SMALL), mode))


@modes
@pytest.mark.parametrize("tokens", [130, 300])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_in_their_token(
    bad: float, tokens: int, mode: str, shared_seed: int
) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, shared_seed)
    chosen = of_mode(variants(SMALL), mode)
    clean = w.run(next(iter(chosen.values())))
    x_sf = w.inputs[0].x_sf.clone()
    x_sf[7, 1] = bad
    w.change(x_sf=x_sf)
    for schedule in chosen.values():
        y = w.run(schedule)
        assert not y[7].isfinite().any()
        y[7] = clean[7]
        assert torch.equal(y, clean)


@modes
def test_a_nan_code_stays_in_its_token(mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(130, shared_seed)
    chosen = of_mode(variants(SMALL), mode)
    clean = w.run(next(iter(chosen.values())))
    x = w.inputs[0].x.clone()
    x.view(torch.uint8)[129, 300] = 0x7F
    w.change(x=x)
    for schedule in chosen.values():
        y = w.run(schedule)
        assert y[129].isnan().all()
        y[129] = clean[129]
        assert torch.equal(y, clean)


@modes
@each_number
def test_nan_stays_in_its_token_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(70, shared_seed)
    schedule = next(iter(of_mode(rank_schedules(w.problem), mode).values()))
    clean = w.launch(schedule)
    x_sf = w.inputs[1].x_sf.clone()
    x_sf[69, 0] = torch.nan
    w.change(1, x_sf=x_sf)
    y = w.launch(schedule)
    reasons = dict.fromkeys(w.ranks.here, "")
    for rank in w.ranks.here:
        if rank == 1:
            reasons[rank] = "" if y[1][69].isnan().all() else "the NaN is lost"
            y[1][69] = clean[1][69]
        if not torch.equal(y[rank], clean[rank]):
            reasons[rank] = "another token changed"
    w.agree(reasons)


@modes
@pytest.mark.parametrize("tokens", [130, 300])
def test_experts_out_of_range_are_dropped(tokens: int, mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, shared_seed)
    topk_idx = w.inputs[0].topk_idx.clone()
    topk_idx[::5, 0] = SMALL.num_experts
    topk_idx[1::5, 1] = -7
    topk_idx[2::5, 0] = 2**32 + 3  # expert 3 if it were cut to 32 bits
    w.change(topk_idx=topk_idx)
    w.check(of_mode(variants(SMALL), mode))
    assert w.ranks.first.expert_recv_count_sum.tolist() == list(w.counts(0))


@pytest.mark.parametrize(("name", "fast_math"), CLAMP_CASES)
def test_clamp(name: str, fast_math: bool, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(400, seed)
    schedule = variants(SMALL)[name]
    w.check({name: schedule}, clamp=0.5, fast_math=fast_math)
    y = w.run(schedule, clamp=0.5, fast_math=fast_math)
    assert not reference.compare(y, w.expected(0), intermediate=SMALL.intermediate)


def test_exact_math(seed: int) -> None:
    """Without fast_math the three modes agree to the bit with each other as well."""
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(400, seed)
    w.check({name: variants(SMALL)[name] for name in EXACT_MATH}, fast_math=False)


# ---- recipes


@modes
@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_recipes(recipe: Recipe, mode: str, shared_seed: int) -> None:
    """A kernel passes against the reference of its recipe and fails against those of the others.

    Power-of-two scales of 64 and of 128 columns give the same values wherever neither saturates, so
    there the scales tell, not the result.
    """
    w = world(SMALL, SMALL_CAPACITY, recipe)
    w.fill(600, shared_seed)
    for name, schedule in of_mode(schedules(SMALL, RECIPE_SPLITS, recipe), mode).items():
        w.check({name: schedule}, pools=True)
        places = kernel_places(w.ranks.first, w.counts(0), schedule.block_m)
        for other in ALL_RECIPES:
            found = intermediate_found(w, 0, schedule.block_m, places, other)
            assert bool(found.reason) == (other != recipe), f"{name} as {other}: {found}"
            if other != recipe and not recipe.scale == other.scale == "pow2":
                assert w.wrong_for(other, {0: w.y}), f"{name} passes as {other}"


@modes
@pytest.mark.parametrize("num_ranks", each_rank_count((4,)))
def test_a_recipe_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY, WRAPS_RECIPE)
    w.fill([(300, 0, 65, 1)[r % 4] for r in range(num_ranks)], shared_seed, "zipf:0.8")
    chosen = schedules(w.problem, ("pingpong", "swapped", "wide128"), WRAPS_RECIPE)
    w.check(of_mode(chosen, mode), pools=True)
    reasons = dict.fromkeys(w.ranks.here, "")
    for rank in w.ranks.here:
        # One token or none may be right by chance.
        if w.num_tokens[rank] > 1 and not w.wrong_for(Recipe(), {rank: w._first[None, True][rank]}):
            reasons[rank] = f"passes as {Recipe()}"
    w.agree(reasons)


# ---- rings, routings


@modes
@pytest.mark.parametrize("tokens", [(1024,), (1024, 1000, 0, 3)], ids=["full", "uneven"])
@each_number
def test_rings_that_wrap(
    num_ranks: int, tokens: tuple[int, ...], mode: str, shared_seed: int
) -> None:
    """All routes of all ranks on one expert: several times round the ring, in every order."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([tokens[r % len(tokens)] for r in range(num_ranks)], shared_seed, "hot1")
    most = max((w.counts(rank) for rank in range(num_ranks)), key=sum)
    for name, schedule in of_mode(rank_schedules(w.problem), mode).items():
        blocks = num_blocks(most, schedule.block_m)
        assert blocks > 2 * ring_blocks(w.problem, schedule.block_m)
        w.check({f"{name} {k}": s for k, s in walks(schedule, w.problem).items()}, pools=True)


@modes
@each_number
def test_a_ring_filled_to_the_last_block(num_ranks: int, mode: str, shared_seed: int) -> None:
    """As many blocks as the ring has, then one more."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    for schedule in of_mode(rank_schedules(w.problem), mode).values():
        ring = ring_blocks(w.problem, schedule.block_m)
        for blocks in (ring, ring + 1):
            left, tokens = blocks * schedule.block_m // w.problem.num_topk, []
            for _ in range(num_ranks):
                tokens.append(min(left, RANKS_CAPACITY))
                left -= tokens[-1]
            w.fill(tokens, shared_seed, "hot1")
            most = max((w.counts(rank) for rank in range(num_ranks)), key=sum)
            assert num_blocks(most, schedule.block_m) == blocks
            w.check({"": schedule}, pools=True)


@modes
@pytest.mark.parametrize("tokens", [1, 65, 1024])
@pytest.mark.parametrize("num_ranks", each_rank_count((2,)))
def test_an_expert_several_times_in_a_token_on_ranks(
    num_ranks: int, tokens: int, mode: str, shared_seed: int
) -> None:
    w = world(duplicates_on(num_ranks), RANKS_CAPACITY)
    w.fill([(tokens, tokens // 2)[r % 2] for r in range(num_ranks)], shared_seed)
    w.check(of_mode(schedules(w.problem, ("pingpong", "swapped", "wide128")), mode), pools=True)


@modes
@each_number
def test_masks_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    for mask in (0.3, 0.9, 1.0):
        w.fill([(99, 64, 1)[r % 3] for r in range(num_ranks)], shared_seed, mask=mask)
        w.check(of_mode(rank_schedules(w.problem), mode), launches=1)


# ---- what is refused, what is in the way


def test_refused_arguments(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(10, seed)
    y = torch.empty((10, SMALL.hidden), dtype=torch.bfloat16, device="cuda")
    weights, b, i = w.weights[0], w.ranks.first, w.inputs[0]
    too_large = replace(variants(SMALL)["wide128"], num_sms=1000)
    with pytest.raises(ScheduleError, match="num_sms=1000 exceeds the"):
        fp8_mega_moe(y, weights.l1, weights.l2, b, schedule=too_large)
    long = torch.empty((SMALL_CAPACITY + 1, SMALL.hidden), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="y has 1025 tokens, more than capacity=1024"):
        fp8_mega_moe(long, weights.l1, weights.l2, b)
    rows = [t.repeat(103, 1) for t in (i.x.view(torch.uint8), i.x_sf, i.topk_idx, i.topk_weights)]
    with pytest.raises(ValueError, match="x has 1030 tokens, more than capacity=1024"):
        b.fill(rows[0].view(i.x.dtype), *rows[1:])
    w1, sf = weights.l1
    with pytest.raises(ValueError, match="must be contiguous"):
        fp8_mega_moe(y, (w1, sf.transpose(1, 2).contiguous().transpose(1, 2)), weights.l2, b)


def test_a_grid_beyond_a_virtual_rank_is_refused() -> None:
    w = world(ON_RANKS[2], RANKS_CAPACITY)
    with pytest.raises(ScheduleError, match="num_sms=132 exceeds the 66 SMs that a virtual rank"):
        prepare(w.ranks.first, 10, schedule=fit(w.problem, num_sms=132))


@modes
@pytest.mark.parametrize("num_ranks", [1, *each_rank_count((2,))])
def test_another_stream_holds_sms(num_ranks: int, mode: str, shared_seed: int) -> None:
    """Blocks wait until the other kernel has left; nobody waits for a block that cannot start."""
    problem = SMALL if num_ranks == 1 else ON_RANKS[num_ranks]
    w = world(problem, SMALL_CAPACITY)
    w.fill(257, shared_seed)
    chosen = of_mode(schedules(problem, RECIPE_SPLITS), mode)
    w.check(chosen)
    a = torch.randn((8192, 8192), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            a = torch.mm(a, a).sin_()
    w.check(chosen)
    torch.cuda.current_stream().wait_stream(side)


if real_ranks():

    @pytest.mark.multi_gpu(real_ranks())
    def test_ranks_that_differ_are_told_at_rendezvous() -> None:
        w = world(ON_RANKS[real_ranks()], RANKS_CAPACITY)
        rank = w.ranks.here[0]
        for differing, capacity, recipe in (
            ("capacity", 64 + rank, Recipe()),
            ("recipe", 64, ALL_RECIPES[rank % 2]),
        ):
            with pytest.raises(ValueError, match=f"{differing} differs"):
                SymmBuffer.from_process_group(w.problem, capacity, recipe=recipe)


def test_rank_modes() -> None:
    assert rank_mode(SMALL) == "one"
    assert rank_mode(ON_RANKS[2]) == ("real" if real_ranks() else "virtual")
