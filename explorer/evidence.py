"""What confirmed rows say of candidates: their times over seeds and observations, and pairs.

A confirmation times a few candidates in rounds: every round is one observation of every candidate,
interleaved, with one seed's routing. Two candidates compare within rounds, where the card was in
one state, and the median over rounds decides; their spread says how far to trust it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import pandas as pd

from tl_megamoe.schedule import Schedule

from .protocol import percentile

MIN_SEEDS = 3
MIN_OBSERVATIONS = 3
"""Routings, and observations of each, that make a candidate confirmed."""
SPREADS = 2.0
"""A gain counts where it exceeds this many of its own standard errors."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values: sqrt(pi / 2) x their deviation / sqrt(n)."""
ROUND = ["routing", "seed", "observation"]
"""What names a round within a run."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A candidate over all rounds of its confirmation.

    Attributes:
        num_observations: rounds.
        num_seeds: routings among them.
        median_us, p10_us, p90_us: over the rounds' medians.
        ratio_to_floor, yardstick_tflops: medians over the rounds.
        ratio_to_default: median over the rounds of its time over the built-in default's, weighted
            over the routings if there are several; what candidates are ranked by.
        spread: robust standard deviation of that ratio over the rounds (`robust_deviation`).
        run: the search run.
        rows: its rows.
    """

    candidate: str
    schedule: Schedule
    num_observations: int
    num_seeds: int
    median_us: float
    p10_us: float
    p90_us: float
    ratio_to_floor: float
    ratio_to_default: float
    spread: float
    yardstick_tflops: float
    run: str
    rows: pd.DataFrame


@dataclass(frozen=True, slots=True)
class Comparison:
    """One candidate against another in the rounds that hold both.

    Attributes:
        gain: 1 - median over the rounds of its time over the other's; positive: it is faster.
        spread: of the gain: the standard error of that median.
        num_rounds, rounds_won: how many, and in how many it was faster.
        num_seeds, seeds_won: seeds of routings, and those in whose median round it was faster:
            rounds of one seed share a routing and are not independent.
    """

    gain: float
    spread: float
    num_rounds: int
    rounds_won: int
    num_seeds: int
    seeds_won: int

    def __str__(self) -> str:
        """For example `1.4 % faster (spread 0.4 %, in 12 of 15 rounds)`, or `level with`."""
        of = f"spread {self.spread:.1%}, in {self.rounds_won} of {self.num_rounds} rounds"
        if abs(self.gain) <= SPREADS * self.spread:
            return f"level ({self.gain:+.1%}, {of})"
        return f"{abs(self.gain):.1%} {'faster' if self.gain > 0 else 'slower'} ({of})"


def robust_deviation(values: Sequence[float]) -> float:
    """1.4826 x the median absolute deviation: that of normal values, whatever a few outliers do.

    A card that throttles for one block makes such outliers.
    """
    middle = median(values)
    return 1.4826 * median(abs(v - middle) for v in values)


def schedule_of(row: Mapping[str, Any] | pd.Series[Any]) -> Schedule:
    """The schedule of a row."""
    values = {f.name: row[f.name] for f in fields(Schedule)}
    return Schedule.from_dict({k: v.item() if hasattr(v, "item") else v for k, v in values.items()})


def confirmed(frame: pd.DataFrame, mix: Mapping[str, float] | None = None) -> list[Confirmed]:
    """The confirmed candidates of a cell by its latest complete confirmation, the best first.

    Args:
        frame: rows of one problem, token count, ranks, rank mode and recipe.
        mix: routing -> weight in the ranking; every routing of the rows counts alike when None.

    Returns:
        Candidates with at least `MIN_OBSERVATIONS` rounds of `MIN_SEEDS` seeds in every routing,
        and without a failure among them. Empty when no run confirmed any.
    """
    rows = frame[(frame["stage"] == "confirm") & (frame["source"] == "measured")]
    if mix is not None:
        rows = rows[rows["routing"].isin(list(mix))]
    for run in reversed(list(dict.fromkeys(rows["run"]))):
        mine = rows[rows["run"] == run]
        weights = dict(mix) if mix is not None else dict.fromkeys(mine["routing"], 1.0)
        found = [
            summary
            for _, own in mine.groupby("candidate", sort=False)
            if (summary := _summary(own, weights)) is not None
        ]
        if found:
            return sorted(found, key=lambda c: (c.ratio_to_default, c.median_us, c.candidate))
    return []


def _summary(rows: pd.DataFrame, weights: Mapping[str, float]) -> Confirmed | None:
    if (rows["status"] != "ok").any() or set(weights) - set(rows["routing"]):
        return None
    rows = rows.drop_duplicates(ROUND, keep="last")
    total, score, variance = sum(weights.values()), 0.0, 0.0
    for routing, weight in weights.items():
        own = rows[rows["routing"] == routing]
        observations = own.groupby("seed")["observation"].nunique()
        if len(observations) < MIN_SEEDS or observations.min() < MIN_OBSERVATIONS:
            return None
        ratios = [float(v) for v in own["ratio_to_baseline"].dropna()]
        if len(ratios) < len(own):
            return None
        score += weight / total * median(ratios)
        variance += (weight / total * robust_deviation(ratios)) ** 2
    times = [float(v) for v in rows["median_us"]]
    first = rows.iloc[0]
    return Confirmed(
        candidate=str(first["candidate"]),
        schedule=schedule_of(first),
        num_observations=len(rows),
        num_seeds=rows["seed"].nunique(),
        median_us=median(times),
        p10_us=percentile(times, 0.1),
        p90_us=percentile(times, 0.9),
        ratio_to_floor=float(rows["ratio_to_floor"].median()),
        ratio_to_default=score,
        spread=variance**0.5,
        yardstick_tflops=float(rows["yardstick_tflops"].median()),
        run=str(first["run"]),
        rows=rows,
    )


def compare(one: Confirmed, other: Confirmed, mix: Mapping[str, float] | None = None) -> Comparison:
    """How much faster one candidate is than another, round by round.

    Args:
        one: a candidate.
        other: what it is compared with, of the same run.
        mix: routing -> weight, as for `confirmed`.

    Raises:
        ValueError: no round of a routing holds both.
    """
    times = [c.rows.set_index(ROUND)["median_us"].astype(float) for c in (one, other)]
    ratios = (times[0] / times[1]).dropna()
    weights = dict(mix) if mix is not None else dict.fromkeys(one.rows["routing"], 1.0)
    total, score, variance = sum(weights.values()), 0.0, 0.0
    for routing, weight in weights.items():
        of_routing = ratios[ratios.index.get_level_values("routing") == routing]
        own = [float(v) for v in of_routing]
        if not own:
            raise ValueError(
                f"no round of {routing} routing in run {one.run} holds both {one.candidate} and "
                f"{other.candidate}: they cannot be compared. Confirm them with tl-megamoe search"
            )
        score += weight / total * median(own)
        error = MEDIAN_ERROR * robust_deviation(own) / len(own) ** 0.5
        variance += (weight / total * error) ** 2
    by_seed = ratios.groupby(level=["routing", "seed"]).median()
    return Comparison(
        gain=1.0 - score,
        spread=variance**0.5,
        num_rounds=len(ratios),
        rounds_won=int((ratios < 1).sum()),
        num_seeds=len(by_seed),
        seeds_won=int((by_seed < 1).sum()),
    )
