"""Each stand-alone phase against its reference, on the GPU: the checks of `tl-megamoe check`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from gpu_cases import (
    DEBUG_SCHEDULES,
    FLASH,
    FLASH_PHASE_SCHEDULES,
    ON_RANKS,
    PHASE_SCHEDULES,
    PRESET_CAPACITY,
    RANK_PHASE_SCHEDULES,
    RANKS_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    WRAPS,
    phase_schedule,
    real_ranks,
)
from gpu_world import world

from tl_megamoe.explorer.checks import ACCUMULATORS, PHASE_CHECKS
from tl_megamoe.problem import Problem

pytestmark = pytest.mark.sm90

CASES: dict[str, tuple[int, str, float]] = {
    "none": (0, "uniform", 0.0),
    "1": (1, "uniform", 0.0),
    "8": (8, "uniform", 0.0),
    "48": (48, "uniform", 0.0),
    "192": (192, "uniform", 0.0),
    "129-masked": (129, "uniform", 0.3),
    "500-hot1": (500, "hot1", 0.0),
    "1024-zipf": (1024, "zipf:1.2", 0.0),
}
FLASH_CASES = ("48", "64", "4096")
RANK_PROBLEM = ON_RANKS[real_ranks()] if real_ranks() else WRAPS
RANK_CASES: dict[str, tuple[Sequence[int], str, float]] = {
    "none": ((0, 0, 0, 0), "uniform", 0.0),
    "48": ((48, 48, 48, 48), "uniform", 0.0),
    "uneven": ((192, 0, 8, 65), "uniform", 0.2),
    "zipf": ((100, 1, 129, 64), "zipf:1.0", 0.0),
}


def cases(tables: dict[str, Sequence[str]], names: Iterable[str]) -> list[Any]:
    """(check, schedule, case) for every schedule of a phase."""
    return [
        pytest.param(
            phase, check, schedule, name, id=f"{check}-{schedule}-{name}".replace(" ", "_")
        )
        for phase, chosen in tables.items()
        for check in PHASE_CHECKS[phase]
        for schedule in (DEBUG_SCHEDULES if check == ACCUMULATORS else chosen)
        for name in names
    ]


def run(problem: Problem, capacity: int, phase: str, check: str, schedule: str) -> None:
    w = world(problem, capacity)
    found = PHASE_CHECKS[phase][check](w, phase_schedule(problem, schedule))
    assert found, found


@pytest.mark.parametrize(("phase", "check", "schedule", "case"), cases(PHASE_SCHEDULES, CASES))
def test_small(phase: str, check: str, schedule: str, case: str, seed: int) -> None:
    tokens, routing, mask = CASES[case]
    world(SMALL, SMALL_CAPACITY).fill(tokens, seed, routing, mask)
    run(SMALL, SMALL_CAPACITY, phase, check, schedule)


@pytest.mark.parametrize(
    ("phase", "check", "schedule", "case"),
    [c for c in cases(FLASH_PHASE_SCHEDULES, FLASH_CASES) if c.values[1] != ACCUMULATORS],
)
def test_flash(phase: str, check: str, schedule: str, case: str, seed: int) -> None:
    world(FLASH, PRESET_CAPACITY).fill(int(case), seed)
    run(FLASH, PRESET_CAPACITY, phase, check, schedule)


@pytest.mark.parametrize(
    ("phase", "check", "schedule", "case"),
    [
        pytest.param(
            *c.values,
            id=c.id,
            marks=[pytest.mark.multi_gpu(real_ranks())] if real_ranks() else [],
        )
        for c in cases(RANK_PHASE_SCHEDULES, RANK_CASES)
        if c.values[1] != ACCUMULATORS
    ],
)
def test_ranks(phase: str, check: str, schedule: str, case: str, seed: int) -> None:
    counts, routing, mask = RANK_CASES[case]
    w = world(RANK_PROBLEM, RANKS_CAPACITY)
    w.fill([counts[r % 4] for r in range(RANK_PROBLEM.num_ranks)], seed, routing, mask)
    run(RANK_PROBLEM, RANKS_CAPACITY, phase, check, schedule)
