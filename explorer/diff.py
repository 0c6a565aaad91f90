"""Two tables of one device side by side: what changed from A to B, and whether it exceeds noise.

A thing is faster or slower only if its time and its ratio to the floor both changed by more than
the noise, in one direction. Neither is enough alone: the time depends on how warm the card was, and
the ratio, where multiplications decide the floor (about above 512 tokens), on the yardstick, the
highest of its round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from .evidence import MIN_OBSERVATIONS, robust_deviation
from .ranking import GROUP, Best, best_confirmed, best_of, best_screened, confirmed_of, screened
from .table import read_table

SETTING = [*GROUP, "recipe", "routing", "phase"]
"""What must be equal, beside the token count, for two rows to compare."""
SIZES = ["hidden", "intermediate", "num_local_experts", "num_topk"]
VERDICTS = ("faster", "slower", "unclear", "unchanged", "unknown")
"""What is said of a change; `unknown` where a side has no ratio to the floor or no noise."""
IDENTITY = {
    "card": "cards",
    "kernel": "kernels",
    "commit": "commits",
    "tilelang": "tilelang",
    "nvcc": "nvcc",
    "torch": "torch",
    "driver": "drivers",
}
LEGEND = (
    "faster, slower: us and / floor both changed by more than the noise, in one direction; "
    "unchanged: neither did",
    "unclear: one changed and the other did not, or in the other direction: the yardsticks of the "
    "runs differ. Above about 512 tokens the floor is the yardstick's, the highest of its round, "
    "so / floor carries its noise",
    "noise: of both sides. A confirmed candidate: two standard errors of its median over the "
    "rounds. A screened row: half of p10 to p90, or twice the deviation from round to round of the "
    "candidates that the tables confirmed in that cell if that is more",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing in A and in B.

    Attributes:
        time: new time over old, minus 1.
        ratio: the same of `ratio_to_floor`; NaN where a side has none.
        noise: how large a change of either may be without meaning; that of both sides.
    """

    old: Best
    new: Best
    time: float
    ratio: float
    noise: float

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.ratio != self.ratio or self.noise != self.noise:
            return "unknown"
        beyond = [abs(part) > self.noise for part in (self.time, self.ratio)]
        if not any(beyond):
            return "unchanged"
        if not all(beyond) or self.time * self.ratio < 0:
            return "unclear"
        return "faster" if self.ratio < 0 else "slower"


@dataclass(frozen=True, slots=True)
class CellDiff:
    """A cell of both tables.

    Attributes:
        setting: values of SETTING and `num_tokens`.
        best: the best of A against the best of B; None where a side has no `ok` row.
        candidates: candidates that are `ok` in both: faster and slower ones first, then unclear
            ones, each by the size of the change of the ratio.
        statuses: candidate -> (status in A, status in B), where they differ.
        only_old, only_new: candidates of one table alone.
    """

    setting: dict[str, Any]
    best: Change | None
    candidates: list[Change]
    statuses: dict[str, tuple[str, str]]
    only_old: list[str]
    only_new: list[str]


@dataclass(frozen=True, slots=True)
class Diff:
    """Two tables of one device.

    Attributes:
        device: the device.
        identity: column -> values of A and of B, where they differ (IDENTITY).
        cells: the cells of both.
        cells_only_old, cells_only_new: settings with token counts that one table has alone.
    """

    device: str
    identity: dict[str, tuple[list[str], list[str]]]
    cells: list[CellDiff]
    cells_only_old: list[str]
    cells_only_new: list[str]


def read_side(path: Path) -> pd.DataFrame:
    """The rows of a table that must be there.

    Raises:
        ValueError: there is no file, no row in it, or it is not a table.
    """
    if not path.is_file():
        raise ValueError(f"--diff {path}: there is no such file; name two results tables (.csv)")
    frame = read_table(path)
    if frame.empty:
        raise ValueError(f"--diff {path}: the table has no rows")
    return frame


def compare(old: pd.DataFrame, new: pd.DataFrame) -> Diff:
    """What changed from one table to another.

    Args:
        old: rows of A.
        new: rows of B.

    Raises:
        ValueError: the tables are of different devices, have no problem in common, or a problem
            has other sizes in one than in the other.
    """
    device = _one_device(old, new)
    _check_problems(old, new)
    old, new = (side[side["source"] == "measured"] for side in (old, new))
    sides = [_by_cell(old), _by_cell(new)]
    common = [key for key in sides[0] if key in sides[1]]
    used = [
        pd.concat([side[key] for key in common]) if common else frame
        for side, frame in zip(sides, (old, new), strict=True)
    ]
    identity = {}
    for name in IDENTITY:
        found = [sorted(set(side[name]) - {""}) for side in used]
        if found[0] != found[1]:
            identity[name] = (found[0], found[1])
    return Diff(
        device=device,
        identity=identity,
        cells=[_cell_diff(key, sides[0][key], sides[1][key]) for key in sorted(common)],
        cells_only_old=[_words(key) for key in sorted(sides[0]) if key not in sides[1]],
        cells_only_new=[_words(key) for key in sorted(sides[1]) if key not in sides[0]],
    )


def _one_device(old: pd.DataFrame, new: pd.DataFrame) -> str:
    devices = [sorted(set(side["device"])) for side in (old, new)]
    if devices[0] != devices[1] or len(devices[0]) != 1:
        raise ValueError(
            f"--diff compares tables of one device; A is of {', '.join(devices[0])} and B of "
            f"{', '.join(devices[1])}: times of different devices do not compare"
        )
    return str(devices[0][0])


def _check_problems(old: pd.DataFrame, new: pd.DataFrame) -> None:
    problems = [sorted(set(side["problem"])) for side in (old, new)]
    if not set(problems[0]) & set(problems[1]):
        raise ValueError(
            f"--diff compares tables of one problem; A has {', '.join(problems[0])} and B has "
            f"{', '.join(problems[1])}"
        )
    keys = [*GROUP, *SIZES]
    sizes = [
        {tuple(row[:3]): tuple(row[3:]) for row in side[keys].drop_duplicates().itertuples(False)}
        for side in (old, new)
    ]
    for key in sizes[0].keys() & sizes[1].keys():
        if sizes[0][key] != sizes[1][key]:
            told = [
                ", ".join(f"{n}={v}" for n, v in zip(SIZES, side[key], strict=True))
                for side in sizes
            ]
            raise ValueError(
                f"--diff: problem {key[0]!r} is another one in each table: A has {told[0]}; B has "
                f"{told[1]}"
            )


def _by_cell(frame: pd.DataFrame) -> dict[tuple[Any, ...], pd.DataFrame]:
    return {tuple(key): rows for key, rows in frame.groupby([*SETTING, "num_tokens"], sort=True)}


def _cell_diff(key: tuple[Any, ...], old: pd.DataFrame, new: pd.DataFrame) -> CellDiff:
    bests = [best_of(side) for side in (old, new)]
    known = [_candidates(side) for side in (old, new)]
    rounds = max(_round_noise(old), _round_noise(new))
    both = [name for name in known[0] if name in known[1]]
    changes, statuses = [], {}
    for name in both:
        pair = known[0][name], known[1][name]
        if pair[0].status != pair[1].status:
            statuses[name] = (pair[0].status, pair[1].status)
        found = _comparable(*pair)
        if found is not None:
            changes.append(_change(*found, rounds))
    changes.sort(key=_rank)
    return CellDiff(
        setting=dict(zip([*SETTING, "num_tokens"], key, strict=True)),
        best=_change(bests[0], bests[1], rounds) if bests[0] and bests[1] else None,
        candidates=changes,
        statuses=statuses,
        only_old=[name for name in known[0] if name not in known[1]],
        only_new=[name for name in known[1] if name not in known[0]],
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """What a table knows of a candidate."""

    status: str
    screen: Best | None
    confirm: Best | None


def _candidates(rows: pd.DataFrame) -> dict[str, _Known]:
    confirmed = {one.candidate: best_confirmed(one) for one in confirmed_of(rows)}
    out = {}
    for row in screened(rows).to_dict("records"):
        name, status = str(row["candidate"]), str(row["status"])
        screen = best_screened(row) if status == "ok" else None
        out[name] = _Known(status, screen, confirmed.get(name))
    for name, best in confirmed.items():
        out.setdefault(name, _Known("ok", None, best))
    return out


def _comparable(old: _Known, new: _Known) -> tuple[Best, Best] | None:
    """The strongest evidence that both sides have."""
    if old.confirm and new.confirm:
        return old.confirm, new.confirm
    if old.screen and new.screen:
        return old.screen, new.screen
    return None


def _rank(change: Change) -> tuple[int, float, str]:
    """Faster and slower first, then by size."""
    size = abs(change.ratio if change.ratio == change.ratio else change.time)
    return max(0, VERDICTS.index(change.verdict) - 1), -size, change.old.candidate


def _round_noise(rows: pd.DataFrame) -> float:
    """Twice the deviation of one round's time, as a part, by the rows that were confirmed.

    The few milliseconds of a screened row do not hold it: their p10 to p90 is narrower.
    """
    timed = rows[(rows["stage"] == "confirm") & (rows["status"] == "ok")]
    found = [
        robust_deviation(times) / median(times)
        for _, own in timed.groupby(["run", "candidate"])
        if len(times := [float(v) for v in own["median_us"]]) >= MIN_OBSERVATIONS
    ]
    return 2 * median(found) if found else 0.0


def _change(old: Best, new: Best, rounds: float) -> Change:
    parts = [max(b.noise, rounds) if b.stage == "screen" else b.noise for b in (old, new)]
    noise = (parts[0] ** 2 + parts[1] ** 2) ** 0.5
    ratio = new.ratio_to_floor / old.ratio_to_floor - 1
    return Change(old, new, new.median_us / old.median_us - 1, ratio, noise)


def _words(key: Sequence[Any]) -> str:
    problem, ranks, mode, recipe, routing, phase, tokens = key
    return f"{problem}, {ranks} ranks ({mode}), {recipe}, {routing} routing, {phase}, {tokens}"


# ---- text


def render_diff(diff: Diff, top: int = 10, names: Sequence[str] = ("A", "B")) -> str:
    """The difference as text.

    Args:
        diff: from `compare`.
        top: candidates shown of each list.
        names: what A and B are.
    """
    parts = [f"A: {names[0]}", f"B: {names[1]}", f"device {diff.device}", *_identity(diff)]
    parts += [*LEGEND, ""]
    groups: dict[tuple[Any, ...], list[CellDiff]] = {}
    for cell in diff.cells:
        groups.setdefault(tuple(cell.setting[name] for name in SETTING), []).append(cell)
    for key, cells in groups.items():
        problem, ranks, mode, recipe, routing, phase = key
        parts.append(
            f"{problem}, {ranks} ranks ({mode}), {recipe}, {routing} routing, {phase}: best of A "
            "and of B"
        )
        parts.append(_table([_best_cells(cell) for cell in cells]))
        for cell in cells:
            parts += ["", *_cell_parts(cell, top)]
        parts.append("")
    if not diff.cells:
        parts.append("no cell is in both tables")
    for name, cells_alone in (("A", diff.cells_only_old), ("B", diff.cells_only_new)):
        parts += [f"only in {name}: {words} tokens" for words in cells_alone]
    return "\n".join(parts).rstrip()


def _identity(diff: Diff) -> list[str]:
    out = [
        f"{IDENTITY[name]} differ: A {', '.join(old) or 'unknown'}; B {', '.join(new) or 'unknown'}"
        for name, (old, new) in diff.identity.items()
    ]
    if {"card", "kernel", "commit"} & diff.identity.keys():
        out.append("so times in us compare only together with / floor")
    return out


def _signed(part: float) -> str:
    return "-" if part != part else f"{100 * part:+.1f} %"


def _numbers(change: Change) -> dict[str, str]:
    return {
        "A us": f"{change.old.median_us:.1f}",
        "B us": f"{change.new.median_us:.1f}",
        "us": _signed(change.time),
        "A / floor": f"{change.old.ratio_to_floor:.3f}",
        "B / floor": f"{change.new.ratio_to_floor:.3f}",
        "/ floor": _signed(change.ratio),
        "noise": "-" if change.noise != change.noise else f"{100 * change.noise:.1f} %",
        "verdict": change.verdict,
    }


def _best_cells(cell: CellDiff) -> dict[str, str]:
    tokens = {"tokens": str(cell.setting["num_tokens"])}
    if cell.best is None:
        return {**tokens, "verdict": "no ok row on one side"}
    old, new = cell.best.old, cell.best.new
    same = old.candidate == new.candidate
    return {
        **tokens,
        **_numbers(cell.best),
        "evidence": f"{old.stage} / {new.stage}",
        "candidate": old.candidate if same else f"{old.candidate} -> {new.candidate}",
    }


def _cell_parts(cell: CellDiff, top: int) -> list[str]:
    tokens = cell.setting["num_tokens"]
    found = [change.verdict for change in cell.candidates]
    told = ", ".join(f"{found.count(word)} {word}" for word in VERDICTS if word in found)
    both = f"{len(found)} candidate{'' if len(found) == 1 else 's'} ok in both"
    parts = [f"{tokens} tokens: {both}{f': {told}' if told else ''}"]
    shown = [
        {
            **_numbers(change),
            "evidence": change.new.stage,
            "candidate": change.old.candidate,
        }
        for change in cell.candidates[:top]
    ]
    if shown:
        parts.append(_table(shown))
    for name, (old, new) in list(cell.statuses.items())[:top]:
        parts.append(f"  {old} -> {new}: {name}")
    for name, names in (("A", cell.only_old), ("B", cell.only_new)):
        if names:
            more = f" and {len(names) - top} more" if len(names) > top else ""
            parts.append(f"  {len(names)} only in {name}: {', '.join(names[:top])}{more}")
    return parts


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Aligned columns, numbers to the right; the last column is text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    last = len(columns) - 1
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
