"""Which schedule a launch runs when it names none: the frozen table under the environment.

Two variables change the choice, never a result, and must be set alike on all ranks.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from .frozen import MATH_MODES, Resolution, resolve
from .problem import Problem
from .recipe import Recipe
from .schedule import ScheduleError

logger = logging.getLogger(__name__)

KERNEL_VARIABLE = "TL_MEGAMOE_KERNEL"
THRESHOLD_VARIABLE = "TL_MEGAMOE_COOPERATIVE_THRESHOLD"
_said: set[tuple[str, str]] = set()


def choose_schedule(
    problem: Problem,
    device_name: str,
    capacity: int,
    token_bound: int,
    *,
    rank_mode: str,
    recipe: Recipe,
    math_mode: str | None = None,
    root: Path | None = None,
    quiet: bool = False,
) -> Resolution:
    """The schedule of a launch that names none: `frozen.resolve` under the environment.

    TL_MEGAMOE_KERNEL forces a math mode; TL_MEGAMOE_COOPERATIVE_THRESHOLD moves the built-in
    default from pingpong to cooperative. Each is logged once when it acts.

    Args:
        problem, device_name, capacity, rank_mode, recipe, root, quiet: as `frozen.resolve`.
        token_bound: the most tokens of any rank.
        math_mode: forced by the caller, which the environment does not change.

    Raises:
        ValueError: a variable has a value that it cannot have.
        ScheduleError: no schedule of the forced math mode is valid.
    """
    forced, threshold = os.environ.get(KERNEL_VARIABLE), os.environ.get(THRESHOLD_VARIABLE)
    from_environment = False
    if math_mode is None and forced:
        if forced not in MATH_MODES:
            raise ValueError(
                f"{KERNEL_VARIABLE}={forced!r} must be one of {', '.join(MATH_MODES)}, or unset"
            )
        math_mode, from_environment = forced, True
    lookup = partial(
        resolve,
        problem,
        device_name,
        capacity,
        token_bound,
        rank_mode=rank_mode,
        recipe=recipe,
        math_mode=math_mode,
        root=root,
    )
    try:
        found = lookup(quiet=quiet)
    except ScheduleError as error:
        if from_environment:
            raise ScheduleError(f"{KERNEL_VARIABLE}={forced}: {error}") from None
        raise
    if from_environment:
        _say_once(KERNEL_VARIABLE, str(forced), f"forces schedules of math mode {forced}")
    elif threshold and math_mode is None and found.origin == "default":
        tokens = _threshold(threshold)
        other = lookup(quiet=True, cooperative_threshold=tokens)
        if other.schedule != found.schedule:
            found = other
            _say_once(
                THRESHOLD_VARIABLE,
                threshold,
                f"makes built-in schedules cooperative from {tokens} tokens on, pingpong below",
            )
    return found


def _threshold(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(
            f"{THRESHOLD_VARIABLE}={text!r} must be a number of tokens, an integer of at least 0, "
            "or unset"
        )
    return int(text)


def _say_once(variable: str, value: str, what: str) -> None:
    if (variable, value) not in _said:
        _said.add((variable, value))
        logger.warning("%s=%s %s; results do not change", variable, value, what)
