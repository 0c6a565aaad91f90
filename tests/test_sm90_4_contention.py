"""Tier 4, contention: another stream holds SMs for a while, then lets go, or never in time.

A launch that needs them waits and is right; one that leaves them to others is right at once. What
happens when they do not come back in time is told in a process of its own (`held_sms` of
gpu_timeouts.py).
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    MODES,
    ON_RANKS,
    RESERVE,
    SMALL,
    SMALL_CAPACITY,
    of_mode,
    reserved_schedules,
    schedules,
)
from gpu_hold import held
from gpu_world import World, world

from tl_megamoe.explorer.findings import same_bits
from tl_megamoe.schedule import Schedule

pytestmark = pytest.mark.sm90

SHORT_MS, LONG_MS = 300, 2000


def started(w: World, schedule: Schedule) -> tuple[dict[int, torch.Tensor], torch.cuda.Event]:
    """The outputs of a launch that has not been waited for, and the event of its end."""
    y, done = w.outputs(), torch.cuda.Event()
    w.start(schedule, y)
    done.record()
    return y, done


def same(w: World, y: dict[int, torch.Tensor]) -> bool:
    return all(same_bits(out, w._first[None, True][rank]) for rank, out in y.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_held", [1, 4, RESERVE])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sms_that_come_back(num_ranks: int, num_held: int, mode: str, shared_seed: int) -> None:
    """Blocks that run wait for those that cannot start, well below the bound of a wait."""
    w = world(SMALL if num_ranks == 1 else ON_RANKS[num_ranks], SMALL_CAPACITY)
    w.fill(257, shared_seed)
    chosen = of_mode(schedules(w.problem, ("wide128", "pingpong", "swapped")), mode)
    w.check(chosen)
    for schedule in chosen.values():
        with held(num_held, SHORT_MS) as released:
            y, done = started(w, schedule)
            done.synchronize()
            assert released.query(), "the launch did not need the SMs that were held"
        assert same(w, y)
    w.check(chosen)


@pytest.mark.parametrize("name", list(reserved_schedules()))
def test_sms_that_are_left_to_others(name: str, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(257, seed)
    schedule = reserved_schedules()[name]
    w.check({name: schedule})
    with held(RESERVE, LONG_MS) as released:
        y, done = started(w, schedule)
        done.synchronize()
        assert not released.query(), "the launch waited for the SMs that were held"
        assert same(w, y)
    w.check({name: schedule})


def test_a_layer_beside_power_hungry_work(seed: int) -> None:
    """Launches follow each other beside FP8 products that keep the card at its power limit."""
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(SMALL_CAPACITY, seed)
    schedule = reserved_schedules()["wide128"]
    w.check({"alone": schedule})
    a = torch.randn((8192, 8192), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    outputs = [w.outputs() for _ in range(20)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(500):
            torch._scaled_mm(a, a.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    for y in outputs:
        w.start(schedule, y)
    torch.cuda.synchronize()
    assert all(same(w, y) for y in outputs)
    w.check({"after": schedule})
