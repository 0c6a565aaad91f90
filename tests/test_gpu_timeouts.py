"""The timeout cases of the GPU tests leave one wait of a tag, whichever thread comes first."""

from __future__ import annotations

import pytest
from gpu_cases import ON_RANKS, RANKS_CAPACITY, rank_schedules, ring_blocks
from gpu_timeouts import HOT_TOKENS, hot_routes, lag_of, pool_ring_waits, waits_left

from tl_megamoe.explorer.places import num_blocks

PROBLEM = ON_RANKS[2]


@pytest.mark.parametrize("name", ["wide128", "pingpong"])
def test_cases_of_the_ring_have_one_wait_a_tag(name: str) -> None:
    schedule = rank_schedules(PROBLEM)[name]
    ring = ring_blocks(PROBLEM, schedule.block_m)
    chosen = lag_of(PROBLEM, schedule, ring, pool_ring_waits(ring))
    assert chosen.kernel_key() == schedule.kernel_key()
    assert not chosen.violations(PROBLEM)
    left = waits_left(PROBLEM, schedule, ring, {(8, ring)})
    assert left == {(8, ring), (5, ring)}
    # Without a cause nobody waits for ever, in whatever order.
    for some in (schedule, chosen):
        assert not waits_left(PROBLEM, some, ring, set())


@pytest.mark.parametrize("name", ["wide128", "pingpong"])
def test_hot_rows_fill_one_block_more_than_the_ring(name: str) -> None:
    schedule = rank_schedules(PROBLEM)[name]
    ring = ring_blocks(PROBLEM, schedule.block_m)
    first, rows = hot_routes(schedule, ring), 2 * HOT_TOKENS * PROBLEM.num_topk
    assert HOT_TOKENS <= RANKS_CAPACITY
    assert num_blocks((first, rows - first), schedule.block_m) == ring + 1
    assert schedule.row_chunk(PROBLEM) == PROBLEM.hidden
    before = first + (ring - 1) * schedule.block_m  # rows of all blocks but the last
    assert before % schedule.rows_in_flight == 0
