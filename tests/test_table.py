"""The results table: typed, append-only, whole after a crash, never ragged."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tl_megamoe.explorer.table import (
    COLUMNS,
    RESUME_KEY,
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


def test_columns_hold_the_contract_and_every_schedule_field() -> None:
    contract = (
        "problem num_tokens num_ranks rank_mode routing seed candidate status source median_us "
        "p10_us p90_us floor_us ratio_to_floor yardstick_tflops tflops hbm_gbs schema recipe phase "
        "observation reason baseline baseline_version baseline_us ratio_to_baseline sm_clock_mhz "
        "mem_clock_mhz power_w temperature_c device tilelang torch commit measured_at"
    ).split()
    assert set(contract) | set(Schedule().to_dict()) <= set(COLUMNS)
    assert set(RESUME_KEY) <= set(COLUMNS)


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
        good.replace("\n1,", "\n2,"): "line 2: schema '2', this version reads 1",
        good.replace("median_us", "mean_us", 1): "mean_us, median_us",
        good.replace("205.5", "fast", 1): "column median_us must hold float values",
        good.replace(",ok,", ",fine,", 1): "status 'fine' is none of ok, invalid",
        f"a,b\n{first}\n": "its header is not that of schema 1",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(TableError, match=message):
            read_table(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match="its header is not that of schema 1"):
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
