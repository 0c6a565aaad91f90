"""The results table: results/<device>/<problem>.csv, append-only, one row for every candidate.

The header is fixed by SCHEMA: another column means another schema number and a migration, never a
ragged file. Files of an older schema are read as they are, with the values of ADDED in the columns
that they lack; the first append rewrites them as a whole. Lines are appended whole under a lock; a
line that a crash cut short is moved to <file>.rejected before the next append, with a message.
"""

from __future__ import annotations

import csv
import fcntl
import io
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import RANK_MODES
from tl_megamoe.schedule import Schedule

logger = logging.getLogger(__name__)

SCHEMA = 2
ADDED: dict[int, dict[str, str]] = {2: {"nvlink_gbs": "", "math_mode": "cooperative"}}
"""Schema -> the columns it added, with their text in rows of the schema before it."""
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
)
SOURCES = ("measured", "model")

SCHEDULE_COLUMNS = {f.name: type(f.default).__name__ for f in fields(Schedule)}
COLUMNS: dict[str, str] = {
    "schema": "int",
    "problem": "str",
    "num_tokens": "int",
    "num_ranks": "int",
    "rank_mode": "str",
    "routing": "str",
    "seed": "int",
    "candidate": "str",
    "phase": "str",
    "recipe": "str",
    "status": "str",
    "source": "str",
    "median_us": "float",
    "p10_us": "float",
    "p90_us": "float",
    "num_samples": "int",
    "floor_us": "float",
    "ratio_to_floor": "float",
    "yardstick_tflops": "float",
    "tflops": "float",
    "hbm_gbs": "float",
    "nvlink_gbs": "float",
    "predicted_us": "float",
    "observation": "str",
    "reason": "str",
    "baseline": "str",
    "baseline_version": "str",
    "baseline_us": "float",
    "ratio_to_baseline": "float",
    "sm_clock_mhz": "float",
    "mem_clock_mhz": "float",
    "power_w": "float",
    "temperature_c": "float",
    "registers": "int",
    "spill_bytes": "int",
    "smem_bytes": "int",
    "num_wgmma": "int",
    "hidden": "int",
    "intermediate": "int",
    "num_local_experts": "int",
    "num_topk": "int",
    "touched_experts": "int",
    "pairs": "int",
    "capacity": "int",
    **SCHEDULE_COLUMNS,
    "device": "str",
    "tilelang": "str",
    "torch": "str",
    "kernel": "str",
    "commit": "str",
    "measured_at": "str",
}
"""Column -> type. Times in microseconds; `kernel` is the digest of the kernel's sources."""

RESUME_KEY = (
    "problem",
    "num_tokens",
    "num_ranks",
    "rank_mode",
    "routing",
    "seed",
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

Row = Mapping[str, Any]


class TableError(ValueError):
    """A results file cannot be read or extended as it is."""


def key_of(row: Row) -> tuple[Any, ...]:
    """The row's `RESUME_KEY`."""
    return tuple(row.get(name) for name in RESUME_KEY)


def _header(columns: Mapping[str, str]) -> str:
    return ",".join(columns) + "\n"


def _text(name: str, kind: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if kind == "int":
        return str(int(value))
    if kind == "float":
        return f"{float(value):.6g}"
    return " ".join(str(value).split())


def format_rows(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """CSV lines of rows; missing columns are empty.

    Raises:
        TableError: a column that the schema does not know.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        unknown = sorted(set(row) - set(columns))
        if unknown:
            raise TableError(
                f"row with unknown columns {', '.join(unknown)}: a new column needs a new SCHEMA "
                f"(now {SCHEMA}) and a migration of the files"
            )
        writer.writerow([_text(name, kind, row.get(name)) for name, kind in columns.items()])
    return out.getvalue()


def _current_lines(
    text: str, path: Path, columns: Mapping[str, str]
) -> tuple[list[list[str]], int]:
    """A file's lines in the columns of SCHEMA, header first, and the schema that it has.

    Raises:
        TableError: a foreign header or schema, a ragged line.
    """
    lines = list(csv.reader(io.StringIO(text)))
    if not lines:
        return [], SCHEMA
    schema, added = SCHEMA, dict[str, str]()
    while lines[0] != [name for name in columns if name not in added]:
        if schema not in ADDED:
            differing = sorted(set(lines[0]) ^ set(columns)) or ["their order"]
            raise TableError(
                f"{path}: its header is neither that of schema {SCHEMA} nor of an older one; "
                f"columns that differ: {', '.join(differing)}. Move the file away."
            )
        added.update(ADDED[schema])
        schema -= 1
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(lines[0]):
            raise TableError(
                f"{path}, line {number}: {len(line)} values, the header has {len(lines[0])}"
            )
        if line[0] != str(schema):
            raise TableError(
                f"{path}, line {number}: schema {line[0]!r}, the header is that of schema {schema}"
            )
    if schema == SCHEMA:
        return lines, schema
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    kept = [[{**added, **row, "schema": str(SCHEMA)}[name] for name in columns] for row in rows]
    return [list(columns), *kept], schema


def parse(text: str, path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """A typed frame from the text of a whole file, of this schema or an older one.

    Raises:
        TableError: a foreign header or schema, a ragged line, a value of the wrong type.
    """
    lines, _ = _current_lines(text, path, columns)
    if not lines:
        return typed_frame([], columns)
    frame = typed_frame(lines[1:], columns, path)
    for name, allowed in (("status", STATUSES), ("source", SOURCES), ("rank_mode", RANK_MODES)):
        if name in frame:
            strange = sorted(set(frame[name]) - set(allowed))
            if strange:
                raise TableError(f"{path}: {name} {strange[0]!r} is none of {', '.join(allowed)}")
    return frame


def typed_frame(
    lines: Sequence[Sequence[str]], columns: Mapping[str, str], path: Path | None = None
) -> pd.DataFrame:
    """Lines as a frame: nullable integers, floats, strings ("" when empty)."""
    data: dict[str, Any] = {}
    for index, (name, kind) in enumerate(columns.items()):
        texts = [line[index] for line in lines]
        try:
            if kind == "str":
                data[name] = pd.Series(texts, dtype=object)
            elif kind == "int":
                data[name] = pd.array([int(t) if t else None for t in texts], dtype="Int64")
            else:
                data[name] = pd.Series(
                    [float(t) if t else math.nan for t in texts], dtype="float64"
                )
        except ValueError as error:
            raise TableError(f"{path}: column {name} must hold {kind} values: {error}") from error
    return pd.DataFrame(data)


def read_table(path: Path) -> pd.DataFrame:
    """The rows of a results file; empty if there is none. A cut last line is left out, and said.

    Raises:
        TableError: as `parse`.
    """
    if not path.exists():
        return typed_frame([], COLUMNS)
    text = path.read_bytes().decode("utf-8", errors="replace")
    whole, cut = _split_cut_line(text)
    if cut:
        logger.warning("%s: its last line was cut short and is left out: %.60s...", path, cut)
    return parse(whole, path, COLUMNS)


def _split_cut_line(text: str) -> tuple[str, str]:
    end = text.rfind("\n") + 1
    return text[:end], text[end:]


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # While this waited a migration may have put another file in place: lock that one.
            if _is_open(path, fd):
                yield fd
                return
        finally:
            os.close(fd)


def _is_open(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: for files that are read, changed and replaced."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)


def _repair(path: Path, fd: int) -> None:
    """Move a line that a crash cut short to <file>.rejected. Called under the lock."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end == len(data):
        return
    rejected = path.with_name(path.name + ".rejected")
    out = os.open(rejected, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _write_all(out, data[end:] + b"\n")
    finally:
        os.close(out)
    os.ftruncate(fd, end)
    logger.warning("%s: its last line was cut short and is now in %s", path, rejected)


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows as whole lines in one write, synced to disk; the header comes first.

    A file of an older schema is replaced by one of this schema that holds its rows and the new
    ones; a crash leaves the one file or the other.

    Raises:
        TableError: a status outside STATUSES, an unknown column, or a file that is not a table.
    """
    for row in rows:
        if row["status"] not in STATUSES:
            raise TableError(f"status={row['status']!r} is none of {', '.join(STATUSES)}")
    text = format_rows([{"schema": SCHEMA, **row} for row in rows], COLUMNS)
    with _locked(path) as fd:
        _repair(path, fd)
        with path.open("r", encoding="utf-8", newline="") as file:
            header = file.readline()
        if not header:
            text = _header(COLUMNS) + text
        elif header != _header(COLUMNS):
            write_atomically(path, _migrated(path) + text)
            return
        _write_all(fd, text.encode())


def _migrated(path: Path) -> str:
    """The text of a file of an older schema in this one: every value as it was written."""
    lines, schema = _current_lines(path.read_text(encoding="utf-8"), path, COLUMNS)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    logger.warning("%s: %d rows brought from schema %d to %d", path, len(lines) - 1, schema, SCHEMA)
    return out.getvalue()


def finished_keys(path: Path) -> set[tuple[Any, ...]]:
    """The `RESUME_KEY` of every row in a file."""
    frame = read_table(path)
    return {
        tuple(
            None if pd.isna(v) else int(v) if COLUMNS[n] == "int" else v
            for n, v in zip(RESUME_KEY, values, strict=True)
        )
        for values in frame[list(RESUME_KEY)].itertuples(index=False, name=None)
    }


def table_path(results: Path, device: str, problem: str) -> Path:
    """Where the rows of a problem on a device are."""
    return results / device / f"{problem}.csv"


# ---- summary

SUMMARY_COLUMNS = {
    name: COLUMNS[name]
    for name in (
        "schema",
        "problem",
        "num_tokens",
        "num_ranks",
        "rank_mode",
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
        "tilelang",
        "torch",
        "kernel",
        "commit",
        "measured_at",
    )
}
SUMMARY_KEY = ("problem", "num_ranks", "rank_mode", "num_tokens")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        os.fchmod(fd, 0o644)
        _write_all(fd, text.encode())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(fd)


def update_summary(path: Path, rows: Sequence[Row]) -> None:
    """Put the frozen rows of one problem into the summary, in place of those it had.

    Raises:
        TableError: the file has another schema.
    """
    replaced = {(r["problem"], r["num_ranks"], r["rank_mode"]) for r in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        old = parse(path.read_text(encoding="utf-8"), path, SUMMARY_COLUMNS)
        kept = [
            {str(k): None if pd.isna(v) else v for k, v in r.items()}
            for r in old.to_dict("records")
            if (r["problem"], r["num_ranks"], r["rank_mode"]) not in replaced
        ]
    fresh = [
        {"schema": SCHEMA, **{k: v for k, v in r.items() if k in SUMMARY_COLUMNS}} for r in rows
    ]
    rows = sorted([*kept, *fresh], key=lambda r: tuple(r[k] for k in SUMMARY_KEY))
    write_atomically(path, _header(SUMMARY_COLUMNS) + format_rows(rows, SUMMARY_COLUMNS))
