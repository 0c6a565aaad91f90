"""Small layers for the checks of `tl-megamoe check`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_kernels import fake_layer, loop_ranks

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.explorer import check
from tl_megamoe.explorer.checks import PHASE_CHECKS
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.explorer.ranks import OneRank
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

ONE = Problem(name="t", hidden=256, intermediate=256, num_experts=6, num_topk=3, num_ranks=1)
TWO = replace(ONE, num_ranks=2)
CAPACITY = 96
ALL_CHECKS = [(phase, name) for phase, names in PHASE_CHECKS.items() for name in names]


def schedule_of(phase: str, problem: Problem) -> Schedule | None:
    return None if phase == "interface" else check.check_schedules(problem, 66, Recipe())[phase][0]


def make(problem: Problem, recipe: Recipe | None = None, **options: Any) -> Layer:
    if problem.num_ranks > 1:
        return fake_layer(loop_ranks(problem, CAPACITY, recipe), **options)
    buffer = SymmBuffer(problem, CAPACITY, "cpu", recipe=recipe)
    return fake_layer(OneRank(problem, {0: buffer}), **options)
