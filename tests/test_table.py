"""The results table: typed, append-only, whole after a crash, never ragged."""

from __future__ import annotations

import csv
import io
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tl_megamoe.explorer import table as table_module
from tl_megamoe.explorer.table import (
    ADDED,
    COLUMNS,
    RESUME_KEY,
    SCHEDULE_COLUMNS,
    SCHEMA,
    SUMMARY_COLUMNS,
    TableError,
    append_rows,
    finished_keys,
    key_of,
    parse,
    read_table,
    table_path,
    update_summary,
)
from tl_megamoe.schedule import Schedule


def row(**fields: Any) -> dict[str, Any]:
    schedule = Schedule()
    return {
        "problem": "p",
        "num_tokens": 16,
        "num_ranks": 8,
        "rank_mode": "one",
        "routing": "uniform",
        "seed": 0,
        "candidate": schedule.name,
        "phase": "fused",
        "recipe": "exact-128",
        "status": "ok",
        "source": "measured",
        "median_us": 205.5,
        "hidden": 4096,
        "intermediate": 2048,
        "num_local_experts": 32,
        "num_topk": 6,
        "device": "nvidia-h200",
        "kernel": "abc",
        **schedule.to_dict(),
        **fields,
    }


def as_schema_1(text: str) -> str:
    """A table's text as the first schema had it."""
    lines = list(csv.reader(io.StringIO(text)))
    kept = [i for i, name in enumerate(lines[0]) if name not in ADDED[2]]
    assert len(kept) == len(lines[0]) - 2
    old = [[line[i] for i in kept] for line in lines]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [old[0], *(["1", *line[1:]] for line in old[1:])]
    )
    return out.getvalue()


def test_columns_hold_the_contract_and_every_schedule_field() -> None:
    contract = (
        "problem num_tokens num_ranks rank_mode routing seed candidate status source median_us "
        "p10_us p90_us floor_us ratio_to_floor yardstick_tflops tflops hbm_gbs schema recipe phase "
        "observation reason baseline baseline_version baseline_us ratio_to_baseline sm_clock_mhz "
        "mem_clock_mhz power_w temperature_c device tilelang torch commit measured_at nvlink_gbs "
        "math_mode"
    ).split()
    assert set(contract) | set(Schedule().to_dict()) <= set(COLUMNS)
    assert set(RESUME_KEY) <= set(COLUMNS)
    words = {name for name, kind in SCHEDULE_COLUMNS.items() if kind == "str"}
    assert words == {"math_mode", "order"}
    assert set(SCHEDULE_COLUMNS.values()) == {"str", "int"}


def test_round_trip_is_typed(tmp_path: Path) -> None:
    path = table_path(tmp_path, "nvidia-h200", "p")
    append_rows(path, [row(), row(status="timeout", median_us=None, reason='took "long",\nkilled')])
    append_rows(path, [row(num_tokens=64)])
    frame = read_table(path)
    assert path.read_text().count("schema,problem") == 1
    assert list(frame.columns) == list(COLUMNS)
    assert frame["num_tokens"].tolist() == [16, 16, 64]
    assert frame["schema"].tolist() == [SCHEMA] * 3
    assert frame["median_us"].tolist()[0] == 205.5
    assert pd.isna(frame["median_us"][1])
    assert frame["reason"].tolist() == ["", 'took "long", killed', ""]
    assert str(frame["registers"].dtype) == "Int64"
    assert frame["registers"].isna().all()
    schedule = {name: frame[name][0] for name in Schedule().to_dict()}
    assert Schedule(**schedule) == Schedule()


def test_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.csv").empty
    assert finished_keys(tmp_path / "none.csv") == set()


def test_finished_keys_match_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    done = [row(), row(num_tokens=64, status="spilled", median_us=None)]
    append_rows(path, done)
    keys = finished_keys(path)
    assert keys == {key_of(r) for r in done}
    for other in (row(num_tokens=32), row(kernel="new"), row(source="model"), row(seed=1)):
        assert key_of(other) not in keys
    assert key_of(row(commit="another", measured_at="later", torch="3")) in keys


@pytest.mark.parametrize("keep", [1, 40, -1])
def test_a_line_cut_by_a_crash_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row()])
    whole = path.read_text()
    append_rows(path, [row(num_tokens=64)])
    cut = path.read_text()[len(whole) :][:keep]
    path.write_text(whole + cut)
    with caplog.at_level(logging.WARNING):
        assert read_table(path)["num_tokens"].tolist() == [16]
    assert "cut short" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        append_rows(path, [row(num_tokens=128)])
    assert "t.csv.rejected" in caplog.text
    assert read_table(path)["num_tokens"].tolist() == [16, 128]
    assert (tmp_path / "t.csv.rejected").read_text() == cut + "\n"


def test_a_cut_header_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("schema,prob")
    append_rows(path, [row()])
    assert read_table(path)["num_tokens"].tolist() == [16]


def test_ragged_foreign_and_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row(), row()])
    good = path.read_text()
    header, first, _ = good.splitlines()
    cases = {
        good + "1,2,3\n": "line 4: 3 values, the header has",
        good + first + ",more\n": "line 4",
        good.replace("\n2,", "\n3,"): "line 2: schema '3', the header is that of schema 2",
        good.replace("median_us", "mean_us", 1): "mean_us, median_us",
        good.replace("205.5", "fast", 1): "column median_us must hold float values",
        good.replace(",ok,", ",fine,", 1): "status 'fine' is none of ok, invalid",
        f"a,b\n{first}\n": "its header is neither that of schema 2 nor of an older one",
        as_schema_1(good).replace("\n1,", "\n2,"): "line 2: schema '2', the header is .* schema 1",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(TableError, match=message):
            read_table(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match="its header is neither that of schema 2"):
        append_rows(path, [row()])
    assert path.read_text() == "a,b\n1,2\n"
    assert header.startswith("schema,problem,num_tokens")


def test_bad_rows_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with pytest.raises(TableError, match="status='fine' is none of"):
        append_rows(path, [row(), row(status="fine")])
    with pytest.raises(TableError, match="unknown columns speed: a new column needs a new SCHEMA"):
        append_rows(path, [row(speed=1)])
    assert not path.exists()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file of schema 1 with a reason that needs quotes and a time of many digits."""
    path = tmp_path / "old.csv"
    append_rows(
        path, [row(), row(num_tokens=64, status="timeout", median_us=None, reason='a "b",c')]
    )
    path.write_text(as_schema_1(path.read_text()).replace("205.5", "205.50001234"))
    return path


def test_a_file_of_schema_1_is_read_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    frame = read_table(old)
    assert old.read_bytes() == before
    assert list(frame.columns) == list(COLUMNS)
    assert frame["schema"].tolist() == [2, 2]
    assert frame["math_mode"].tolist() == ["cooperative"] * 2
    assert frame["nvlink_gbs"].isna().all()
    assert frame["reason"].tolist() == ["", 'a "b",c']
    assert frame["median_us"][0] == 205.50001234
    assert finished_keys(old) == {key_of(row()), key_of(row(num_tokens=64))}


def test_the_first_append_brings_a_file_to_this_schema(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(csv.DictReader(io.StringIO(old.read_text())))
    pingpong = Schedule(math_mode="pingpong", block_m=64)
    with caplog.at_level(logging.WARNING):
        append_rows(old, [row(num_tokens=128, nvlink_gbs=1.5, **pingpong.to_dict())])
    assert "2 rows brought from schema 1 to 2" in caplog.text
    after = list(csv.DictReader(io.StringIO(old.read_text())))
    assert list(after[0]) == list(COLUMNS)
    # Nothing is lost: every value as it was written, what is new beside it.
    new = {"schema": "2", "nvlink_gbs": "", "math_mode": "cooperative"}
    assert after[:2] == [{**line, **new} for line in before]
    assert (after[2]["math_mode"], after[2]["nvlink_gbs"]) == ("pingpong", "1.5")
    assert [p.name for p in old.parent.iterdir()] == ["old.csv"]
    caplog.clear()
    append_rows(old, [row(num_tokens=256)])
    assert not caplog.records
    assert read_table(old)["num_tokens"].tolist() == [16, 64, 128, 256]


def test_a_cut_line_of_schema_1_is_set_aside_first(old: Path) -> None:
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


def test_a_summary_of_schema_1_is_brought_along(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    values = {k: v for k, v in row().items() if k in SUMMARY_COLUMNS}
    update_summary(path, [values])
    path.write_text(as_schema_1(path.read_text()))
    update_summary(path, [{**values, "problem": "q"}])
    frame = parse(path.read_text(), path, SUMMARY_COLUMNS)
    assert frame["problem"].tolist() == ["p", "q"]
    assert frame["math_mode"].tolist() == ["cooperative"] * 2
    assert path.read_text().splitlines()[1].startswith("2,p,")


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
