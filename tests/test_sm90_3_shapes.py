"""Tier 3, shapes: published models, token counts, expert counts, routings, ranks, walks."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    EXPERTS,
    FLASH,
    HUGE,
    HUGE_CAPACITY,
    MANY_ROUTES,
    MANY_ROUTES_CAPACITY,
    MODES,
    ODD,
    ON_RANKS,
    ONE_RANK,
    PRESET_CAPACITY,
    RANKS_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    SMALL_TOKENS,
    TOKENS,
    each_rank_count,
    edge_cases,
    edge_schedules,
    fit,
    many_routes_schedules,
    of_mode,
    preset_schedules,
    rank_schedules,
    schedules,
    variants,
)
from gpu_world import walks, world

from tl_megamoe import reference
from tl_megamoe.problem import Problem

pytestmark = pytest.mark.sm90

modes = pytest.mark.parametrize("mode", MODES)  # on top, so that it varies fastest
each_number = pytest.mark.parametrize("num_ranks", each_rank_count())


@modes
@pytest.mark.parametrize("mask", [0.0, 0.3])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", list(ONE_RANK))
def test_presets(name: str, tokens: int, mask: float, mode: str, shared_seed: int) -> None:
    w = world(ONE_RANK[name], PRESET_CAPACITY)
    w.fill(tokens, shared_seed, mask=mask)
    w.check(of_mode(preset_schedules(w.problem), mode))


@modes
@pytest.mark.parametrize(
    ("routing", "mask"), [("zipf:1.2", 0.0), ("skew", 0.0), ("hot1", 0.0), ("uniform", 1.0)]
)
@pytest.mark.parametrize("name", list(ONE_RANK))
def test_preset_routing(name: str, routing: str, mask: float, mode: str, shared_seed: int) -> None:
    w = world(ONE_RANK[name], PRESET_CAPACITY)
    w.fill(1024, shared_seed, routing, mask)
    w.check(of_mode(preset_schedules(w.problem), mode))


@modes
def test_preset_walks(mode: str, shared_seed: int) -> None:
    w = world(FLASH, PRESET_CAPACITY)
    w.fill(1024, shared_seed, "zipf:0.8", 0.1)
    for schedule in of_mode(preset_schedules(w.problem), mode).values():
        w.check(walks(schedule, w.problem), launches=1)


@modes
@pytest.mark.parametrize(
    ("routing", "mask"),
    [("uniform", 0.0), ("uniform", 0.3), ("uniform", 1.0), ("zipf:1.2", 0.0), ("hot1", 0.1)],
)
@pytest.mark.parametrize("tokens", SMALL_TOKENS)
def test_small(tokens: int, routing: str, mask: float, mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, shared_seed, routing, mask)
    w.check(of_mode(variants(SMALL), mode))


@modes
def test_small_walks(mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(700, shared_seed, "zipf:1.0", 0.2)
    for schedule in of_mode(variants(SMALL), mode).values():
        w.check(walks(schedule, SMALL), launches=1)


@pytest.mark.parametrize(("problem", "mode"), edge_cases())
def test_edge_sizes(problem: Problem, mode: str, shared_seed: int) -> None:
    w = world(problem, SMALL_CAPACITY)
    chosen = of_mode(edge_schedules(problem), mode)
    for part, tokens in enumerate((1, 65, 819)):
        for routing, mask in (("uniform", 0.0), ("zipf:1.2", 0.3)):
            w.fill(tokens, shared_seed + part, routing, mask)
            w.check(chosen)
    w.check(walks(next(iter(chosen.values())), problem), launches=1)


@modes
@pytest.mark.parametrize("tokens", [384, 385, 768, 769])
def test_the_last_few_routes_and_the_first_many(tokens: int, mode: str, shared_seed: int) -> None:
    problem = ODD["topk1"]
    w = world(problem, SMALL_CAPACITY)
    w.fill(tokens, shared_seed, "zipf:1.0", 0.1)
    w.check(of_mode(edge_schedules(problem), mode))


@modes
def test_more_than_2_to_the_31_elements(mode: str, shared_seed: int) -> None:
    """Every row is computed alone, so the reference of a few tokens is enough.

    The weights have more elements than 32 bits count, of the last expert among others.
    """
    w = world(HUGE, HUGE_CAPACITY)
    layout = w.ranks.first.layout.sections
    assert w.weights[0].l1[0].numel() > 2**32
    assert layout["l1_acts"].num_bytes > 3e9
    assert layout["combine_acts"].num_bytes // 2 > 3e9
    w.fill(HUGE_CAPACITY, shared_seed)
    (schedule,) = of_mode(schedules(HUGE, ("pingpong", "swapped", "wide128")), mode).values()
    y = w.run(schedule)
    i = w.inputs[0]
    for part in (
        slice(0, 40),
        slice(HUGE_CAPACITY // 2, HUGE_CAPACITY // 2 + 40),
        slice(-40, None),
    ):
        expected = reference.moe(
            HUGE, i.x[part], i.x_sf[part], i.topk_idx[part], i.topk_weights[part], w.plain
        )
        same = reference.compare(y[part], expected, intermediate=HUGE.intermediate)
        assert same, same.reason
    assert not y.isnan().any()
    assert torch.equal(w.run(schedule), y)


@modes
@pytest.mark.parametrize("tokens", [MANY_ROUTES_CAPACITY, 1, 0, 777])
def test_routing_in_several_rounds(tokens: int, mode: str, shared_seed: int) -> None:
    """One block lists more routes than its threads hold at once."""
    w = world(MANY_ROUTES, MANY_ROUTES_CAPACITY)
    w.fill(tokens, shared_seed)
    w.check(of_mode(many_routes_schedules(), mode))


UNEVEN = (257, 1, 64, 129, 7, 300, 8, 65)
COUNTS = {
    "even": (200,) * 8,
    "uneven": UNEVEN,
    "first_empty": (0, *UNEVEN[:7]),
    "one_only": (0, 191, 0, 0, 0, 0, 0, 0),
    "all_empty": (0,) * 8,
}
"""Tokens of each rank, of which the first `num_ranks` count."""


@modes
@pytest.mark.parametrize(
    ("counts", "routing", "mask"),
    [
        *((name, "uniform", 0.0) for name in COUNTS),
        ("uneven", "uniform", 0.3),
        ("uneven", "uniform", 1.0),
        ("uneven", "zipf:1.2", 0.1),
        ("even", "skew", 0.0),
        ("uneven", "hot1", 0.0),
        ("first_empty", "hot1", 0.5),
    ],
)
@each_number
def test_ranks(
    num_ranks: int, counts: str, routing: str, mask: float, mode: str, shared_seed: int
) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(COUNTS[counts][:num_ranks], shared_seed, routing, mask)
    w.check(of_mode(rank_schedules(w.problem), mode), pools=True)


@modes
@each_number
def test_ranks_at_capacity(num_ranks: int, mode: str, shared_seed: int) -> None:
    """More rows than the ring holds on every rank."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(RANKS_CAPACITY, shared_seed)
    w.check(of_mode(rank_schedules(w.problem), mode), pools=True)


@modes
@each_number
def test_walks_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([(500, 0, 333, 64)[r % 4] for r in range(num_ranks)], shared_seed, "zipf:1.0", 0.1)
    for schedule in of_mode(rank_schedules(w.problem), mode).values():
        w.check(walks(schedule, w.problem), launches=1)


def test_fit_is_valid() -> None:
    every = (*ONE_RANK.values(), *EXPERTS.values(), *ODD.values(), HUGE, *ON_RANKS.values())
    for problem in every:
        assert not fit(problem).violations(problem)
