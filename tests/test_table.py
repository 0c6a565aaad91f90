"""The results table: typed, append-only, whole after a crash, never ragged."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from table_rows import RESULTS, as_schema, row

from tl_megamoe.explorer import schema as schema_module
from tl_megamoe.explorer.schema import POSITIVE
from tl_megamoe.explorer.table import (
    COLUMNS,
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
    last = "device card tilelang nvcc torch driver kernel commit measured_at".split()
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
    assert schema_module.header_of(COLUMNS, 6) == list(COLUMNS)
    fifth = [name for name in COLUMNS if name != "nvcc"]
    assert schema_module.header_of(COLUMNS, 5) == fifth
    fourth = [name for name in fifth if name != "cluster_size"]
    assert schema_module.header_of(COLUMNS, 4) == fourth
    third = [name for name in fourth if name != "evict_first"]
    assert schema_module.header_of(COLUMNS, 3) == third
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
        good.replace(f"\n{SCHEMA},", f"\n{SCHEMA + 1},"): (
            f"line 2: schema '{SCHEMA + 1}', the header is that of schema {SCHEMA}"
        ),
        good.replace("median_us", "mean_us", 1): "mean_us, median_us. Move the file away",
        f"a,b\n{first}\n": f"its header is neither that of schema {SCHEMA} nor of an older one",
        f"schema,new\n{SCHEMA + 1},1\n": (
            f"rows have schema {SCHEMA + 1}, this version .* knows {SCHEMA}: update tl_megamoe"
        ),
        **{
            as_schema(good, old).replace(f"\n{old},", f"\n{old + 1},"): (
                f"line 2: schema '{old + 1}', .* that of schema {old}"
            )
            for old in range(1, SCHEMA)
        },
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(TableError, match=message):
            read_table(path)
        with pytest.raises(TableError, match=message):
            append_rows(path, [row(num_tokens=128)])
        assert path.read_text() == text


CORRUPT = {
    "ragged": (lambda line: b"4,p,16", "3 values, the header has"),
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
