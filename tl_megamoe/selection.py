"""Which schedule a launch runs when it names none: the frozen table under the environment.

Two variables change the choice, never a result, and must be set alike on all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .frozen import MATH_MODES, Resolution, resolve, token_limits
from .problem import Problem
from .recipe import Recipe
from .schedule import COOPERATIVE_THRESHOLD, Schedule, ScheduleError

logger = logging.getLogger(__name__)

KERNEL_VARIABLE = "TL_MEGAMOE_KERNEL"
THRESHOLD_VARIABLE = "TL_MEGAMOE_COOPERATIVE_THRESHOLD"
USUAL_TOKENS = (16, 64, 256, 512, 1024, 4096)
"""Token counts that a warning proposes to tune, below the capacity."""
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
    tokens_to_tune: Sequence[int] = (),
) -> Resolution:
    """The schedule of a launch that names none: `frozen.resolve` under the environment.

    TL_MEGAMOE_KERNEL forces a math mode; TL_MEGAMOE_COOPERATIVE_THRESHOLD moves the built-in
    default from pingpong to cooperative. Each is logged once when it acts.

    Args:
        problem, device_name, capacity, rank_mode, recipe, root, quiet, tokens_to_tune: as
            `frozen.resolve`.
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
        tokens_to_tune=tokens_to_tune,
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


def schedule_intervals(
    problem: Problem,
    device_name: str,
    capacity: int,
    *,
    rank_mode: str,
    recipe: Recipe,
    math_mode: str | None = None,
    root: Path | None = None,
    num_sms: int | None = None,
) -> list[tuple[int, Schedule]]:
    """Every schedule that `choose_schedule` gives for some bound, as intervals of the bound.

    Args:
        problem, device_name, capacity, rank_mode, recipe, math_mode, root: as for
            `choose_schedule`.
        num_sms: multiprocessors that a rank has, to which the grid is cut: of a smaller part, a MIG
            slice, or a virtual rank's share. None: not cut.

    Returns:
        (last token count, schedule), ascending; the last entry ends at the capacity.

    Raises:
        ValueError, ScheduleError: as `choose_schedule`.
    """
    threshold = os.environ.get(THRESHOLD_VARIABLE)
    moved = [int(threshold) - 1] if threshold and threshold.isdecimal() else []
    # The default turns cooperative at its threshold, and its blocks grow where experts get more
    # than 64 rows.
    short_blocks = 64 * problem.num_experts // (problem.num_topk * problem.num_ranks)
    limits = token_limits(problem, device_name, root=root, rank_mode=rank_mode)
    ends = {*limits, *moved, COOPERATIVE_THRESHOLD - 1, short_blocks, capacity}
    usual = [tokens for tokens in USUAL_TOKENS if tokens < capacity]
    out: list[tuple[int, Schedule]] = []
    for end in sorted(end for end in ends if 0 <= end <= capacity):
        chosen = choose_schedule(
            problem,
            device_name,
            capacity,
            end,
            rank_mode=rank_mode,
            recipe=recipe,
            math_mode=math_mode,
            root=root,
            tokens_to_tune=(*usual, capacity),
        ).schedule
        if num_sms is not None:
            chosen = chosen.on_sms(num_sms)
        if out and out[-1][1] == chosen:
            out.pop()
        out.append((end, chosen))
    return out


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
