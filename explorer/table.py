"""The results tables: results/<device>/<problem>.csv, append-only, one row for every candidate.

Rows of R ranks with a GPU each are of another machine than those of one GPU and lie in a folder of
their own, results/<device>-x<R>/ (`folder_name`); their column `device` is the GPU all the same.

To read results, in a notebook for example:

    from tl_megamoe.explorer.table import load
    frame = load("results", problem="deepseek-v4-flash")

The columns are those of schema.py. Files of an older schema are read as they are; the first append
rewrites them as a whole. Lines are appended whole under a lock; a line that a crash cut short is
moved to <file>.rejected before the next append, with a message.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from .files import reason_of, write_atomically
from .schema import (
    COLUMNS,
    MIGRATIONS,
    RESUME_KEY,
    SCHEDULE_COLUMNS,
    SCHEMA,
    SOURCES,
    STAGES,
    STATUSES,
    SUMMARY_COLUMNS,
    SUMMARY_KEY,
    Row,
    TableError,
    check_words,
    csv_text,
    current_lines,
    decode,
    format_rows,
    header_line,
    key_of,
    lines_of,
    parse,
    typed_frame,
)

__all__ = [
    "COLUMNS",
    "MIGRATIONS",
    "RESUME_KEY",
    "SCHEDULE_COLUMNS",
    "SCHEMA",
    "SOURCES",
    "STAGES",
    "STATUSES",
    "SUMMARY_COLUMNS",
    "SUMMARY_KEY",
    "SUMMARY_NAME",
    "Row",
    "TableError",
    "append_rows",
    "check_device",
    "finished_keys",
    "folder_name",
    "format_rows",
    "gpu_of",
    "key_of",
    "load",
    "locked_file",
    "locked_folder",
    "parse",
    "read_lines",
    "read_table",
    "table_path",
    "typed_frame",
    "update_summary",
    "write_atomically",
]

logger = logging.getLogger(__name__)

SUMMARY_NAME = "summary.csv"
"""The file beside the tables of a device that holds its frozen choices."""


def folder_name(device: str, rank_mode: str = "one", num_ranks: int = 1) -> str:
    """The folder of rows: that of their GPU's model, and how many of them where each rank has one.

    Args:
        device: for example `nvidia-h200`.
        rank_mode, num_ranks: how the ranks ran.

    Returns:
        For example `nvidia-h200`, or `nvidia-h200-x2`.
    """
    return f"{device}-x{num_ranks}" if rank_mode == "real" else device


def gpu_of(folder: str) -> str:
    """The GPU's model of a folder of `folder_name`."""
    return re.sub(r"-x\d+$", "", folder)


def table_path(
    results: Path, device: str, problem: str, rank_mode: str = "one", num_ranks: int = 1
) -> Path:
    """Where the rows of a problem are; arguments as for `folder_name`."""
    return results / folder_name(device, rank_mode, num_ranks) / f"{problem}.csv"


# ---- reading


def _whole_text(path: Path) -> str:
    """A file's whole lines. A cut last line is left out, and said."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        cut = data[end:].decode("utf-8", errors="replace")
        logger.warning("%s: its last line was cut short and is left out: %.60s...", path, cut)
    return decode(data[:end], path)


def read_table(path: Path, device: str | None = None) -> pd.DataFrame:
    """The rows of a results file; empty if there is none. A cut last line is left out, and said.

    Args:
        path: the file.
        device: whose rows it must hold, as `check_device`; any when None.

    Raises:
        TableError: as `parse`, or rows of another device.
    """
    frame = parse(_whole_text(path) if path.exists() else "", path, COLUMNS)
    if device is not None:
        check_device(frame, device, path)
    return frame


def read_lines(path: Path) -> list[list[str]]:
    """The rows of a results file as they were written, in the columns of this schema.

    Raises:
        TableError: as `parse`.
    """
    text = _whole_text(path)
    parse(text, path, COLUMNS)
    return current_lines(text, path, COLUMNS)[0][1:]


def check_device(frame: pd.DataFrame, device: str, path: Path) -> None:
    """Refuse rows of another device than that of the folder they lie in.

    Args:
        frame: rows.
        device: `nvidia-h200`, where all its rows may lie: those of ranks with a GPU each did once;
            or `nvidia-h200-x2`.
        path: their file.

    Raises:
        TableError: there are such rows.
    """
    # Not by columns: with pyarrow, pandas 3 cannot join an empty column of objects to strings.
    places = zip(frame["device"], frame["rank_mode"], frame["num_ranks"], strict=True)
    homes = pd.Series(
        [f"{name}-x{ranks}" if mode == "real" else name for name, mode, ranks in places],
        index=frame.index,
        dtype=object,
    )
    foreign = homes[(frame["device"] != device) & (homes != device)]
    if len(foreign):
        others = ", ".join(sorted({repr(name) for name in foreign}))
        raise TableError(
            f"{path}: {len(foreign)} of {len(frame)} rows are of device {others}, not of "
            f"{device!r}, whose folder this is. Times of two devices never mix: move the file to "
            f"the folder of its device, and join tables of one device with: tl-megamoe merge"
        )


def load(source: str | Path, problem: str | None = None, device: str | None = None) -> pd.DataFrame:
    """Results as a frame: the way to read them in a notebook.

    Columns of integers are `Int64`, of numbers `float64` (times in microseconds), of text `string`
    ("" where there is none); `measured_at` is a time in UTC. Failed candidates are rows too: take
    `frame[frame["status"] == "ok"]` for times, and compare `ratio_to_baseline` rather than
    `median_us` between batches, `ratio_to_floor` between runs.

    Args:
        source: a table, a results folder (all tables in its device folders, without the
            summaries), or the folder of one device.
        problem: only rows of this problem, for example `deepseek-v4-flash`; all when None.
        device: only rows of this device, for example `nvidia-h200`; all when None.

    Returns:
        One row a candidate and observation, in the order of the files.

    Raises:
        ValueError: there is no such file, no table in the folder, or no row of that problem or
            device.
        TableError: a file is not a table, or lies in the folder of another device.
    """
    source = Path(source)
    if source.is_file():
        frames = [read_table(source)]
    else:
        paths = [p for p in source.glob("*/*.csv") if p.name != SUMMARY_NAME]
        paths = paths or [p for p in source.glob("*.csv") if p.name != SUMMARY_NAME]
        if not paths:
            raise ValueError(
                f"{source}: no table there; give a <device>/<problem>.csv, or the folder that "
                "holds the devices' folders. Make rows with: tl-megamoe search"
            )
        frames = [read_table(path, path.resolve().parent.name) for path in sorted(paths)]
    frame = pd.concat(frames, ignore_index=True)
    for name, value in (("problem", problem), ("device", device)):
        if value is not None:
            known = sorted(map(str, frame[name].unique()))
            if value not in known:
                raise ValueError(
                    f"{source}: no rows of {name} {value!r}; it has rows of "
                    f"{', '.join(known) or 'none'}"
                )
            frame = frame[frame[name] == value]
    try:
        texts_of_time = frame["measured_at"].where(frame["measured_at"] != "", None)
        times = pd.to_datetime(texts_of_time, utc=True, format="ISO8601")
    except ValueError as error:
        raise TableError(f"{source}: measured_at must hold ISO 8601 times: {error}") from error
    texts = {name: "string" for name, kind in COLUMNS.items() if kind == "str"}
    return frame.astype(texts).assign(measured_at=times).reset_index(drop=True)


def finished_keys(path: Path, device: str | None = None) -> set[tuple[Any, ...]]:
    """The `RESUME_KEY` of every row in a file; arguments and errors as `read_table`."""
    frame = read_table(path, device)
    return {
        tuple(
            None if pd.isna(v) else int(v) if COLUMNS[n] == "int" else v
            for n, v in zip(RESUME_KEY, values, strict=True)
        )
        for values in frame[list(RESUME_KEY)].itertuples(index=False, name=None)
    }


# ---- locks and bytes


@contextmanager
def locked_file(path: Path) -> Iterator[int]:
    """Hold a file's lock, which every append takes; makes the file. Gives its descriptor."""
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


# ---- appending


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows as whole lines in one write, synced to disk; the header comes first.

    A file of an older schema is replaced by one of this schema that holds its rows and the new
    ones; a crash leaves the one file or the other. When the disk is full the file stays as it was.

    Args:
        path: the table; made if there is none.
        rows: column -> value. All need the words of `schema.WORDS`, an `observation` and one
            device, which must be that of the rows in the file.

    Raises:
        TableError: a row that does not fit the schema or the file, or a file that is not a table.
        OSError: the disk did not take the rows; nothing of them is in the file.
    """
    if not rows:
        return
    check_words(rows, COLUMNS)
    if any(row.get("observation") is None for row in rows):
        raise TableError("row without observation: it counts 0, 1, 2 ... of one candidate and seed")
    text = format_rows([{**row, "schema": SCHEMA} for row in rows], COLUMNS)
    devices = {str(row.get("device") or "") for row in rows}
    with locked_file(path) as fd:
        try:
            _repair(path, fd)
            _append(path, fd, text, devices)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path}: {reason_of(error, path)}: {len(rows)} rows are not recorded, the rows "
                "before them are kept. When the file can be written, the same command resumes",
            ) from error


def _append(path: Path, fd: int, text: str, devices: set[str]) -> None:
    with path.open("rb") as file:
        header, first = file.readline(), file.readline()
    lines, _ = current_lines(decode(header + first, path), path, COLUMNS)
    held = {line[list(COLUMNS).index("device")] for line in lines[1:]}
    if len(devices | held) > 1:
        names = ", ".join(sorted(map(repr, devices | held)))
        raise TableError(
            f"{path}: rows of the devices {names} in one table. Times of two devices never mix: "
            "keep each device's in its own folder, <results>/<device>/"
        )
    if not header:
        text = header_line(COLUMNS) + text
    elif header != header_line(COLUMNS).encode():
        write_atomically(path, _migrated(path) + text)
        return
    length = os.fstat(fd).st_size
    try:
        _write_all(fd, text.encode())
    except OSError:
        os.ftruncate(fd, length)
        raise


def _repair(path: Path, fd: int) -> None:
    """Move a line that a crash cut short to <file>.rejected. Called under the lock."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    rejected = path.with_name(path.name + ".rejected")
    out = os.open(rejected, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _write_all(out, data[end:] + b"\n")
    finally:
        os.close(out)
    os.ftruncate(fd, end)
    logger.warning("%s: its last line was cut short and is now in %s", path, rejected)


def _migrated(path: Path) -> str:
    """A file's text in this schema and in our line ends: every value as it was written."""
    lines, schema = current_lines(decode(path.read_bytes(), path), path, COLUMNS)
    if schema != SCHEMA:
        logger.warning(
            "%s: %d rows brought from schema %d to %d", path, len(lines) - 1, schema, SCHEMA
        )
    return csv_text(lines)


# ---- summary


def update_summary(path: Path, rows: Sequence[Row], carried: Collection[int] = ()) -> None:
    """Put the frozen rows of one problem into the summary, in place of those it had.

    Its rows of the token counts `carried` stay where no new one has that count. Rows of other
    problems stay as they were written, those of an older schema too.

    Raises:
        TableError: a row that does not fit the schema, or the file is not a summary.
    """
    names = list(SUMMARY_COLUMNS)
    fresh = [
        {**{k: v for k, v in r.items() if k in SUMMARY_COLUMNS}, "schema": SCHEMA} for r in rows
    ]
    check_words(fresh, SUMMARY_COLUMNS)
    lines = lines_of(fresh, SUMMARY_COLUMNS)
    layer = [names.index(name) for name in ("problem", "num_ranks", "rank_mode")]
    replaced = {tuple(line[i] for i in layer) for line in lines}
    if path.exists():
        text = decode(path.read_bytes(), path)
        parse(text, path, SUMMARY_COLUMNS)
        old = current_lines(text, path, SUMMARY_COLUMNS)[0][1:]
        tokens, fresh_counts = names.index("num_tokens"), {r["num_tokens"] for r in rows}
        stays = {str(n) for n in set(carried) - fresh_counts}
        lines += [
            line
            for line in old
            if tuple(line[i] for i in layer) not in replaced or line[tokens] in stays
        ]
    lines.sort(key=lambda line: _summary_key(dict(zip(names, line, strict=True))))
    write_atomically(path, csv_text([names, *lines]))


def _summary_key(row: dict[str, str]) -> tuple[Any, ...]:
    return tuple(int(row[k]) if COLUMNS[k] == "int" else row[k] for k in SUMMARY_KEY)
