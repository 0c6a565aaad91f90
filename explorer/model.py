"""`tl-megamoe model`: the cost model's constants, how well they rank, and a fit of them to results.

Only times of one run rank against each other: cards differ, and a card differs from day to day. So
rows come in groups (problem, tokens, run, card), correlations are those inside a group, and the fit
weighs how rows of a group differ more than what they have in common. Rows are those of the screen,
which covers the whole space (what is confirmed was chosen by its times), and of the kernel that a
table measured last. A card drifts within a run: where rows have a baseline, timed beside them, a
candidate's time is its ratio to that, in the group's median baseline.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .args import DEFAULT_RESULTS
from .constants import (
    BUILT_IN,
    HOME_DEVICE,
    MODEL_SCHEMA,
    Constants,
    constants_path,
    load_constants,
)
from .cost import predict

WITHIN, COMMON, PRIOR = 0.02, 0.05, 0.15
"""Spread that a fit takes for given, in log time or log constant: of rows inside a group (a time's
own noise), of a group's common factor (cards and days), of a constant around its built-in value.
The last keeps a constant that the rows say nothing about where it was."""
LEAST_ROWS = 5
"""Rows of a group that has a rank correlation."""
MAX_STEPS = 15
GROUP = ("problem", "num_tokens", "num_ranks", "recipe", "run", "card")
CHOSEN_ON = "deepseek-v4-flash"
"""The problem whose rows the model's terms were chosen on: its correlations are no forecast."""

Groups = list["Group"]


@dataclass(frozen=True, slots=True)
class Point:
    """What a prediction depends on."""

    problem: Problem
    schedule: Schedule
    num_tokens: int
    recipe: Recipe

    def log_us(self, constants: Constants) -> float:
        """Logarithm of the predicted time."""
        found = predict(
            self.problem, self.schedule, self.num_tokens, recipe=self.recipe, constants=constants
        )
        return math.log(found.total_us)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose times compare: one problem, token count, run and card.

    Attributes:
        points: one a candidate.
        log_us: logarithm of the time of each in microseconds: the median over its rows of
            `ratio_to_baseline` times the group's median `baseline_us`, or of `median_us` where a
            row has no baseline.
        num_rows: rows of the table that it stands for.
    """

    problem: str
    num_tokens: int
    kernel: str
    commits: tuple[str, ...]
    points: tuple[Point, ...]
    log_us: tuple[float, ...]
    num_rows: int


@dataclass(frozen=True, slots=True)
class Score:
    """How a set of constants does on groups.

    Attributes:
        correlation: Spearman's: the mean over cells (problem, tokens), a cell's the mean over its
            groups; NaN without a group of `LEAST_ROWS` candidates.
        error: median over candidates of |predicted / measured - 1|.
    """

    correlation: float
    error: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Measured rows of whole layers that no group holds.

    Attributes:
        layers: rows of several ranks or of routings other than uniform: the model would need the
            rows that each expert received, which a table does not hold.
        stages: rows of confirmations and benches.
        kernels: rows of the screen of other kernels than the table's last.
    """

    layers: int = 0
    stages: int = 0
    kernels: int = 0

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(
            self.layers + other.layers, self.stages + other.stages, self.kernels + other.kernels
        )

    def __str__(self) -> str:
        said = (
            (self.kernels, "of earlier kernels"),
            (self.stages, "of other stages"),
            (self.layers, "of several ranks or other routings"),
        )
        return ", ".join(f"{number} rows {what}" for number, what in said if number)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants, and how they do on what they were fitted to and on what was held out."""

    constants: Constants
    before: Score
    after: Score
    held_out: Score
    held_out_by: str


def read_groups(results: Path, device: str) -> tuple[Groups, LeftOut]:
    """The screened whole layers of a device, and how many measured rows were left out.

    Raises:
        ValueError: the device has no table with such rows.
    """
    from .table import read_table

    groups: Groups = []
    left_out = LeftOut()
    for path in sorted((results / device).glob("*.csv")):
        if path.name == "summary.csv":
            continue
        frame = read_table(path)
        found = (frame["source"] == "measured") & (frame["status"] == "ok")
        frame = frame[found & (frame["phase"] == "fused")]
        alone = frame[(frame["rank_mode"] == "one") & (frame["routing"] == "uniform")]
        screen = alone[alone["stage"] == "screen"]
        # Rows without a time come before those with one; among equals the last one written counts.
        newest = screen.sort_values("measured_at", kind="stable")["kernel"].iloc[-1:]
        last = screen[screen["kernel"].isin(newest)]
        left_out += LeftOut(
            len(frame) - len(alone), len(alone) - len(screen), len(screen) - len(last)
        )
        groups += _groups_of(last)
    if not groups:
        raise ValueError(
            "no measured rows of a whole layer (stage screen, one rank, uniform routing) in "
            f"{results / device}. Measure some with: tl-megamoe search"
        )
    return groups, left_out


def _groups_of(frame: pd.DataFrame) -> Iterator[Group]:
    names = list(Schedule().to_dict())
    for _, rows in frame.groupby(list(GROUP), sort=True):
        first = rows.iloc[0]
        problem = Problem(
            name=str(first["problem"]),
            hidden=int(first["hidden"]),
            intermediate=int(first["intermediate"]),
            num_experts=int(first["num_local_experts"]),
            num_topk=int(first["num_topk"]),
            num_ranks=1,
        )
        points, times = [], []
        steady = rows["ratio_to_baseline"] * float(rows["baseline_us"].median())
        for _, same in rows.groupby("candidate", sort=True):
            values = {
                n: str(v) if isinstance(v, str) else int(v) for n, v in same.iloc[0][names].items()
            }
            schedule = Schedule.from_dict({str(n): v for n, v in values.items()})
            recipe = Recipe.parse(str(first["recipe"]))
            points.append(Point(problem, schedule, int(first["num_tokens"]), recipe))
            us = steady[same.index] if steady.notna().all() else same["median_us"]
            times.append(math.log(float(us.median())))
        yield Group(
            problem=problem.name,
            num_tokens=int(first["num_tokens"]),
            kernel=str(first["kernel"]),
            commits=tuple(sorted(set(rows["commit"].astype(str)))),
            points=tuple(points),
            log_us=tuple(times),
            num_rows=len(rows),
        )


class Predictions:
    """Predictions of the points of some groups, each distinct point once."""

    def __init__(self, groups: Groups):
        self.groups = groups
        self._points = list(dict.fromkeys(p for group in groups for p in group.points))

    def log_us(self, constants: Constants) -> list[list[float]]:
        """Logarithms of the predicted times, a list a group."""
        found = {point: point.log_us(constants) for point in self._points}
        return [[found[p] for p in group.points] for group in self.groups]


@dataclass(slots=True)
class Judged:
    """What scores are made of: the groups' correlations, a list a cell, and candidates' errors."""

    cells: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)

    def add(self, groups: Groups, constants: Constants) -> None:
        """Judge constants on groups."""
        for group, found in zip(groups, Predictions(groups).log_us(constants), strict=True):
            pairs = zip(found, group.log_us, strict=True)
            self.errors += [abs(math.expm1(f - t)) for f, t in pairs]
            rho = spearman(found, group.log_us)
            if not math.isnan(rho):
                self.cells.setdefault((group.problem, group.num_tokens), []).append(rho)

    def score(self) -> Score:
        """The means over cells, and the median error."""
        means = [fmean(values) for values in self.cells.values()]
        return Score(fmean(means) if means else math.nan, median(self.errors))


def score(groups: Groups, constants: Constants) -> Score:
    """Rank correlation and error of constants on groups."""
    judged = Judged()
    judged.add(groups, constants)
    return judged.score()


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN for few values or values that are all the same."""
    if len(a) < LEAST_ROWS or len(set(a)) == 1 or len(set(b)) == 1:
        return math.nan
    # Predictions that differ in their last bits tie.
    ranks = [pd.Series(values, dtype=float).round(9).rank() for values in (a, b)]
    return float(ranks[0].corr(ranks[1]))


def fit(groups: Groups) -> Constants:
    """Constants that fit groups: least squares of log times, bounded, with a robust loss.

    Raises:
        ValueError: scipy is not installed.
    """
    try:
        import numpy as np
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ValueError(f"a fit needs scipy ({error}): pip install 'tl_megamoe[model]'") from error
    bounds = Constants.bounds()
    start = np.log([getattr(BUILT_IN, name) for name in bounds])
    predictions = Predictions(groups)

    def constants_at(logs: Any) -> Constants:
        values = zip(bounds, np.exp(logs).tolist(), strict=True)
        return replace(BUILT_IN, **dict(values))

    def residuals(logs: Any) -> Any:
        parts = [(logs - start) / PRIOR]
        for group, found in zip(groups, predictions.log_us(constants_at(logs)), strict=True):
            off = np.array(found) - np.array(group.log_us)
            parts.append((off - off.mean()) / WITHIN)
            parts.append(np.array([off.mean() / COMMON * math.sqrt(len(found))]))
        return np.concatenate(parts)

    low, high = (np.log([pair[k] for pair in bounds.values()]) for k in (0, 1))
    found = least_squares(
        residuals,
        np.clip(start, low, high),
        bounds=(low, high),
        loss="soft_l1",
        diff_step=1e-3,
        ftol=1e-4,
        max_nfev=MAX_STEPS,
    )
    rounded = {k: float(f"{v:.5g}") for k, v in asdict(constants_at(found.x)).items()}
    return Constants(**rounded)


def fit_and_judge(groups: Groups, on_fit: Callable[[int, int], None] | None = None) -> Fitted:
    """Fit to all groups, and judge the method on groups that a fit has not seen.

    With several problems each is left out once, with one each of its token counts.

    Args:
        groups: from `read_groups`.
        on_fit: told the number of finished fits and of all.

    Raises:
        ValueError: as `fit`, or one problem at one token count: nothing can be held out.
    """
    by, key = "problem", [group.problem for group in groups]
    if len(set(key)) == 1:
        by, key = "token count", [str(group.num_tokens) for group in groups]
    parts = sorted(set(key))
    if len(parts) == 1:
        raise ValueError(
            f"measured rows of one problem ({groups[0].problem}) at one token count "
            f"({groups[0].num_tokens}) only: a fit to them could not be judged. Search more counts."
        )
    tell = on_fit or (lambda done, total: None)
    total = len(parts) + 1
    tell(0, total)
    constants = fit(groups)
    tell(1, total)
    held_out = Judged()
    for number, part in enumerate(parts, 2):
        seen = [g for g, k in zip(groups, key, strict=True) if k != part]
        unseen = [g for g, k in zip(groups, key, strict=True) if k == part]
        held_out.add(unseen, fit(seen))
        tell(number, total)
    before, after = score(groups, BUILT_IN), score(groups, constants)
    return Fitted(constants, before, after, held_out.score(), by)


def write_constants(fitted: Fitted, groups: Groups, device: str, root: Path | None = None) -> Path:
    """Write schedules/model/<device>.json as a whole, with where the constants come from."""
    from .table import write_atomically

    path = constants_path(device, root)
    tables = {}
    for name in sorted({g.problem for g in groups}):
        own = [g for g in groups if g.problem == name]
        tables[f"results/{device}/{name}.csv"] = {
            "rows": sum(g.num_rows for g in own),
            "tokens": sorted({g.num_tokens for g in own}),
            "kernels": sorted({g.kernel for g in own}),
            "commits": sorted({c for g in own for c in g.commits}),
        }
    provenance = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "rows": sum(g.num_rows for g in groups),
        "tables": tables,
        "rank_correlation": {
            "before": _rounded(fitted.before.correlation),
            "after": _rounded(fitted.after.correlation),
            "held_out": _rounded(fitted.held_out.correlation),
            "held_out_by": fitted.held_out_by,
        },
        "median_error": {
            "before": _rounded(fitted.before.error),
            "after": _rounded(fitted.after.error),
            "held_out": _rounded(fitted.held_out.error),
        },
    }
    data = {
        "schema": MODEL_SCHEMA,
        "device": path.stem,
        "constants": asdict(fitted.constants),
        "provenance": provenance,
    }
    write_atomically(path, json.dumps(data, indent=2) + "\n")
    return path


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


# ---- the command


def add_parser(add: Callable[..., Any]) -> None:
    """Register the verb; `add` makes a sub-parser from a name, a function and a text."""
    parser = add("model", run_model, "Show the cost model's constants; fit them to results.")
    parser.add_argument("--fit", action="store_true", help="fit the constants (needs scipy)")
    parser.add_argument(
        "--write", action="store_true", help="with --fit: write schedules/model/<device>.json"
    )
    parser.add_argument(
        "--results", type=Path, default=DEFAULT_RESULTS, help="results folder (results)"
    )
    parser.add_argument("--device", default=HOME_DEVICE, help=f"({HOME_DEVICE})")
    parser.add_argument("--schedules", type=Path, help="folder of the frozen files")


def run_model(args: argparse.Namespace) -> int:
    """Print constants and scores; with --fit, fit first."""
    if args.write and not args.fit:
        raise ValueError("--write writes the constants of a fit: add --fit")
    path = constants_path(args.device, args.schedules)
    current = load_constants(args.device, args.schedules)
    if not args.fit:
        print(f"constants: {path if path.exists() else 'built in, none were fitted'}")
        _print_constants({"built in": BUILT_IN, "in use": current}, explain=True)
        try:
            groups, left_out = read_groups(args.results, path.stem)
        except ValueError as error:
            print(f"tl-megamoe: no correlations: {error}", file=sys.stderr)
            return 0
        _print_scores(groups, left_out, {"built in": BUILT_IN, "in use": current})
        return 0
    groups, left_out = read_groups(args.results, path.stem)

    def say(done: int, total: int) -> None:
        end = "\n" if done == total else "\r"
        print(f"fit {min(done + 1, total)} of {total}", end=end, file=sys.stderr, flush=True)

    fitted = fit_and_judge(groups, say)
    _print_constants({"built in": BUILT_IN, "fitted": fitted.constants}, explain=False)
    _print_scores(groups, left_out, {"before": BUILT_IN, "after": fitted.constants})
    print(
        f"held out, each {fitted.held_out_by} once: rank correlation "
        f"{fitted.held_out.correlation:.3f}, error {100 * fitted.held_out.error:.1f} %"
    )
    if not args.write:
        return 0
    if fitted.held_out.correlation < fitted.before.correlation:
        print(
            f"tl-megamoe: not written: what the fit has not seen it ranks at "
            f"{fitted.held_out.correlation:.3f}, the built-in constants at "
            f"{fitted.before.correlation:.3f}; the ranking orders the screen, so they stay",
            file=sys.stderr,
        )
        return 1
    in_use = score(groups, current)
    if not (fitted.after.correlation > in_use.correlation or fitted.after.error < in_use.error):
        print(
            f"tl-megamoe: not written: the constants in use rank ({in_use.correlation:.3f}) and "
            f"predict ({100 * in_use.error:.1f} %) these rows no worse than the fitted ones",
            file=sys.stderr,
        )
        return 1
    print(write_constants(fitted, groups, path.stem, args.schedules))
    return 0


def _print_constants(sets: dict[str, Constants], *, explain: bool) -> None:
    print(f"{'constant':<18}" + "".join(f"{name:>10}" for name in sets) + "  unit")
    for name, (unit, text) in Constants.describe().items():
        values = "".join(f"{getattr(constants, name):>10.5g}" for constants in sets.values())
        print(f"{name:<18}{values}  {unit:<6}  {text if explain else ''}".rstrip())


def _print_scores(groups: Groups, left_out: LeftOut, sets: dict[str, Constants]) -> None:
    first, second = sets
    print(
        "\nSpearman's rank correlation of predicted and measured times inside a run, and the "
        "median error.\nRows of stage screen, of the kernel that each table measured last; means "
        "of correlations over token counts\n"
        f"{'problem':<20}{'tokens':>7}{'rows':>6}{'candidates':>12}"
        f"{first:>10}{second:>10}{first:>12}{second:>10}"
    )
    for problem in sorted({g.problem for g in groups}):
        own = [g for g in groups if g.problem == problem]
        for tokens in sorted({g.num_tokens for g in own}):
            _print_score(problem, tokens, [g for g in own if g.num_tokens == tokens], sets)
        note = "  (terms chosen on it)" if problem == CHOSEN_ON else ""
        _print_score(problem, "mean", own, sets, note)
    _print_score("all", "mean", groups, sets)
    kernels = sorted({g.kernel for g in groups})
    print(f"kernel {', '.join(kernels)}" + (f"; not in it: {left_out}" if str(left_out) else ""))


def _print_score(
    problem: str, tokens: int | str, groups: Groups, sets: dict[str, Constants], note: str = ""
) -> None:
    scores = [score(groups, constants) for constants in sets.values()]
    rho = "".join(f"{s.correlation:>10.3f}" for s in scores)
    error = "".join(
        f"{100 * s.error:>{width}.1f} %" for s, width in zip(scores, (10, 8), strict=True)
    )
    rows, candidates = sum(g.num_rows for g in groups), sum(len(g.points) for g in groups)
    print(f"{problem:<20}{tokens:>7}{rows:>6}{candidates:>12}{rho}{error}{note}")
