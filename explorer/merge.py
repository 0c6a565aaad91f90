"""`tl-megamoe merge`: the tables that several machines made of one problem, as one table."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .schema import csv_text
from .table import (
    COLUMNS,
    RESUME_KEY,
    TableError,
    locked_file,
    read_lines,
    table_path,
    typed_frame,
    write_atomically,
)

Line = list[str]

AT = {name: index for index, name in enumerate(COLUMNS)}
ALLOWED = {"recipes": "recipe", "kernels": "kernel"}
"""What --allow names -> the column that may then differ between the files."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Tables joined.

    Attributes:
        lines: all rows as texts in the columns of the schema, by time.
        read: file -> rows that it holds.
        equal: rows that were there already, and are kept once.
        renumbered: rows that got another observation number.
    """

    lines: list[Line]
    read: dict[Path, int]
    equal: int
    renumbered: int

    @property
    def frame(self) -> pd.DataFrame:
        """The rows, typed as `read_table` types them."""
        return typed_frame(self.lines, COLUMNS)

    def count(self, column: str) -> dict[str, int]:
        """Value of a column -> rows, the most frequent first."""
        return dict(Counter(line[AT[column]] for line in self.lines).most_common())


def merge(paths: Sequence[Path], allow: Collection[str] = ()) -> pd.DataFrame:
    """The rows of several tables of one problem and device as one frame; as `join_tables`."""
    return join_tables(paths, allow).frame


def join_tables(paths: Sequence[Path], allow: Collection[str] = ()) -> Merged:
    """Join tables of one problem on one kind of device. Every value stays as it was written.

    Rows that are equal in all columns are kept once. Rows of the same work with other values (two
    machines measured the same candidate) are all kept: the later ones get the next free numbers in
    `observation`, so that `RESUME_KEY` stays unique. A table that holds renumbered rows can be
    joined with its sources again: they are recognised.

    Args:
        paths: tables of any schema.
        allow: `recipes`, `kernels`, or both: what may differ between the files.

    Returns:
        The rows by `measured_at`; rows of one second in the order of the files.

    Raises:
        ValueError: no such file, another device, problem or size, or recipes or kernel digests
            that differ between the files and are not allowed to.
        TableError: a file is not a table.
    """
    tables: dict[Path, list[Line]] = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such table; name files <results>/<device>/<problem>.csv")
        if not any(path.samefile(other) for other in tables):
            tables[path] = read_lines(path)
    _check_one(
        tables, "device", "Devices never mix: merge the tables of each on their own", _device
    )
    _check_one(tables, "problem", "Problems never mix, nor their sizes", _problem)
    for word, column in ALLOWED.items():
        if word not in allow:
            _check_same(tables, column, word)
    times = _times_of(tables)
    kept: list[Line] = []
    for lines in tables.values():
        kept += _new_lines(kept, lines)
    kept.sort(key=lambda line: times[line[AT["measured_at"]]])
    renumbered = _renumber(kept)
    read = {path: len(lines) for path, lines in tables.items()}
    return Merged(kept, read, sum(read.values()) - len(kept), renumbered)


def _device(line: Line) -> str:
    return line[AT["device"]]


def _problem(line: Line) -> str:
    """Name and sizes over all ranks: a view of one rank and the whole layer are one problem."""
    experts = int(line[AT["num_local_experts"]] or 0) * int(line[AT["num_ranks"]] or 0)
    sizes = [f"{name}={line[AT[name]]}" for name in ("hidden", "intermediate", "num_topk")]
    return f"{line[AT['problem']]} ({', '.join(sizes)}, num_experts={experts})"


def _by_value(
    tables: dict[Path, list[Line]], value_of: Callable[[Line], str]
) -> dict[str, list[Path]]:
    """Each value with the files that hold it."""
    found: dict[str, list[Path]] = {}
    for path, lines in tables.items():
        for value in sorted({value_of(line) for line in lines}):
            found.setdefault(value, []).append(path)
    return found


def _check_one(
    tables: dict[Path, list[Line]], name: str, rule: str, value_of: Callable[[Line], str]
) -> None:
    found = _by_value(tables, value_of)
    if len(found) > 1:
        said = "; ".join(f"{v or repr(v)} in {', '.join(map(str, p))}" for v, p in found.items())
        raise ValueError(f"{len(found)} values of {name}: {said}. {rule}")


def _check_same(tables: dict[Path, list[Line]], column: str, word: str) -> None:
    """Refuse files that hold different values of a column. One file may well hold several."""
    held = {
        path: sorted({line[AT[column]] for line in lines})
        for path, lines in tables.items()
        if lines
    }
    if len({tuple(values) for values in held.values()}) > 1:
        said = "; ".join(
            f"{path} has {', '.join(v or repr(v) for v in values)}" for path, values in held.items()
        )
        raise ValueError(
            f"{column} differs: {said}. Times of different {word} do not compare; to hold them in "
            f"one table all the same, add --allow {word}"
        )


def _body(line: Line) -> tuple[str, ...]:
    """A row without its observation number."""
    at = AT["observation"]
    return tuple(line[:at] + line[at + 1 :])


def _new_lines(kept: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """The lines of one file that `kept`, those of the files before it, does not hold yet.

    A line whose only difference is its observation number is the same measurement, renumbered by
    an earlier merge, unless the file itself holds several of these (failures look alike).
    """
    unique = list(dict.fromkeys(map(tuple, lines)))
    exact = set(map(tuple, kept))
    in_both = Counter(_body(list(line)) for line in unique if line in exact)
    renumbered = Counter(map(_body, kept)) - in_both
    new = []
    for line in map(list, (line for line in unique if line not in exact)):
        if renumbered[_body(line)] > 0:
            renumbered[_body(line)] -= 1
        else:
            new.append(line)
    return new


def _times_of(tables: dict[Path, list[Line]]) -> dict[str, pd.Timestamp]:
    """Each text of `measured_at` as a time; rows without one come first."""
    times: dict[str, pd.Timestamp] = {}
    for path, lines in tables.items():
        for text in {line[AT["measured_at"]] for line in lines} - set(times):
            try:
                time = pd.Timestamp(text or "1970-01-01")
            except ValueError as error:
                raise TableError(
                    f"{path}: measured_at {text!r} is not an ISO 8601 time, and rows are ordered "
                    "by it: correct that line"
                ) from error
            times[text] = time.tz_localize("UTC") if time.tzinfo is None else time
    return times


def _renumber(lines: Sequence[Line]) -> int:
    """Make `RESUME_KEY` unique; counts the rows that get another observation number.

    Candidates are compared within rounds, rows of one run, seed and observation: all rows of a
    round get the same new number, the next that no row of its cell has.
    """
    at, name = AT["observation"], AT["candidate"]
    cell = [AT[column] for column in RESUME_KEY if column not in ("observation", "candidate")]
    rounds: dict[tuple[str, ...], dict[tuple[str, str, int], list[Line]]] = {}
    before: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        where = tuple(line[i] for i in cell)
        one = (*where, line[AT["run"]], line[at], line[name])
        # Older searches gave the same number to a candidate that they timed again.
        of_cell = rounds.setdefault(where, {})
        of_cell.setdefault((line[AT["run"]], line[at], before[one]), []).append(line)
        before[one] += 1
    changed = 0
    for of_cell in rounds.values():
        highest = max(int(number) for _, number, _ in of_cell)
        taken: set[tuple[str, str]] = set()
        for rows in of_cell.values():
            if taken & {(line[name], line[at]) for line in rows}:
                highest += 1
                changed += len(rows)
                for line in rows:
                    line[at] = str(highest)
            taken |= {(line[name], line[at]) for line in rows}
    return changed


# ---- command


def add_parser(add: Callable[..., Any]) -> None:
    """Register the verb.

    Args:
        add: makes a sub-parser from a name, a function and a text.
    """
    parser = add("merge", run_merge, "Join tables of one problem from several machines.")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="a .csv file, or a results folder: <out>/<device>/<problem>.csv, <device>-x<R> for R "
        "ranks with a GPU each",
    )
    parser.add_argument(
        "--allow",
        action="append",
        choices=list(ALLOWED),
        default=[],
        help="join files whose recipes or kernel digests differ (repeat for both)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file that holds rows of no input"
    )


def run_merge(args: argparse.Namespace) -> int:
    """The verb; 0 when the table is written."""
    out = _destination(args.out, args.tables)
    # An input may be the output, while a search appends to it: nothing is appended in between.
    with locked_file(out) if out.exists() else nullcontext():
        merged = join_tables(args.tables, args.allow)
        if out.exists() and not args.force:
            _check_covered(out, merged)
        write_atomically(out, csv_text([list(COLUMNS), *merged.lines]))
    for path, count in merged.read.items():
        print(f"{path}: {count} rows", file=sys.stderr)
    print(
        f"{merged.equal} equal rows kept once; {merged.renumbered} rows of work that was done more "
        "than once got another observation number",
        file=sys.stderr,
    )
    for column in ("card", "status"):
        counts = ", ".join(f"{n} {v or 'unknown'}" for v, n in merged.count(column).items())
        print(f"by {column}: {counts or 'none'}", file=sys.stderr)
    print(f"{out}: {len(merged.lines)} rows")
    return 0


def _destination(out: Path, tables: Sequence[Path]) -> Path:
    if out.suffix == ".csv" and not out.is_dir():
        return out
    lines = [line for path in tables if path.is_file() for line in read_lines(path)]
    names = ("device", "problem", "rank_mode", "num_ranks")
    places: dict[Path, Path] = {}
    for device, problem, mode, ranks in ([line[AT[name]] for name in names] for line in lines):
        if device == lines[0][AT["device"]]:  # other devices, other problems: `join_tables` refuses
            path = table_path(out, device, problem, mode, int(ranks))
            places.setdefault(path.parent, path)
    if len(places) > 1:
        raise ValueError(
            f"rows of {' and '.join(map(str, places))}: those of ranks with a GPU each lie apart. "
            "Merge the tables of each folder, or name a .csv file as --out"
        )
    if places:
        return next(iter(places.values()))
    raise ValueError(
        f"no rows in {', '.join(map(str, tables))}, so that no device and problem say where in "
        f"{out} the table belongs: name existing tables, or a .csv file as --out"
    )


def _check_covered(out: Path, merged: Merged) -> None:
    """Refuse to lose rows of the file that is replaced."""
    if any(out.samefile(path) for path in merged.read):
        return
    lost = len(_new_lines(merged.lines, read_lines(out)))
    if lost:
        raise ValueError(
            f"{out} holds {lost} rows that are in none of the inputs: name it among them to keep "
            "them, choose another --out, or replace it with --force"
        )
