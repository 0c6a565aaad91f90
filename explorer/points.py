"""A space as dimensions, for strategies that propose points of it one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .space import Range, Space, choices

BASE = "base"
"""The dimension that says which base point a proposal starts from."""


def dimensions(space: Space, problem: Problem) -> dict[str, int]:
    """Dimension -> its number of values: every range, and the base point if there are several.

    A space of base points and `[vary]` ranges is wider here than when it is enumerated: all its
    ranges change together.
    """
    ranges = _ranges(space)
    found = {_key(r): len(c) for r, c in zip(ranges, choices(ranges, problem), strict=True)}
    if len(space.bases) > 1:
        found[BASE] = len(space.bases)
    return found


def point_schedule(
    space: Space,
    problem: Problem,
    choice: Mapping[str, int],
    recipe: Recipe | None = None,
    *,
    gpu_ranks: int = 1,
) -> Schedule | None:
    """The schedule of one value of every dimension; None when it breaks a rule.

    Args:
        space: a parsed space.
        problem: the layer as it runs.
        choice: dimension -> number of its value; a dimension that is missing keeps the base's.
        recipe: checked with the schedule.
        gpu_ranks: virtual ranks that share the GPU; each gets `num_sms // gpu_ranks` of a point.
    """
    local = problem.num_local_experts
    point: dict[str, Any] = {**Schedule().to_dict(), "experts_per_wave": "all"}
    if space.bases:
        point.update(space.bases[choice.get(BASE, 0)])
    ranges = _ranges(space)
    for one, values in zip(ranges, choices(ranges, problem), strict=True):
        if _key(one) in choice:
            point.update(values[choice[_key(one)]])
    if point["order"] == "lag" or point["experts_per_wave"] == "all":
        point["experts_per_wave"] = local
    schedule = Schedule(**point).on_sms(point["num_sms"] // gpu_ranks)
    return None if schedule.violations(problem, recipe) else schedule


def space_digest(space: Space) -> str:
    """Of what a space holds: numbers of choices mean nothing in another one."""
    held = repr((space.product, space.bases, space.vary))
    return hashlib.sha256(held.encode()).hexdigest()[:8]


def _ranges(space: Space) -> tuple[Range, ...]:
    """Ranges of `[product]` and `[vary]`; where both name a field the product's is meant."""
    taken = {name for names, _ in space.product for name in names}
    return (*space.product, *(r for r in space.vary if not taken & set(r[0])))


def _key(one: Range) -> str:
    return ", ".join(one[0])
