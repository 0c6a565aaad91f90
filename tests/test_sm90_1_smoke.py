"""Tier 1, smoke: buffers are what they say, and every math mode and split runs once."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    MODES,
    ON_RANKS,
    RANKS_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    SPLITS,
    each_rank_count,
    of_mode,
    rank_schedules,
    schedules,
)
from gpu_world import world

from tl_megamoe import fp8_mega_moe, mega_moe
from tl_megamoe.explorer.checks import check_interface

pytestmark = pytest.mark.sm90

modes = pytest.mark.parametrize("mode", MODES)
each_number = pytest.mark.parametrize("num_ranks", each_rank_count())


def test_interface(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(3, seed)
    found = check_interface(w)
    assert found, found


@each_number
def test_interface_on_ranks(num_ranks: int, seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(3, seed)
    found = check_interface(w)
    assert found, found


@modes
@pytest.mark.parametrize("tokens", [0, 65])
def test_one_rank(tokens: int, mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, shared_seed)
    w.check(of_mode(schedules(SMALL, SPLITS), mode), pools=True)


@modes
@each_number
def test_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(65, shared_seed)
    w.check(of_mode(rank_schedules(w.problem), mode), pools=True)


@modes
def test_op_and_functional_form(mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(300, shared_seed)
    schedule = next(iter(of_mode(schedules(SMALL, SPLITS), mode).values()))
    w.check({mode: schedule}, launches=1)
    b, weights, i = w.ranks.first, w.weights[0], w.inputs[0]
    stats = torch.ones(SMALL.num_local_experts, dtype=torch.int32, device="cuda")
    y = torch.empty_like(w.y)
    for _ in range(2):
        fp8_mega_moe(y, weights.l1, weights.l2, b, stats, (1, 128, 128), schedule=schedule)
    assert torch.equal(y, w.y)
    assert (stats - 1).tolist() == [2 * n for n in w.counts(0)]
    again = mega_moe(i.x, i.x_sf, i.topk_idx, i.topk_weights, weights, b, schedule=schedule)
    assert torch.equal(again, w.y)
