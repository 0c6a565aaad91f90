"""What a row of the results tables is: its columns, their types and words, and older schemas.

The header is fixed by SCHEMA: another column means another schema number and a migration, never a
ragged file. table.py keeps the files.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import RANK_MODES
from tl_megamoe.schedule import Schedule

SCHEMA = 6
STATUSES = (
    "ok",
    "invalid",
    "compile_error",
    "spilled",
    "no_wgmma",
    "serialized_wgmma",
    "launch_error",
    "timeout",
    "incorrect",
    "nondeterministic",
    "oom",
    "duplicate",
)
SOURCES = ("measured", "model")
STAGES = ("screen", "confirm", "bench")
WORDS = {"status": STATUSES, "source": SOURCES, "rank_mode": RANK_MODES, "stage": STAGES}
"""Column -> the words it may hold, checked when rows are read and when they are appended."""
POSITIVE = ("median_us", "p10_us", "p90_us", "floor_us", "baseline_us", "yardstick_tflops")
"""Columns that hold positive, finite numbers where they are given; checked as `WORDS` are, with
`num_samples`, at least 1, and the order of the quantiles."""

SCHEDULE_COLUMNS = {f.name: type(f.default).__name__ for f in fields(Schedule)}
COLUMNS: dict[str, str] = {
    "schema": "int",
    "problem": "str",
    "num_tokens": "int",
    "num_ranks": "int",
    "rank_mode": "str",
    "routing": "str",
    "seed": "int",
    "stage": "str",
    "observation": "int",
    "run": "str",
    "candidate": "str",
    "phase": "str",
    "recipe": "str",
    "status": "str",
    "source": "str",
    "median_us": "float",
    "p10_us": "float",
    "p90_us": "float",
    "num_samples": "int",
    "ranks_us": "str",
    "floor_us": "float",
    "ratio_to_floor": "float",
    "yardstick_tflops": "float",
    "tflops": "float",
    "hbm_gbs": "float",
    "nvlink_gbs": "float",
    "predicted_us": "float",
    "notes": "str",
    "reason": "str",
    "baseline": "str",
    "baseline_version": "str",
    "baseline_us": "float",
    "ratio_to_baseline": "float",
    "sm_clock_mhz": "float",
    "mem_clock_mhz": "float",
    "power_w": "float",
    "temperature_c": "float",
    "sm_clock_end_mhz": "float",
    "mem_clock_end_mhz": "float",
    "power_end_w": "float",
    "temperature_end_c": "float",
    "registers": "int",
    "spill_bytes": "int",
    "smem_bytes": "int",
    "num_wgmma": "int",
    "source_hash": "str",
    "hidden": "int",
    "intermediate": "int",
    "num_local_experts": "int",
    "num_topk": "int",
    "touched_experts": "int",
    "pairs": "int",
    "capacity": "int",
    **SCHEDULE_COLUMNS,
    "device": "str",
    "card": "str",
    "tilelang": "str",
    "nvcc": "str",
    "torch": "str",
    "driver": "str",
    "kernel": "str",
    "commit": "str",
    "measured_at": "str",
}
"""Column -> type. Times in microseconds; clocks, power and temperature at the start of a trial and,
with `_end`, near its end; `kernel` is the digest of the kernel's sources, `source_hash` that of the
candidate's generated text, `nvcc` the version that compiled it, `card` an anonymous id of the
physical GPU."""

RESUME_KEY = (
    "problem",
    "num_tokens",
    "num_ranks",
    "rank_mode",
    "routing",
    "seed",
    "stage",
    "observation",
    "candidate",
    "source",
    "phase",
    "recipe",
    "device",
    "hidden",
    "intermediate",
    "num_local_experts",
    "num_topk",
    "capacity",
    "kernel",
)
"""What makes two rows the same piece of work. `kernel` and not `commit`: a commit that leaves the
kernel's sources alone, such as the one that adds the results, does not start a search anew."""

SUMMARY_COLUMNS = {
    name: COLUMNS[name]
    for name in (
        "schema",
        "problem",
        "num_tokens",
        "num_ranks",
        "rank_mode",
        "stage",
        "candidate",
        "median_us",
        "p10_us",
        "p90_us",
        "floor_us",
        "ratio_to_floor",
        "yardstick_tflops",
        "tflops",
        "hbm_gbs",
        "nvlink_gbs",
        *SCHEDULE_COLUMNS,
        "device",
        "card",
        "tilelang",
        "nvcc",
        "torch",
        "driver",
        "kernel",
        "commit",
        "measured_at",
    )
}
SUMMARY_KEY = ("problem", "num_ranks", "rank_mode", "num_tokens")


@dataclass(frozen=True, slots=True)
class Migration:
    """What a schema changed in the one before it.

    Attributes:
        added: new columns, with their text in older rows.
        renamed: old name -> new name of a column that stayed in its place.
    """

    added: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)


MIGRATIONS = {
    2: Migration({"nvlink_gbs": "", "math_mode": "cooperative"}),
    3: Migration(
        {
            "stage": "screen",
            "observation": "0",
            "run": "",
            "ranks_us": "",
            "sm_clock_end_mhz": "",
            "mem_clock_end_mhz": "",
            "power_end_w": "",
            "temperature_end_c": "",
            "source_hash": "",
            "card": "",
            "driver": "",
        },
        renamed={"observation": "notes"},
    ),
    4: Migration({"evict_first": "0"}),
    5: Migration({"cluster_size": "1"}),
    6: Migration({"nvcc": ""}),
}
"""Schema -> what it changed."""

MAX_TEXT = 10_000
"""Characters of a text that are kept: readers of CSV refuse fields of 128 Ki and more."""

Row = Mapping[str, Any]


class TableError(ValueError):
    """A results file cannot be read or extended as it is."""


def key_of(row: Row) -> tuple[Any, ...]:
    """The row's `RESUME_KEY`."""
    return tuple(row.get(name) for name in RESUME_KEY)


def bad_line(path: Path | None, number: int, what: str) -> TableError:
    """The error of one line of a file, with what to do about it."""
    return TableError(
        f"{path or 'table'}, line {number}: {what}. Restore the file from a copy, or delete that "
        "line: the command that wrote it makes its row again"
    )


# ---- writing


def header_line(columns: Mapping[str, str]) -> str:
    """The first line of a file."""
    return ",".join(columns) + "\n"


def check_words(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Check the columns that hold one of a few words.

    Raises:
        TableError: a word outside `WORDS`.
    """
    for name, allowed in WORDS.items():
        for row in rows:
            if name in columns and row.get(name) not in allowed:
                raise TableError(f"{name}={row.get(name)!r} is none of {', '.join(allowed)}")


def _text(name: str, kind: str, value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    try:
        if kind == "int":
            number = int(value)
            if not isinstance(value, str) and number != value:
                raise ValueError(value)
            return str(number)
        if kind == "float":
            return f"{float(value):.6g}"
    except (TypeError, ValueError) as error:
        raise TableError(f"{name}={value!r}: the column holds {kind} values") from error
    # A reason may quote a compiler: neither NUL bytes nor half characters may reach the file.
    text = str(value).replace("\0", " ").encode("utf-8", "replace").decode("utf-8")
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def lines_of(rows: Sequence[Row], columns: Mapping[str, str]) -> list[list[str]]:
    """The texts of rows, column by column; those of missing columns are empty.

    Raises:
        TableError: a column that the schema does not know, a value of the wrong type, or a number
            that cannot be (`POSITIVE`).
    """
    for row in rows:
        unknown = sorted(set(row) - set(columns))
        if unknown:
            raise TableError(
                f"row with unknown columns {', '.join(unknown)}: a new column needs a new SCHEMA "
                f"(now {SCHEMA}) and a migration of the files"
            )
    lines = [[_text(name, kind, row.get(name)) for name, kind in columns.items()] for row in rows]
    for line, what in _impossible_numbers(lines, columns):
        raise TableError(f"row of candidate {rows[line].get('candidate')!r}: {what}")
    return lines


def _impossible_numbers(
    lines: Sequence[Sequence[str]], columns: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """Number of a line, from 0, and what is wrong, for each whose numbers cannot be.

    Args:
        lines: texts, column by column, each of its column's type.
        columns: name -> type.
    """
    places = [(name, i) for i, name in enumerate(columns) if name in (*POSITIVE, "num_samples")]
    for number, line in enumerate(lines):
        found = {name: float(line[i]) for name, i in places if line[i]}
        for name, value in found.items():
            if name == "num_samples":
                if value < 1:
                    yield number, f"column num_samples must be at least 1, found {value:g}"
            elif not 0 < value < math.inf:
                yield number, f"column {name} must hold positive finite numbers, found {value:g}"
        order = [name for name in ("p10_us", "median_us", "p90_us") if name in found]
        for low, high in pairwise(order):
            if found[low] > found[high]:
                what = f"column {low} must not exceed {high}, found {found[low]:g} and "
                yield number, f"{what}{found[high]:g}"


def csv_text(lines: Sequence[Sequence[str]]) -> str:
    """Lines as CSV, one a line of the file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def format_rows(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """CSV lines of rows; missing columns are empty.

    Raises:
        TableError: as `lines_of`.
    """
    return csv_text(lines_of(rows, columns))


# ---- reading


def decode(data: bytes, path: Path) -> str:
    """The text of whole lines of a file.

    Raises:
        TableError: bytes that are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        what = f"the byte 0x{data[error.start]:02x} is not UTF-8 text"
        raise bad_line(path, number, what) from error


def _split(text: str, path: Path) -> list[list[str]]:
    """The values of each line. A value never spans lines, so that a stray quote harms only one."""
    out = []
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        if "\0" in line:
            raise bad_line(path, number, "it holds NUL bytes, as a machine that lost power leaves")
        try:
            out.append(next(csv.reader([line], strict=True)))
        except csv.Error as error:
            raise bad_line(path, number, f"it is not CSV ({error})") from error
    return out


def header_of(columns: Mapping[str, str], schema: int) -> list[str]:
    """The header that a file of these columns had in an older schema."""
    names = list(columns)
    for version in range(SCHEMA, schema, -1):
        change = MIGRATIONS[version]
        before = {new: old for old, new in change.renamed.items()}
        names = [before.get(name, name) for name in names if name not in change.added]
    return names


def _schema_of(lines: Sequence[Sequence[str]], path: Path, columns: Mapping[str, str]) -> int:
    for schema in range(SCHEMA, min(MIGRATIONS) - 2, -1):
        if list(lines[0]) == header_of(columns, schema):
            return schema
    said = lines[1][0] if len(lines) > 1 and lines[1] else ""
    if said.isdecimal() and int(said) > SCHEMA:
        raise TableError(
            f"{path}: its rows have schema {said}, this version of tl_megamoe knows {SCHEMA}: "
            "update tl_megamoe"
        )
    differing = sorted(set(lines[0]) ^ set(columns)) or ["their order"]
    raise TableError(
        f"{path}: its header is neither that of schema {SCHEMA} nor of an older one; columns that "
        f"differ: {', '.join(differing)}. Move the file away."
    )


def current_lines(text: str, path: Path, columns: Mapping[str, str]) -> tuple[list[list[str]], int]:
    """A file's lines in the columns of SCHEMA, header first, and the schema that the file has.

    Every value of an older file stays as it was written.

    Raises:
        TableError: a foreign header or schema, a ragged line, a line that is not CSV.
    """
    lines = _split(text, path)
    if not lines:
        return [], SCHEMA
    schema = _schema_of(lines, path, columns)
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(lines[0]):
            what = f"{len(line)} values, the header has {len(lines[0])}"
            raise bad_line(path, number, what)
        if line[0] != str(schema):
            what = f"schema {line[0]!r}, the header is that of schema {schema}"
            raise bad_line(path, number, what)
    if schema == SCHEMA:
        return lines, schema
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    for version in range(schema + 1, SCHEMA + 1):
        change = MIGRATIONS[version]
        rows = [
            {**change.added, **{change.renamed.get(k, k): v for k, v in row.items()}}
            for row in rows
        ]
    kept = [[{**row, "schema": str(SCHEMA)}[name] for name in columns] for row in rows]
    return [list(columns), *kept], schema


def parse(text: str, path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """A typed frame from the text of a whole file, of this schema or an older one.

    Raises:
        TableError: as `current_lines`, a value of the wrong type, a word outside `WORDS`, or a
            number that cannot be (`POSITIVE`). It names the file, the line and what to do.
    """
    lines, _ = current_lines(text, path, columns)
    frame = typed_frame(lines[1:], columns, path)
    for name, allowed in WORDS.items():
        if name in frame:
            strange = ~frame[name].isin(allowed)
            if strange.any():
                at = int(strange.to_numpy().argmax())
                what = f"{name} {frame[name].iloc[at]!r} is none of {', '.join(allowed)}"
                raise bad_line(path, at + 2, what)
    for line, what in _impossible_numbers(lines[1:], columns):
        raise bad_line(path, line + 2, what)
    return frame


def typed_frame(
    lines: Sequence[Sequence[str]], columns: Mapping[str, str], path: Path | None = None
) -> pd.DataFrame:
    """Lines as a frame: nullable integers, floats, strings ("" when empty).

    Args:
        lines: texts, column by column, without the header.
        columns: name -> `int`, `float` or `str`.
        path: named in errors.

    Raises:
        TableError: a value of the wrong type.
    """
    data: dict[str, Any] = {}
    for index, (name, kind) in enumerate(columns.items()):
        values: list[Any] = []
        for number, line in enumerate(lines, 2):
            try:
                values.append(_value(line[index], kind))
            except ValueError as error:
                what = f"column {name} must hold {kind} values, found {line[index]!r}"
                raise bad_line(path, number, what) from error
        if kind == "int":
            data[name] = pd.array(values, dtype="Int64")
        else:
            data[name] = pd.Series(values, dtype=object if kind == "str" else "float64")
    return pd.DataFrame(data)


def _value(text: str, kind: str) -> Any:
    if kind == "str":
        return text
    if kind == "float":
        return float(text) if text else math.nan
    value = int(text) if text else None
    if value is not None and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(text)
    return value
