"""Tables on disk: older schemas, several writers, a full disk, a process that is killed."""

from __future__ import annotations

import csv
import errno
import io
import logging
import multiprocessing
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from table_rows import RESULTS, as_schema, row

from tl_megamoe.explorer import table as table_module
from tl_megamoe.explorer.table import (
    COLUMNS,
    MIGRATIONS,
    SCHEMA,
    SUMMARY_COLUMNS,
    TableError,
    append_rows,
    finished_keys,
    key_of,
    parse,
    read_table,
    update_summary,
)
from tl_megamoe.schedule import Schedule


@pytest.fixture(params=[1, 2, 3, 4], ids=["schema 1", "schema 2", "schema 3", "schema 4"])
def old_schema(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def old(tmp_path: Path, old_schema: int) -> Path:
    """A file of an older schema with texts that need quotes and a time of many digits."""
    path = tmp_path / "old.csv"
    rows = [
        row(notes="rel_error=1e-3, worst=2e-3"),
        row(num_tokens=64, status="timeout", median_us=None, reason='a "b",c'),
    ]
    append_rows(path, rows)
    path.write_text(as_schema(path.read_text(), old_schema).replace("205.5", "205.50001234"))
    return path


def test_a_file_of_an_older_schema_is_read_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    frame = read_table(old)
    assert old.read_bytes() == before
    assert list(frame.columns) == list(COLUMNS)
    assert frame["schema"].tolist() == [SCHEMA] * 2
    assert frame["math_mode"].tolist() == ["cooperative"] * 2
    assert frame["nvlink_gbs"].isna().all()
    assert frame["notes"].tolist() == ["rel_error=1e-3, worst=2e-3", ""]
    assert frame["stage"].tolist() == ["screen"] * 2
    assert frame["observation"].tolist() == [0, 0]
    assert frame["reason"].tolist() == ["", 'a "b",c']
    assert frame["median_us"][0] == 205.50001234
    for name in ("run", "ranks_us", "source_hash", "card", "driver"):
        assert frame[name].tolist() == ["", ""]
    assert frame["power_end_w"].isna().all()
    assert finished_keys(old) == {key_of(row()), key_of(row(num_tokens=64))}


def test_the_first_append_brings_a_file_to_this_schema(
    old: Path, old_schema: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(csv.DictReader(io.StringIO(old.read_text())))
    pingpong = Schedule(math_mode="pingpong", block_m=64)
    with caplog.at_level(logging.WARNING):
        append_rows(old, [row(num_tokens=128, nvlink_gbs=1.5, **pingpong.to_dict())])
    assert f"2 rows brought from schema {old_schema} to {SCHEMA}" in caplog.text
    after = list(csv.DictReader(io.StringIO(old.read_text())))
    assert list(after[0]) == list(COLUMNS)
    # Nothing is lost: every value as it was written, what is new beside it.
    new: dict[str, str] = {}
    for version in range(old_schema + 1, SCHEMA + 1):
        new |= MIGRATIONS[version].added
    for line, migrated in zip(before, after[:2], strict=True):
        expected = {**new, **line, "schema": str(SCHEMA)}
        if old_schema < 3:
            expected |= {"notes": line["observation"], "observation": "0"}
        assert migrated == expected
    assert (after[2]["math_mode"], after[2]["nvlink_gbs"]) == ("pingpong", "1.5")
    assert [p.name for p in old.parent.iterdir()] == ["old.csv"]
    caplog.clear()
    append_rows(old, [row(num_tokens=256)])
    assert not caplog.records
    assert read_table(old)["num_tokens"].tolist() == [16, 64, 128, 256]


def test_the_published_table_is_brought_along(tmp_path: Path) -> None:
    published = RESULTS / "nvidia-h200" / "deepseek-v4-flash.csv"
    path = tmp_path / published.name
    shutil.copy(published, path)
    before = list(csv.DictReader(io.StringIO(path.read_text())))
    frame = read_table(path, "nvidia-h200")
    assert len(finished_keys(path)) == len(frame) == len(before)
    fresh = {k: v for k, v in frame.iloc[0].to_dict().items() if not pd.isna(v)}
    append_rows(path, [{**fresh, "observation": 99}])
    after = list(csv.DictReader(io.StringIO(path.read_text())))
    assert list(after[0]) == list(COLUMNS)
    assert len(after) == len(before) + 1
    same = set(before[0]) - {"schema", "observation"}
    for line, migrated in zip(before, after[:-1], strict=True):
        assert {k: migrated[k] for k in same} == {k: line[k] for k in same}
        assert migrated["notes"] == line.get("notes", line["observation"])
    assert read_table(path).iloc[:-1].equals(frame)


def test_a_cut_line_of_an_older_schema_is_set_aside_first(old: Path) -> None:
    whole = old.read_text()
    old.write_text(whole + whole.splitlines()[1][:30])
    append_rows(old, [row(num_tokens=128)])
    assert read_table(old)["num_tokens"].tolist() == [16, 64, 128]
    assert (old.parent / "old.csv.rejected").read_text() == whole.splitlines()[1][:30] + "\n"


def test_a_migration_that_fails_leaves_the_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left")

    before = old.read_bytes()
    monkeypatch.setattr(table_module.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        append_rows(old, [row(num_tokens=128)])
    assert old.read_bytes() == before
    assert [p.name for p in old.parent.iterdir()] == ["old.csv"]
    old.write_text(old.read_text() + "1,2,3\n")
    ragged = old.read_bytes()
    with pytest.raises(TableError, match="line 4: 3 values"):
        append_rows(old, [row(num_tokens=128)])
    assert old.read_bytes() == ragged


def test_writers_that_meet_at_a_migration_lose_nothing(old: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(str(old), seed)) for seed in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    frame = read_table(old)
    assert len(frame) == 2 + 3 * 40
    assert frame.groupby("seed").size().to_dict() == {0: 2, 1: 40, 2: 40, 3: 40}


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_a_summary_of_an_older_schema_is_brought_along(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "summary.csv"
    values = {k: v for k, v in row().items() if k in SUMMARY_COLUMNS}
    update_summary(path, [values])
    path.write_text(as_schema(path.read_text(), schema).replace("205.5", "205.50001234"))
    update_summary(path, [{**values, "problem": "q", "stage": "confirm"}])
    frame = parse(path.read_text(), path, SUMMARY_COLUMNS)
    assert frame["problem"].tolist() == ["p", "q"]
    assert frame["math_mode"].tolist() == ["cooperative"] * 2
    assert frame["stage"].tolist() == ["screen", "confirm"]
    assert path.read_text().splitlines()[1].startswith(f"{SCHEMA},p,")
    assert ",205.50001234," in path.read_text()  # as it was written


def test_the_published_summary_is_brought_along(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    shutil.copy(RESULTS / "nvidia-h200" / "summary.csv", path)
    before = list(csv.DictReader(io.StringIO(path.read_text())))
    update_summary(path, [{k: v for k, v in row().items() if k in SUMMARY_COLUMNS}])
    after = list(csv.DictReader(io.StringIO(path.read_text())))
    assert list(after[0]) == list(SUMMARY_COLUMNS)
    same = set(before[0]) - {"schema"}
    others = [{k: line[k] for k in same} for line in after if line["problem"] != "p"]
    assert others == [{k: line[k] for k in same} for line in before]


def append_many(path: str, seed: int) -> None:
    for n in range(20):
        append_rows(Path(path), [row(seed=seed, num_tokens=n + 1), row(seed=seed, num_tokens=100)])


def test_two_writers_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(str(path), seed)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    frame = read_table(path)
    assert len(frame) == 80
    # One write a batch: the two rows of a call are neighbours.
    assert (frame["seed"].to_numpy()[::2] == frame["seed"].to_numpy()[1::2]).all()


def test_summary_replaces_only_its_problem(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"

    def frozen(problem: str, tokens: int, us: float) -> dict[str, Any]:
        values = row(problem=problem, num_tokens=tokens, median_us=us)
        return {k: v for k, v in values.items() if k in SUMMARY_COLUMNS}

    update_summary(path, [frozen("b", 16, 1.0), frozen("b", 64, 2.0)])
    update_summary(path, [frozen("a", 16, 3.0)])
    update_summary(path, [frozen("b", 128, 4.0)])
    frame = parse(path.read_text(), path, SUMMARY_COLUMNS)
    assert frame[["problem", "num_tokens", "median_us"]].values.tolist() == [
        ["a", 16, 3.0],
        ["b", 128, 4.0],
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["summary.csv"]


# ---- a disk that is full, a process that is killed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("rows_before", [0, 2])
def test_a_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, rows_before: int
) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row(num_tokens=n + 1) for n in range(rows_before)])
    before = path.read_bytes() if rows_before else b""
    real, calls = os.write, [0]

    def short_then_full(fd: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return real(fd, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(table_module.os, "write", short_then_full)
    message = "t.csv: .*: 2 rows are not recorded.*the same command resumes"
    with pytest.raises(OSError, match=message) as caught:
        append_rows(path, [row(num_tokens=64), row(num_tokens=128)])
    monkeypatch.undo()
    assert caught.value.errno == code
    assert calls[0] == 2
    assert path.read_bytes() == before
    append_rows(path, [row(num_tokens=64), row(num_tokens=128)])
    assert len(read_table(path)) == rows_before + 2
    assert not (tmp_path / "t.csv.rejected").exists()


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(table_module.os, "write", lambda fd, data: real(fd, data[:100]))
    append_rows(tmp_path / "t.csv", [row(), row(num_tokens=64)])
    assert read_table(tmp_path / "t.csv")["num_tokens"].tolist() == [16, 64]


def test_a_failed_sync_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row()])
    before = path.read_bytes()

    def failed(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(table_module.os, "fsync", failed)
    with pytest.raises(OSError, match="1 rows are not recorded"):
        append_rows(path, [row(num_tokens=64)])
    assert path.read_bytes() == before


def append_under_limit(path: str, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        append_rows(Path(path), [row(num_tokens=n) for n in range(64, 96)])
    except OSError as error:
        os._exit(7 if "32 rows are not recorded" in str(error) else 8)
    os._exit(0)


@pytest.mark.parametrize("schema", [SCHEMA, 2])
def test_a_real_limit_leaves_the_file_as_it_was(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row()])
    path.write_text(as_schema(path.read_text(), schema))
    before = path.read_bytes()
    limit = len(before) + 1500  # a few rows fit: the kernel writes them, then refuses
    context = multiprocessing.get_context("fork")
    child = context.Process(target=append_under_limit, args=(str(path), limit))
    child.start()
    child.join()
    assert child.exitcode == 7
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


KILLED_ROWS = 120


def append_what_is_missing(path: str, slow: bool) -> None:
    """A search in small: rows that are not there yet, in batches of five."""
    real = os.write

    def in_pieces(fd: int, data: bytes) -> int:
        time.sleep(0.001)  # a kill falls between two pieces
        return real(fd, data[:150])

    if slow:
        os.write = in_pieces  # type: ignore[assignment]
    done = finished_keys(Path(path))
    todo = [r for n in range(KILLED_ROWS) if key_of(r := row(num_tokens=n + 1)) not in done]
    for start in range(0, len(todo), 5):
        append_rows(Path(path), todo[start : start + 5])


@pytest.mark.parametrize("schema", [SCHEMA, 2])
def test_rows_are_there_once_however_often_a_search_is_killed(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row(num_tokens=KILLED_ROWS + 1)])
    path.write_text(as_schema(path.read_text(), schema))
    context = multiprocessing.get_context("fork")
    for kill in range(8):
        child = context.Process(target=append_what_is_missing, args=(str(path), True))
        child.start()
        size, wait = path.stat().st_size, time.monotonic() + 10
        while path.stat().st_size == size and child.is_alive() and time.monotonic() < wait:
            time.sleep(0.001)
        time.sleep(0.003 * kill)  # another place in the batch each time
        child.kill()
        child.join()
        assert child.exitcode == -9
        read_table(path)  # whatever was cut, what is whole can be read
    last = context.Process(target=append_what_is_missing, args=(str(path), False))
    last.start()
    last.join()
    assert last.exitcode == 0
    assert sorted(read_table(path)["num_tokens"]) == list(range(1, KILLED_ROWS + 2))
    rejected = tmp_path / "t.csv.rejected"
    for line in rejected.read_text().splitlines() if rejected.exists() else []:
        assert line.startswith(f"{SCHEMA},p,") or f"{SCHEMA},p,".startswith(line)


def test_a_file_with_other_line_ends_is_read_and_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row()])
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_table(path)["measured_at"].tolist() == [""]
    append_rows(path, [row(num_tokens=64)])
    assert b"\r" not in path.read_bytes()
    assert read_table(path)["num_tokens"].tolist() == [16, 64]
    assert not caplog.records
