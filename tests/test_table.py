"""The results table: typed, append-only, whole after a crash, never ragged."""

from __future__ import annotations

import csv
import errno
import io
import logging
import multiprocessing
import os
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tl_megamoe.explorer import schema as schema_module
from tl_megamoe.explorer import table as table_module
from tl_megamoe.explorer.schema import POSITIVE
from tl_megamoe.explorer.table import (
    COLUMNS,
    MIGRATIONS,
    RESUME_KEY,
    SCHEDULE_COLUMNS,
    SCHEMA,
    STATUSES,
    SUMMARY_COLUMNS,
    TableError,
    append_rows,
    check_device,
    finished_keys,
    key_of,
    load,
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
        "stage": "screen",
        "observation": 0,
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


RESULTS = Path(__file__).resolve().parents[1] / "results"


def as_schema(text: str, schema: int) -> str:
    """A table's text as an older schema had it."""
    lines = list(csv.reader(io.StringIO(text)))
    names = list(lines[0])
    places = list(range(len(names)))
    for version in range(SCHEMA, schema, -1):
        change = MIGRATIONS[version]
        back = {new: old for old, new in change.renamed.items()}
        places = [i for i in places if names[i] not in change.added]
        names = [back.get(name, name) for name in names]
    old = [[line[i] for i in places] for line in (names, *lines[1:])]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [old[0], *([str(schema), *line[1:]] for line in old[1:])]
    )
    return out.getvalue()


def test_columns_hold_the_contract_and_every_schedule_field() -> None:
    contract = (
        "schema problem num_tokens num_ranks rank_mode routing seed stage observation run "
        "candidate phase recipe status source median_us p10_us p90_us num_samples ranks_us "
        "floor_us ratio_to_floor yardstick_tflops tflops hbm_gbs nvlink_gbs predicted_us notes "
        "reason baseline baseline_version baseline_us ratio_to_baseline sm_clock_mhz "
        "mem_clock_mhz power_w temperature_c sm_clock_end_mhz mem_clock_end_mhz power_end_w "
        "temperature_end_c registers spill_bytes smem_bytes num_wgmma source_hash hidden "
        "intermediate num_local_experts num_topk touched_experts pairs capacity"
    ).split()
    last = "device card tilelang torch driver kernel commit measured_at".split()
    assert list(COLUMNS) == [*contract, *Schedule().to_dict(), *last]
    assert COLUMNS["observation"] == "int"
    assert set(RESUME_KEY) - set(COLUMNS) == set()
    assert {"stage", "observation", "seed", "kernel"} <= set(RESUME_KEY)
    words = {name for name, kind in SCHEDULE_COLUMNS.items() if kind == "str"}
    assert words == {"math_mode", "order"}
    assert set(SCHEDULE_COLUMNS.values()) == {"str", "int"}
    assert set(SUMMARY_COLUMNS) <= set(COLUMNS)


SCHEMA_2 = (
    "schema,problem,num_tokens,num_ranks,rank_mode,routing,seed,candidate,phase,recipe,status,"
    "source,median_us,p10_us,p90_us,num_samples,floor_us,ratio_to_floor,yardstick_tflops,tflops,"
    "hbm_gbs,nvlink_gbs,predicted_us,observation,reason,baseline,baseline_version,baseline_us,"
    "ratio_to_baseline,sm_clock_mhz,mem_clock_mhz,power_w,temperature_c,registers,spill_bytes,"
    "smem_bytes,num_wgmma,hidden,intermediate,num_local_experts,num_topk,touched_experts,pairs,"
    "capacity,math_mode,block_m,linear1_block_n,linear2_block_n,stages,experts_per_wave,order,lag,"
    "dispatch_warps,load_warps,load_registers,math_registers,rows_in_flight,num_sms,prefetch,"
    "device,tilelang,torch,kernel,commit,measured_at"
)


def test_headers_of_older_schemas_are_those_that_files_have() -> None:
    assert schema_module.header_of(COLUMNS, 3) == list(COLUMNS)
    assert schema_module.header_of(COLUMNS, 2) == SCHEMA_2.split(",")
    first = [name for name in SCHEMA_2.split(",") if name not in ("nvlink_gbs", "math_mode")]
    assert schema_module.header_of(COLUMNS, 1) == first


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


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row(), row(num_tokens=64)])
    good = path.read_text()
    first = good.splitlines()[1]
    cases = {
        good.replace("\n3,", "\n4,"): "line 2: schema '4', the header is that of schema 3",
        good.replace("median_us", "mean_us", 1): "mean_us, median_us. Move the file away",
        f"a,b\n{first}\n": "its header is neither that of schema 3 nor of an older one",
        "schema,new\n4,1\n": "rows have schema 4, this version .* knows 3: update tl_megamoe",
        as_schema(good, 1).replace("\n1,", "\n2,"): "line 2: schema '2', .* that of schema 1",
        as_schema(good, 2).replace("\n2,", "\n3,"): "line 2: schema '3', .* that of schema 2",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(TableError, match=message):
            read_table(path)
        with pytest.raises(TableError, match=message):
            append_rows(path, [row(num_tokens=128)])
        assert path.read_text() == text


CORRUPT = {
    "ragged": (lambda line: b"3,p,16", "3 values, the header has"),
    "more values": (lambda line: line + b",more", "values, the header has"),
    "empty": (lambda line: b"", "0 values, the header has"),
    "not a number": (
        lambda line: line.replace(b"205.5", b"fast"),
        "column median_us must hold float values, found 'fast'",
    ),
    "not an integer": (
        lambda line: line.replace(b",4096,", b",4e3,"),
        "column hidden must hold int values, found '4e3'",
    ),
    "too large": (
        lambda line: line.replace(b",4096,", b",99999999999999999999,"),
        "column hidden must hold int values",
    ),
    "negative time": (
        lambda line: line.replace(b"205.5", b"-205.5"),
        "column median_us must hold positive finite numbers, found -205.5",
    ),
    "infinite time": (lambda line: line.replace(b"205.5", b"inf"), "found inf"),
    "no number": (lambda line: line.replace(b"205.5", b"nan"), "found nan"),
    "order": (
        lambda line: line.replace(b"205.5,,", b"205.5,206,"),
        "column p10_us must not exceed median_us, found 206 and 205.5",
    ),
    "status": (lambda line: line.replace(b",ok,", b",fine,"), "status 'fine' is none of ok, inv"),
    "stage": (lambda line: line.replace(b",screen,", b",,"), "stage '' is none of screen, confirm"),
    "NUL bytes": (lambda line: line[:40] + b"\0" * 30 + line[70:], "NUL bytes"),
    "not UTF-8": (lambda line: line.replace(b",ok,", b",\xff\xfe,"), "byte 0xff is not UTF-8"),
    "open quote": (lambda line: line.replace(b",ok,", b',"ok,'), "it is not CSV"),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_line_is_named_with_what_to_do(tmp_path: Path, kind: str) -> None:
    damage, message = CORRUPT[kind]
    path = tmp_path / "t.csv"
    append_rows(path, [row(num_tokens=n) for n in (16, 32, 64)])
    lines = path.read_bytes().split(b"\n")
    lines[2] = damage(lines[2])
    path.write_bytes(b"\n".join(lines))
    what = f"t.csv, line 3: .*{re.escape(message)}.*Restore the file .* or delete that line"
    with pytest.raises(TableError, match=what):
        read_table(path)
    with pytest.raises(TableError, match="line 3"):
        load(path)
    with pytest.raises(TableError, match="line 3"):
        finished_keys(path)
    del lines[2]  # what the message says
    path.write_bytes(b"\n".join(lines))
    assert read_table(path)["num_tokens"].tolist() == [16, 64]


def test_bad_rows_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    cases: list[tuple[dict[str, Any], str]] = [
        (row(status="fine"), "status='fine' is none of"),
        (row(stage="final"), "stage='final' is none of screen, confirm, bench"),
        (row(stage=None), "stage=None is none of"),
        (row(source="guess"), "source='guess' is none of measured, model"),
        (row(observation=None), "row without observation"),
        (row(observation="rel_error=1e-3"), "observation='rel_error=1e-3': the column holds int"),
        (row(num_samples=1.5), "num_samples=1.5: the column holds int"),
        (row(median_us="fast"), "median_us='fast': the column holds float"),
        *(
            (row(**{name: value}), rf"candidate '.*': column {name} must hold positive finite num")
            for name in POSITIVE
            for value in (0, -1.5, float("inf"))
        ),
        (row(num_samples=0), "column num_samples must be at least 1, found 0"),
        (row(p10_us=206), "column p10_us must not exceed median_us, found 206 and 205.5"),
        (row(p90_us=205), "column median_us must not exceed p90_us, found 205.5 and 205"),
        (row(median_us=None, p10_us=2, p90_us=1), "column p10_us must not exceed p90_us"),
        (row(speed=1), "unknown columns speed: a new column needs a new SCHEMA"),
        (row(device="nvidia-h100"), "devices 'nvidia-h100', 'nvidia-h200' in one table"),
    ]
    for bad, message in cases:
        with pytest.raises(TableError, match=message):
            append_rows(path, [row(), bad])
        assert not path.exists() or path.read_bytes() == b""


def test_quantiles_may_be_equal_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    good = [
        row(p10_us=205.5, p90_us=205.5, num_samples=1),
        row(num_tokens=32, p10_us=205.5 + 1e-9),  # equal as far as a file tells
        row(num_tokens=64, median_us=float("nan"), p90_us=1),
    ]
    append_rows(path, good)
    assert len(read_table(path)) == 3


@pytest.mark.parametrize("published", sorted(RESULTS.glob("*/*.csv")), ids=lambda path: path.name)
def test_published_files_read(published: Path) -> None:
    columns = SUMMARY_COLUMNS if published.name == "summary.csv" else COLUMNS
    assert len(parse(published.read_text(), published, columns)) > 0


def test_a_problem_or_device_without_rows_is_named(tmp_path: Path) -> None:
    append_rows(table_path(tmp_path, "nvidia-h200", "p"), [row()])
    append_rows(table_path(tmp_path, "nvidia-h100", "q"), [row(problem="q", device="nvidia-h100")])
    assert len(load(tmp_path, problem="p", device="nvidia-h200")) == 1
    for wanted, message in (
        ({"problem": "x"}, "no rows of problem 'x'; it has rows of p, q"),
        ({"device": "h200"}, "no rows of device 'h200'; it has rows of nvidia-h100, nvidia-h200"),
        ({"problem": "q", "device": "nvidia-h200"}, "device 'nvidia-h200'; .* of nvidia-h100$"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, **wanted)


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_is_written_and_read(tmp_path: Path, status: str) -> None:
    append_rows(tmp_path / "t.csv", [row(status=status, stage="confirm", observation=2)])
    frame = read_table(tmp_path / "t.csv")
    assert frame[["status", "stage", "observation"]].values.tolist() == [[status, "confirm", 2]]


def test_whatever_a_compiler_says_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    reason = 'a\0b\r\n\x0bc \udcff \u2028 "d", ' + "x" * 200_000
    append_rows(path, [row(status="compile_error", reason=reason), row(num_tokens=64)])
    found = read_table(path)["reason"].tolist()
    assert found[0].startswith('a b c ? "d", xxx')
    assert found[0].endswith("x...")
    assert len(found[0]) == schema_module.MAX_TEXT
    assert found[1] == ""


def test_rows_of_another_device_are_refused(tmp_path: Path) -> None:
    path = table_path(tmp_path, "nvidia-h100", "p")
    append_rows(path, [row(), row(num_tokens=64)])
    assert len(read_table(path)) == 2
    message = "2 of 2 rows are of device 'nvidia-h200', not of 'nvidia-h100'.*tl-megamoe merge"
    with pytest.raises(TableError, match=message):
        read_table(path, "nvidia-h100")
    with pytest.raises(TableError, match=message):
        finished_keys(path, "nvidia-h100")
    with pytest.raises(TableError, match=message):
        load(tmp_path)
    with pytest.raises(TableError, match=message):
        check_device(read_table(path), "nvidia-h100", path)
    before = path.read_bytes()
    with pytest.raises(TableError, match="devices 'nvidia-h100', 'nvidia-h200' in one table"):
        append_rows(path, [row(device="nvidia-h100")])
    assert path.read_bytes() == before
    check_device(read_table(path), "nvidia-h200", path)
    check_device(read_table(tmp_path / "none.csv"), "nvidia-h100", path)


@pytest.fixture(params=[1, 2], ids=["schema 1", "schema 2"])
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
    assert f"2 rows brought from schema {old_schema} to 3" in caplog.text
    after = list(csv.DictReader(io.StringIO(old.read_text())))
    assert list(after[0]) == list(COLUMNS)
    # Nothing is lost: every value as it was written, what is new beside it.
    new = {"nvlink_gbs": "", "math_mode": "cooperative"} if old_schema == 1 else {}
    for line, migrated in zip(before, after[:2], strict=True):
        expected = {**MIGRATIONS[3].added, **new, **line, "schema": "3"}
        assert migrated == {**expected, "notes": line["observation"], "observation": "0"}
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


@pytest.mark.parametrize("schema", [1, 2])
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
    assert path.read_text().splitlines()[1].startswith("3,p,")
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
        assert line.startswith("3,p,") or "3,p,".startswith(line)


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


# ---- the public reader


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    when = "2026-11-29T15:59:34+00:00"
    append_rows(table_path(root, "nvidia-h200", "p"), [row(measured_at=when, registers=168), row()])
    append_rows(table_path(root, "nvidia-h200", "q"), [row(problem="q")])
    append_rows(table_path(root, "nvidia-h100", "p"), [row(device="nvidia-h100", measured_at=when)])
    summary = {k: v for k, v in row().items() if k in SUMMARY_COLUMNS}
    update_summary(root / "nvidia-h200" / "summary.csv", [summary])
    return root


def test_load_reads_all_tables_typed(results: Path) -> None:
    frame = load(str(results))
    assert list(frame.columns) == list(COLUMNS)
    assert frame[["device", "problem"]].values.tolist() == [
        ["nvidia-h100", "p"],
        ["nvidia-h200", "p"],
        ["nvidia-h200", "p"],
        ["nvidia-h200", "q"],
    ]
    assert frame["measured_at"][0] == pd.Timestamp("2026-11-29T15:59:34", tz="UTC")
    assert str(frame["measured_at"].dt.tz) == "UTC"
    assert frame["measured_at"].isna().tolist() == [False, False, True, True]
    assert str(frame["registers"].dtype) == "Int64"
    assert frame["registers"].tolist() == [pd.NA, 168, pd.NA, pd.NA]
    assert str(frame["median_us"].dtype) == "float64"
    assert {str(frame[name].dtype) for name in ("status", "stage", "reason")} == {"string"}
    assert (frame["reason"] == "").all()
    assert frame.groupby("status").size().to_dict() == {"ok": 4}


@pytest.mark.parametrize(
    ("place", "filters", "rows"),
    [
        ("", {"problem": "p"}, 3),
        ("", {"device": "nvidia-h200"}, 3),
        ("", {"problem": "p", "device": "nvidia-h200"}, 2),
        ("nvidia-h200", {}, 3),
        ("nvidia-h200/p.csv", {}, 2),
    ],
)
def test_load_takes_a_part(results: Path, place: str, filters: dict[str, str], rows: int) -> None:
    frame = load(results / place, **filters)
    assert len(frame) == rows
    assert frame.index.tolist() == list(range(rows))
    assert list(frame.columns) == list(COLUMNS)


def test_load_says_what_is_missing(results: Path) -> None:
    with pytest.raises(ValueError, match="no table there; give a <device>/<problem>.csv"):
        load(results / "nvidia-a100")
    path = results / "nvidia-h100" / "p.csv"
    path.write_text(path.read_text().replace("2026-11-29T15", "yesterday"))
    with pytest.raises(TableError, match="measured_at must hold ISO 8601 times"):
        load(results)


def test_load_reads_the_published_results() -> None:
    frame = load(RESULTS, problem="deepseek-v4-flash")
    ok = frame[frame["status"] == "ok"]
    assert len(ok) > 1000
    assert (ok["median_us"] > 0).all()
    assert ok["measured_at"].notna().all()
