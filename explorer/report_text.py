"""The ranked tables of `tl-megamoe report` as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import FrozenFile

from .evidence import MIN_OBSERVATIONS, MIN_SEEDS
from .glossary import MEDIANS, NAME
from .ranking import (
    CELL,
    GROUP,
    benched,
    best_of,
    confirmed_of,
    default_name,
    ranked,
    ranking_columns,
    screened,
    status_counts,
)
from .sections import frozen_file, frozen_of, which_ran

MEASURED_COLUMNS = {
    "candidate": "candidate",
    "median_us": "median us",
    "p10_us": "p10",
    "p90_us": "p90",
    "ratio_to_floor": "/ floor",
    "ratio_to_baseline": "/ default",
    "tflops": "TFLOP/s",
    "hbm_gbs": "GB/s",
    "nvlink_gbs": "NVLink GB/s",
    "yardstick_tflops": "yardstick TFLOP/s",
}
MODEL_COLUMNS = {
    "candidate": "candidate",
    "predicted_us": "predicted us",
    "registers": "registers",
    "spill_bytes": "spills",
    "smem_bytes": "smem",
    "num_wgmma": "wgmma",
}


@dataclass(frozen=True, slots=True)
class Marks:
    """What the names of a cell's candidates are marked with.

    Attributes:
        default: the built-in default of the cell; empty if unknown.
        frozen: what is frozen for it now; empty if nothing.
    """

    default: str
    frozen: str

    def of(self, candidate: str) -> str:
        """A candidate's name with its marks."""
        found = ((self.default, " (default)"), (self.frozen, " (frozen)"))
        return candidate + "".join(mark for name, mark in found if name == candidate)


def render(frame: pd.DataFrame, top: int = 10, schedules: Path | None = None) -> str:
    """The report as text: ranked tables a cell, then the best of each cell.

    Args:
        frame: rows of any problems and ranks; each gets tables of its own.
        top: candidates shown of each table.
        schedules: folder of the frozen files; the package's when None.
    """
    groups = [
        _render_group(rows, top, {d: frozen_file(schedules, d, rows) for d in set(rows["device"])})
        for _, rows in frame.groupby(GROUP, sort=True)
    ]
    measured = (frame["source"] == "measured").any()
    head = [f"{MEDIANS} Times in us; `/ x` is the time over that of x.\n"] if measured else []
    return "\n".join([*head, "\n\n".join(groups), "", f"Names of schedules: {NAME}."])


def _render_group(frame: pd.DataFrame, top: int, files: Mapping[str, FrozenFile | None]) -> str:
    parts, best = [], []
    keys = [name for name in CELL if name != "seed"]
    for values, rows in frame.groupby(keys, sort=True):
        cell: dict[str, Any] = dict(zip(keys, values, strict=True))
        first = rows.iloc[0]
        frozen = frozen_of(files[str(first["device"])], first, int(first["num_tokens"]))
        marks = Marks(default_name(first), frozen.candidate if frozen else "")
        parts.append(_title(cell, first))
        if cell["source"] == "measured":
            parts += _confirmed_parts(rows, top, marks)
        parts += _screen_parts(rows, str(cell["source"]), top, marks)
        parts += _bench_parts(rows, marks)
        parts.append("")
        line = _best_line(cell, rows, marks)
        if line:
            best.append(line)
    if len(best) > 1:
        parts += ["Best of each cell", *best]
    return "\n".join(parts).rstrip()


def _title(cell: dict[str, Any], first: Any) -> str:
    measured = cell["source"] == "measured"
    return (
        f"{first['problem']}, {cell['num_tokens']} tokens, {first['num_ranks']} ranks "
        f"({first['rank_mode']}), {cell['routing']} routing, {cell['phase']}, {cell['recipe']}, "
        f"{'measured on' if measured else 'source=model, not measured:'} {cell['device']}"
    )


def _numbered(table: pd.DataFrame) -> str:
    table.index = pd.RangeIndex(1, len(table) + 1)
    return table.to_string(float_format=lambda v: f"{v:.4g}", na_rep="-")


def _failure_lines(rows: pd.DataFrame, top: int) -> list[str]:
    """Why rows are not `ok`, the rarest reason first, since the commonest is known to all.

    A duplicate is no failure and only counted.
    """
    failures = rows[~rows["status"].isin(["ok", "duplicate"])]
    groups = [
        (len(own), str(status), str(reason), str(own["candidate"].iloc[0]))
        for (status, reason), own in failures.groupby(["status", "reason"], sort=True)
    ]
    lines = [
        f"  {status}: {name}{f' and {count - 1} more' if count > 1 else ''}: {reason[:120]}"
        for count, status, reason, name in sorted(groups)
    ]
    left = len(lines) - top
    return lines[:top] + ([f"  {left} other reasons"] if left > 0 else [])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _confirmed_parts(rows: pd.DataFrame, top: int, marks: Marks) -> list[str]:
    timed = rows[rows["stage"] == "confirm"]
    if timed.empty:
        return []
    found = confirmed_of(rows)
    if not found:
        return [
            f"confirm: {_counted(len(timed), 'row')} of "
            f"{_counted(timed['candidate'].nunique(), 'candidate')}, none of this kernel with "
            f"{MIN_OBSERVATIONS} observations of {MIN_SEEDS} seeds each",
            *_failure_lines(timed, top),
        ]
    first = found[0]
    run = timed[timed["run"] == first.run]
    shown = [
        {
            "candidate": marks.of(one.candidate),
            "median us": one.median_us,
            "p10": one.p10_us,
            "p90": one.p90_us,
            "/ floor": one.ratio_to_floor,
            "/ default": one.ratio_to_default,
            "spread": float("nan") if one.candidate == marks.default else one.spread,
            "yardstick TFLOP/s": one.yardstick_tflops,
        }
        for one in found[:top]
    ]
    return [
        f"confirm: {_counted(len(found), 'candidate')}, {first.num_observations} rounds over "
        f"{first.num_seeds} seeds{f' in run {first.run}' if first.run else ''}; "
        "ranked by / default, the median over the rounds; spread: its deviation from round to "
        "round",
        _numbered(pd.DataFrame(shown)),
        *_failure_lines(run, top),
    ]


def _screen_parts(rows: pd.DataFrame, source: str, top: int, marks: Marks) -> list[str]:
    parts = []
    columns = MEASURED_COLUMNS if source == "measured" else MODEL_COLUMNS
    found = screened(rows)
    for seed, own in found.groupby("seed", sort=True):
        ordered = ranked(own, source)
        good = ordered[ordered["status"] == "ok"]
        by = ranking_columns(good, source)[0]
        seed_text = f", seed {seed}" if found["seed"].nunique() > 1 else ""
        text = f"screen{seed_text}: {_counted(len(own), 'candidate')}: {status_counts(ordered)}"
        if source == "measured" and good["floor_us"].notna().any():
            text += f"; floor {good['floor_us'].iloc[0]:.1f} us"
        parts.append(f"{text}; ranked by {columns.get(by, by)}" if len(good) else text)
        if len(good):
            held = [c for c in columns if c != "nvlink_gbs" or good[c].notna().any()]
            shown = good.head(top)[held].rename(columns=columns)
            parts.append(_numbered(shown.assign(candidate=shown["candidate"].map(marks.of))))
        parts += _failure_lines(ordered, top)
    return parts


def _bench_parts(rows: pd.DataFrame, marks: Marks) -> list[str]:
    parts = []
    found = benched(rows).to_dict("records")
    shown = [
        {
            "baseline": f"{row['baseline']} {row['baseline_version']}".strip(),
            "n": row["n"],
            "our us": row["median_us"],
            "p10": row["p10_us"],
            "p90": row["p90_us"],
            "/ floor": row["ratio_to_floor"],
            "yardstick TFLOP/s": row["yardstick_tflops"],
            "watts": row["power_w"],
            "its us": row["baseline_us"],
            "ours / its": row["ratio_to_baseline"],
            "our schedule": marks.of(row["candidate"]),
        }
        for row in found
    ]
    if shown:
        ran = {which_ran(row["candidate"], marks.frozen) for row in found}
        parts.append(
            f"bench: {'; '.join(sorted(ran))} beside others, medians over n rows (seeds); a "
            "run of its own: compare ours / its, not the times with those above (nor, closely, "
            "/ floor above about 512 tokens: it carries the noise of the yardstick)"
        )
        parts.append(_numbered(pd.DataFrame(shown)))
    bench = rows[rows["stage"] == "bench"]
    timed = set(bench.loc[bench["baseline_us"].notna(), "baseline"]) | {""}
    for name in sorted(set(bench["baseline"]) - timed):
        notes = bench.loc[bench["baseline"] == name, "notes"].iloc[-1]
        parts.append(f"bench: no time of {name}: {notes[:120]}")
    return parts + _failure_lines(bench, len(rows))


def _best_line(cell: dict[str, Any], rows: pd.DataFrame, marks: Marks) -> str:
    tokens = f"  {cell['num_tokens']:>6} tokens  "
    if cell["source"] == "measured":
        best = best_of(rows)
        if best is None:
            return ""
        held = best.ratio_to_floor == best.ratio_to_floor
        floor = f", {best.ratio_to_floor:.3f} of the floor" if held else ""
        word = "confirmed" if best.stage == "confirm" else "screened"
        return f"{tokens}{best.median_us:.1f} us{floor}  {marks.of(best.candidate)}  ({word})"
    good = screened(rows)
    good = good[good["status"] == "ok"]
    if good.empty:
        return ""
    row = ranked(good, "model").iloc[0]
    return f"{tokens}predicted {row['predicted_us']:.1f} us  {marks.of(row['candidate'])}"
