"""Which candidate of a cell is best, and by what evidence.

A stage says how much a row is worth. `screen`: every candidate, timed briefly; ranked by its time
over the default schedule's of the same round. `confirm`: a few candidates over several seeds and
observations (evidence.py); their ranking stands above that of the screen. `bench`: the frozen
choice beside a named baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe

from .evidence import MEDIAN_ERROR, Confirmed, confirmed
from .freeze import latest
from .space import default_of

CELL = ["device", "source", "phase", "recipe", "routing", "seed", "num_tokens"]
GROUP = ["problem", "num_ranks", "rank_mode"]
NUMBERS = [
    "median_us",
    "p10_us",
    "p90_us",
    "floor_us",
    "ratio_to_floor",
    "yardstick_tflops",
    "tflops",
    "hbm_gbs",
    "nvlink_gbs",
    "baseline_us",
    "ratio_to_baseline",
]
"""Columns of measured numbers that observations of one candidate are joined by."""
BENCH_NUMBERS = [
    "median_us",
    "p10_us",
    "p90_us",
    "floor_us",
    "ratio_to_floor",
    "yardstick_tflops",
    "power_w",
    "baseline_us",
    "ratio_to_baseline",
]
"""The same of bench rows."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best candidate of a cell by the strongest evidence there is. Times in microseconds.

    Attributes:
        stage: `confirm` or `screen`.
        ratio_to_default: time over the built-in default schedule's, in the same rounds.
        spread: robust standard deviation of that ratio from round to round; NaN for a screened row.
        default_us: the default's time beside it.
        num_rounds, num_seeds: rounds of timing, and routings among them.
        p10_us, p90_us: of a confirmed candidate over its rounds' medians, else of the samples.
    """

    stage: str
    candidate: str
    median_us: float
    p10_us: float
    p90_us: float
    floor_us: float
    ratio_to_floor: float
    ratio_to_default: float
    spread: float
    default_us: float
    yardstick_tflops: float
    tflops: float
    hbm_gbs: float
    num_rounds: int
    num_seeds: int
    run: str
    kernel: str
    commit: str
    card: str

    @property
    def noise(self) -> float:
        """How far `median_us` and its ratios may be off, as a part of them: two standard errors
        of the median over the rounds of a confirmation, half of p10 to p90 of a screened row."""
        if self.stage == "confirm":
            error = MEDIAN_ERROR * self.spread / math.sqrt(self.num_rounds)
            return 2 * error / self.ratio_to_default
        return (self.p90_us - self.p10_us) / 2 / self.median_us


def order_column(source: str) -> str:
    """What a row's time is: measured, or predicted where there was no GPU."""
    return "median_us" if source == "measured" else "predicted_us"


def by_tokens(frame: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    """The rows of each token count, by token count."""
    for tokens in sorted({int(t) for t in frame["num_tokens"]}):
        yield tokens, frame[frame["num_tokens"] == tokens]


def screened(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of stage `screen`: one of each candidate, of the kernel that was measured last.

    A candidate that was screened several times has the medians over its `ok` rows of that kernel.
    """
    rows = frame[frame["stage"] == "screen"]
    last = latest(rows)
    same = [*CELL, *GROUP, "capacity", "kernel", "candidate"]
    good = rows[rows["status"] == "ok"]
    repeated = good[good.duplicated(same, keep=False)]
    if repeated.empty:
        return last
    middle = repeated.groupby(same, sort=False, dropna=False)[NUMBERS].transform("median")
    shown = last.index.intersection(middle.index)
    last = last.copy()
    last.loc[shown, NUMBERS] = middle.loc[shown]
    return last


def ranking_columns(good: pd.DataFrame, source: str) -> list[str]:
    """What `ok` rows of a screen are ranked by: batches were timed apart, so by the time over the
    default's where every row has it."""
    time = order_column(source)
    relative = source == "measured" and len(good) > 0 and good["ratio_to_baseline"].notna().all()
    return ["ratio_to_baseline", time] if relative else [time]


def ranked_cells(frame: pd.DataFrame) -> Iterator[tuple[dict[str, object], pd.DataFrame]]:
    """Each cell's values and its latest screened rows: `ok` ones, the best first, then failures."""
    for values, rows in screened(frame).groupby(CELL, sort=True):
        cell = dict(zip(CELL, values, strict=True))
        yield cell, ranked(rows, str(cell["source"]))


def ranked(rows: pd.DataFrame, source: str) -> pd.DataFrame:
    """Screened rows of a cell: `ok` ones, the best first, then the failures."""
    by = ranking_columns(rows[rows["status"] == "ok"], source)
    failed = rows.assign(failed=rows["status"] != "ok")
    ordered = failed.sort_values(["failed", *by, "candidate"], kind="stable")
    return ordered.drop(columns="failed")


def status_counts(rows: pd.DataFrame) -> str:
    """For example `48 ok, 2 spilled, 1 timeout`."""
    found = rows["status"].value_counts()
    return ", ".join(f"{count} {status}" for status, count in found.items())


def confirmed_of(rows: pd.DataFrame) -> list[Confirmed]:
    """The confirmed candidates of a cell, unless its kernel has been measured anew since.

    Args:
        rows: of one cell, over all its stages and seeds, in the order of the table.
    """
    timed = rows[rows["stage"].isin(["screen", "confirm"])]
    if timed.empty:
        return []
    return confirmed(timed[timed["kernel"] == timed["kernel"].iloc[-1]])


def best_of(rows: pd.DataFrame) -> Best | None:
    """The best of a cell: its first confirmed candidate, else its first screened one.

    Args:
        rows: measured rows of one problem, ranks, rank mode, recipe, routing and token count.
    """
    found = confirmed_of(rows)
    if found:
        return best_confirmed(found[0])
    good = screened(rows)
    good = good[good["status"] == "ok"]
    return None if good.empty else best_screened(ranked(good, "measured").iloc[0])


def best_confirmed(one: Confirmed) -> Best:
    """A confirmed candidate as a `Best`."""
    rows, last = one.rows, one.rows.iloc[-1]
    return Best(
        stage="confirm",
        candidate=one.candidate,
        median_us=one.median_us,
        p10_us=one.p10_us,
        p90_us=one.p90_us,
        ratio_to_floor=one.ratio_to_floor,
        ratio_to_default=one.ratio_to_default,
        spread=one.spread,
        default_us=float(rows["baseline_us"].median()),
        yardstick_tflops=one.yardstick_tflops,
        num_rounds=one.num_observations,
        num_seeds=one.num_seeds,
        run=one.run,
        floor_us=float(rows["floor_us"].median()),
        tflops=float(rows["tflops"].median()),
        hbm_gbs=float(rows["hbm_gbs"].median()),
        kernel=str(last["kernel"]),
        commit=str(last["commit"]),
        card=str(last["card"]),
    )


def best_screened(row: Any) -> Best:
    """A screened row as a `Best`."""
    return Best(
        stage="screen",
        candidate=str(row["candidate"]),
        median_us=float(row["median_us"]),
        p10_us=float(row["p10_us"]),
        p90_us=float(row["p90_us"]),
        floor_us=float(row["floor_us"]),
        ratio_to_floor=float(row["ratio_to_floor"]),
        ratio_to_default=float(row["ratio_to_baseline"]),
        spread=float("nan"),
        default_us=float(row["baseline_us"]),
        yardstick_tflops=float(row["yardstick_tflops"]),
        tflops=float(row["tflops"]),
        hbm_gbs=float(row["hbm_gbs"]),
        num_rounds=1,
        num_seeds=1,
        run=str(row["run"]),
        kernel=str(row["kernel"]),
        commit=str(row["commit"]),
        card=str(row["card"]),
    )


def benched(rows: pd.DataFrame) -> pd.DataFrame:
    """The bench of each baseline: a row a baseline, of the version, schedule, kernel and card that
    were timed last. Rows of several seeds or runs are joined.

    Returns:
        Columns baseline, baseline_version, candidate, kernel, card, BENCH_NUMBERS (medians over
        its rows; ratio_to_baseline of ratios that were taken within a run each), n (rows).
    """
    timed = rows[
        (rows["stage"] == "bench") & (rows["status"] == "ok") & rows["ratio_to_baseline"].notna()
    ]
    out = []
    for name, own in timed.groupby("baseline", sort=True):
        last = own.iloc[-1]
        keys = ["baseline_version", "candidate", "kernel", "card"]
        same = own[(own[keys] == last[keys]).all(axis=1)]
        out.append(
            {
                "baseline": str(name),
                **{key: str(last[key]) for key in keys},
                **{number: float(same[number].median()) for number in BENCH_NUMBERS},
                "n": len(same),
            }
        )
    return pd.DataFrame(out)


# ---- the built-in default


def problem_of_row(row: Mapping[str, Any] | pd.Series[Any]) -> Problem | None:
    """The layer of a row as it ran; None if its sizes are none of a layer."""
    names = ("num_ranks", "hidden", "intermediate", "num_local_experts", "num_topk")
    try:
        return _problem(str(row["problem"]), str(row["rank_mode"]), *(int(row[n]) for n in names))
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=64)
def _problem(
    name: str, mode: str, ranks: int, hidden: int, intermediate: int, experts: int, topk: int
) -> Problem:
    whole = Problem(
        name=name,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts * ranks,
        num_topk=topk,
        num_ranks=ranks,
    )
    return whole.one_rank() if mode == "one" else whole


def default_name(row: Mapping[str, Any] | pd.Series[Any]) -> str:
    """The candidate that is the built-in default of a row's cell; empty if it has none."""
    problem = problem_of_row(row)
    if problem is None:
        return ""
    gpu_ranks = int(row["num_ranks"]) if row["rank_mode"] == "virtual" else 1
    try:
        recipe = Recipe.parse(str(row["recipe"]))
        return default_of(problem, int(row["num_tokens"]), recipe, gpu_ranks).name
    except (TypeError, ValueError):
        return ""
