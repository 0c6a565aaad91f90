"""Which confirmed schedule a token count gets, and which token counts share one.

What runs today (the frozen schedule, or the built-in default) is left only for a candidate that is
faster by more than max(1 %, 2 x spread of the gain) in the rounds of one confirmation, and in the
median round of every seed. Token counts that follow each other share an entry where one schedule is
within 1 % of the best of each and slower than neither what runs today nor the built-in default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tl_megamoe.schedule import Schedule

from .evidence import SPREADS, Confirmed, compare

MIN_GAIN = 0.01
"""Least gain for which another schedule replaces the one that runs today."""
SAME = 0.01
"""A schedule within this of the best may serve a token count for the sake of one entry."""
VERSIONS = (
    "device",
    "card",
    "tilelang",
    "nvcc",
    "torch",
    "driver",
    "capacity",
    "kernel",
    "commit",
    "measured_at",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is frozen for one token count.

    Attributes:
        num_tokens: tokens a rank contributes.
        schedule: the choice.
        evidence: what the file says of it.
        why: one sentence.
        acceptable: schedule -> its ratio to the best, of those that may serve this count too.
        candidates: the confirmed ones, the best first; empty when an old entry is carried over.
        current: what runs today.
    """

    num_tokens: int
    schedule: Schedule
    evidence: dict[str, Any]
    why: str
    acceptable: dict[Schedule, float]
    candidates: tuple[Confirmed, ...] = ()
    current: Schedule | None = None


def choose(
    num_tokens: int,
    found: Sequence[Confirmed],
    current: Schedule,
    mix: Mapping[str, float],
    failed: str = "",
) -> Choice | None:
    """The schedule of one token count.

    Args:
        num_tokens: the count.
        found: its confirmed candidates, the best first.
        current: what runs today; it must be beaten.
        mix: routing -> weight.
        failed: how the current one failed in that confirmation; empty if it did not.

    Returns:
        None when what runs today was not timed beside them: nothing can be said then.
    """
    best = found[0]
    now = next((c for c in found if c.schedule == current), None)
    chosen = best
    if now is None and not failed:
        return None
    if now is None:
        why = f"{current.name}, which runs today, failed: {failed}"
    elif now is best:
        why = "it runs today and is the best confirmed"
    else:
        gain = compare(best, now, mix)
        need = max(MIN_GAIN, SPREADS * gain.spread)
        if gain.gain > need and gain.seeds_won == gain.num_seeds:
            why = f"{gain} than {now.candidate}, which runs today"
        else:
            chosen = now
            why = (
                f"it runs today; {best.candidate} is {gain} and won {gain.seeds_won} of "
                f"{gain.num_seeds} seeds; a change needs {need:.1%} and all seeds"
            )
    ratios = {c.schedule: _ratio(c, best, mix) for c in found}
    beaten = [c for c in (now, _default_among(found)) if c is not None]
    acceptable = {
        c.schedule: ratios[c.schedule]
        for c in found
        if ratios[c.schedule] <= 1 + SAME and not any(_is_slower(c, b, mix) for b in beaten)
    }
    acceptable[chosen.schedule] = ratios[chosen.schedule]
    evidence = evidence_of(num_tokens, chosen, found, mix)
    return Choice(num_tokens, chosen.schedule, evidence, why, acceptable, tuple(found), current)


def _ratio(one: Confirmed, other: Confirmed, mix: Mapping[str, float]) -> float:
    """Median over the rounds of the time of one over the other's."""
    return 1.0 if one is other else 1.0 - compare(one, other, mix).gain


def _default_among(found: Sequence[Confirmed]) -> Confirmed | None:
    """The built-in default: the candidate whose ratios to itself are all 1."""
    return next((c for c in found if (c.rows["ratio_to_baseline"] == 1).all()), None)


def _is_slower(one: Confirmed, other: Confirmed, mix: Mapping[str, float]) -> bool:
    """Whether it is slower than another by more than the spread of that allows."""
    if one is other:
        return False
    found = compare(one, other, mix)
    return found.gain < -SPREADS * found.spread


def evidence_of(
    num_tokens: int, chosen: Confirmed, found: Sequence[Confirmed], mix: Mapping[str, float]
) -> dict[str, Any]:
    """What a frozen cell says of how it was measured; times in microseconds, ratios plain."""
    others = [c for c in found if c is not chosen]
    out: dict[str, Any] = {
        "num_tokens": num_tokens,
        "median_us": digits(chosen.median_us),
        "p10_us": digits(chosen.p10_us),
        "p90_us": digits(chosen.p90_us),
        "ratio_to_floor": digits(chosen.ratio_to_floor),
        "ratio_to_default": digits(chosen.ratio_to_default),
        "spread": digits(chosen.spread),
        "yardstick_tflops": digits(chosen.yardstick_tflops),
        "num_observations": chosen.num_observations,
        "num_seeds": chosen.num_seeds,
        "best": found[0].candidate,
        "ratio_to_best": digits(_ratio(chosen, found[0], mix)),
        "run": chosen.run,
    }
    if others:
        margin = compare(chosen, others[0], mix)
        out["runner_up"] = others[0].candidate
        out["margin"] = digits(margin.gain)
        out["margin_spread"] = digits(margin.spread)
        out["margin_rounds"] = f"{margin.rounds_won} of {margin.num_rounds}"
    last = chosen.rows.iloc[-1]
    out.update({name: plain(last[name]) for name in VERSIONS})
    return out


def digits(value: float) -> float | None:
    """Six digits are more than was measured; JSON has no NaN."""
    return None if math.isnan(value) else float(f"{value:.6g}")


def merge_choices(choices: Sequence[Choice]) -> list[tuple[Schedule, list[Choice]]]:
    """Token counts in order, joined as long as one schedule is acceptable to all of a group."""
    groups: list[tuple[dict[Schedule, float], list[Choice]]] = []
    for choice in sorted(choices, key=lambda c: c.num_tokens):
        if groups:
            shared = {
                s: max(worst, choice.acceptable[s])
                for s, worst in groups[-1][0].items()
                if s in choice.acceptable
            }
            if shared:
                groups[-1] = shared, [*groups[-1][1], choice]
                continue
        groups.append((dict(choice.acceptable), [choice]))
    out = []
    for shared, members in groups:
        chosen = [c.schedule for c in members]
        # What most of its counts chose by themselves, then the least loss.
        best = min(shared, key=lambda s: (-chosen.count(s), shared[s], s.name))
        out.append((best, members))
    return out


def plain(value: Any) -> Any:
    """Nullable and numpy numbers become Python's."""
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
