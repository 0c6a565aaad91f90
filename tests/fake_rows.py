"""Rows of a confirmation, as a search writes them."""

from __future__ import annotations

import random
from typing import Any

from table_rows import row

from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.schedule import Schedule, default_schedule

FLASH = PRESETS["deepseek-v4-flash"]
VIEW = FLASH.one_rank()
DEVICE = "nvidia-h200"
BASE = Schedule(experts_per_wave=32)


def confirm_rows(
    tokens: int,
    times: dict[Schedule, float],
    *,
    default_us: float | None = None,
    problem: Problem = VIEW,
    noise: float = 0.001,
    seeds: int = 3,
    observations: int = 3,
    **fields: Any,
) -> list[dict[str, Any]]:
    """A row of each candidate, seed and observation; times in microseconds, before the noise.

    A round's card is up to 20 % slower than another's, alike for all its candidates. The built-in
    default is one of them, 20 % slower than the slowest if no time of it is given.
    """
    default = default_schedule(problem, tokens)
    default_us = times.get(default, default_us or 1.2 * max(times.values()))
    times = {**times, default: default_us}
    draw = random.Random(tokens)
    out = []
    for seed in range(seeds):
        for observation in range(observations):
            slow = (1 + 0.2 * draw.random()) / 1.1
            round_us = {
                s: mean * slow * (1 + noise * draw.gauss(0, 1)) for s, mean in times.items()
            }
            for schedule, us in round_us.items():
                beside = round_us[default]
                out.append(
                    row(
                        **{
                            "problem": VIEW.name,
                            "num_tokens": tokens,
                            "seed": seed,
                            "stage": "confirm",
                            "observation": observation,
                            "run": "first",
                            "candidate": schedule.name,
                            "median_us": us,
                            "floor_us": 100.0 + tokens,
                            "ratio_to_floor": us / (100.0 + tokens),
                            "yardstick_tflops": 1300.0,
                            "baseline": "default_schedule",
                            "baseline_us": beside,
                            "ratio_to_baseline": us / beside,
                            "measured_at": f"2026-01-01T00:0{seed}:0{observation}+00:00",
                            **schedule.to_dict(),
                            **fields,
                        }
                    )
                )
    return out
