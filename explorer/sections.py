"""What is known of a problem with one number of ranks, recipe and routing, for a results page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import FrozenFile, read_frozen, schedules_root

from . import figures
from .document import slug
from .freeze import whole_sizes
from .ranking import Best, benched, best_of, by_tokens, problem_of_row, screened
from .schema import SCHEDULE_COLUMNS

SETTING = ["num_ranks", "rank_mode", "recipe", "routing", "phase", "source"]
"""What rows of a problem must share to stand in one section."""
TIMED_PER_STAMP = 3
"""Rows with one time stamp up to which the stamps order a run; else rows were written in bulk."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """What the frozen file has for a token count; its numbers are None where it has none."""

    candidate: str
    median_us: float | None
    ratio_to_floor: float | None


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one setting and what is known of each token count.

    Attributes:
        problem: its name.
        setting: values of SETTING.
        rows: all its rows.
        best: token count -> the best.
        bench: token count -> rows of `ranking.benched`.
        frozen: token count -> what serves it.
    """

    problem: str
    setting: dict[str, Any]
    rows: pd.DataFrame
    best: dict[int, Best]
    bench: dict[int, pd.DataFrame]
    frozen: dict[int, Frozen]

    @property
    def title(self) -> str:
        """The setting in words."""
        s = self.setting
        ranks = f"one rank of {s['num_ranks']}"
        if s["rank_mode"] != "one":
            ranks = f"{s['num_ranks']} {s['rank_mode']} ranks"
        phase = "" if s["phase"] == "fused" else f", phase {s['phase']} alone"
        model = "" if s["source"] == "measured" else ", by the cost model"
        return f"{ranks}, recipe {s['recipe']}, {s['routing']} routing{phase}{model}"

    def frozen_name(self, tokens: int) -> str:
        """The candidate that is frozen for a token count; empty if none is."""
        found = self.frozen.get(tokens)
        return found.candidate if found else ""

    @property
    def name(self) -> str:
        """Part of its figures' file names."""
        s = self.setting
        parts = [f"{s['num_ranks']}{s['rank_mode']}", s["recipe"], s["routing"]]
        return slug("-".join([*parts, *([] if s["phase"] == "fused" else [s["phase"]])]))


def sections_of(problem: str, frame: pd.DataFrame, frozen: FrozenFile | None) -> list[Section]:
    """The sections of a problem's rows, those with most rows of a rank count first."""
    out = []
    for values, rows in frame.groupby(SETTING, sort=True):
        setting = dict(zip(SETTING, values, strict=True))
        best, bench = {}, {}
        for tokens, cell in by_tokens(rows[rows["source"] == "measured"]):
            found, beside = best_of(cell), benched(cell)
            if found is not None:
                best[tokens] = found
            if len(beside):
                bench[tokens] = beside
        counts = sorted({*best, *bench})
        serving = {t: f for t in counts if (f := frozen_of(frozen, setting, t)) is not None}
        out.append(Section(problem, setting, rows, best, bench, serving))
    return out


def frozen_file(root: Path | None, device: str, rows: pd.DataFrame) -> FrozenFile | None:
    """The frozen file of the layer of some rows; None if there is none of its name and sizes.

    Args:
        root: folder of the frozen files; the package's when None.
        device: for example `nvidia-h200`.
        rows: at least one, of one layer.
    """
    problem = problem_of_row(rows.iloc[0])
    if problem is None:
        return None
    path = (root or schedules_root()) / device / f"{problem.name}.json"
    if not path.is_file():
        return None
    file = read_frozen(path)
    return file if file.problem == whole_sizes(problem) else None


def which_ran(candidate: str, frozen: str) -> str:
    """Of a bench: whether our schedule is the one that is frozen now.

    Args:
        candidate: what ran.
        frozen: what is frozen now; empty if nothing is.
    """
    if not frozen:
        return "a schedule (none is frozen now)"
    return "the schedule frozen now" if candidate == frozen else "another schedule than is frozen"


def frozen_of(
    file: FrozenFile | None, setting: Mapping[str, Any] | pd.Series[Any], tokens: int
) -> Frozen | None:
    """What a frozen file has for a token count of a setting; its times only if of that setting."""
    if file is None or setting["phase"] != "fused":
        return None
    wanted = (setting["num_ranks"], setting["rank_mode"])
    mine = sorted(
        (e for e in file.entries if (e.num_ranks, e.rank_mode) == wanted),
        key=lambda e: e.max_tokens,
    )
    if not mine:
        return None
    entry = next((e for e in mine if tokens <= e.max_tokens), mine[-1])
    told = {"recipe": setting["recipe"], "routing": "uniform", **entry.evidence}
    cells: list[dict[str, Any]] = entry.evidence.get("cells") or [entry.evidence]
    cell = next((c for c in cells if c.get("num_tokens") == tokens), {})
    if (told["recipe"], told["routing"]) != (setting["recipe"], setting["routing"]):
        cell = {}
    return Frozen(entry.schedule.name, cell.get("median_us"), cell.get("ratio_to_floor"))


# ---- fields of schedules

Values = dict[str, dict[str, dict[int, list[float]]]]
"""Field -> value -> token count -> times over the default's."""


def sensitivity_of(rows: pd.DataFrame) -> Values:
    """Times over the default's of screened `ok` rows, by value of each field that varies."""
    good = screened(rows)
    good = good[(good["status"] == "ok") & good["ratio_to_baseline"].notna()]
    out: Values = {}
    for field in SCHEDULE_COLUMNS:
        values = sorted(set(good[field]))
        if len(values) < 2:
            continue
        out[field] = {
            str(value): {
                tokens: [float(r) for r in own["ratio_to_baseline"]]
                for tokens, own in by_tokens(good[good[field] == value])
            }
            for value in values
        }
    return out


# ---- the card during a run


def traces_of(frame: pd.DataFrame) -> list[figures.RunTrace]:
    """Readings over each run of a problem's measured rows, in the order of the table."""
    rows = frame[(frame["source"] == "measured") & frame["yardstick_tflops"].notna()]
    rows = rows.assign(name=run_names(rows))
    out = []
    for name, own in rows.groupby("name", sort=False):
        card = ", ".join(sorted(set(own["card"]) - {""}))
        out.append(
            figures.RunTrace(
                title=f"{name}{f', card {card}' if card else ''}",
                minutes=_minutes(own["measured_at"].tolist()),
                tokens=[int(t) for t in own["num_tokens"]],
                yardstick_tflops=own["yardstick_tflops"].tolist(),
                sm_clock_mhz=_under_load(own, "sm_clock_end_mhz", "sm_clock_mhz"),
                power_w=_under_load(own, "power_end_w", "power_w"),
            )
        )
    return out


def run_names(rows: pd.DataFrame) -> pd.Series[str]:
    """What a row's run is called: its id, or its kernel in rows that have none."""
    return rows["run"].where(rows["run"] != "", "kernel " + rows["kernel"].astype(str))


def _under_load(rows: pd.DataFrame, end: str, start: str) -> list[float]:
    return [float(v) for v in rows[end].fillna(rows[start])]


def _minutes(stamps: Sequence[str]) -> list[float] | None:
    """Minutes since the first stamp; None when rows were written in bulk, or a stamp is none."""
    if len(stamps) > TIMED_PER_STAMP * len(set(stamps)):
        return None
    try:
        times = [datetime.fromisoformat(stamp) for stamp in stamps]
        return [(time - times[0]).total_seconds() / 60 for time in times]
    except (ValueError, TypeError):
        return None
