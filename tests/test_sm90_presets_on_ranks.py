"""Published sizes over ranks with a GPU each, under torchrun."""

from __future__ import annotations

import pytest
from gpu_cases import (
    MODES,
    PRESETS_ON_RANKS_CAPACITY,
    presets_on_ranks,
    real_ranks,
)
from gpu_world import world

from tl_megamoe.problem import Problem
from tl_megamoe.schedule import default_schedule

pytestmark = pytest.mark.sm90

COUNTS = {"few": (1, 0), "uneven": (64, 17), "full": (PRESETS_ON_RANKS_CAPACITY, 333)}

if real_ranks():

    @pytest.mark.multi_gpu(real_ranks())
    @pytest.mark.parametrize(
        ("counts", "routing", "mask"),
        [("few", "uniform", 0.0), ("uneven", "zipf:1.2", 0.2), ("full", "uniform", 0.0)],
    )
    @pytest.mark.parametrize("problem", presets_on_ranks(real_ranks()), ids=lambda p: p.name)
    def test_published_sizes(
        problem: Problem, counts: str, routing: str, mask: float, seed: int
    ) -> None:
        """Uneven and zero tokens, masks, skew; all math modes give the same bits."""
        w = world(problem, PRESETS_ON_RANKS_CAPACITY)
        w.fill([COUNTS[counts][r % 2] for r in range(real_ranks())], seed, routing, mask)
        w.check({m: default_schedule(problem, 64, m) for m in MODES})
