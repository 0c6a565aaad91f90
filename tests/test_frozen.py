"""Frozen schedules: what is frozen, what a launch gets, and what a bad file says."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fake_rows import BASE, DEVICE, FLASH, VIEW, confirm_rows

from tl_megamoe import frozen
from tl_megamoe.explorer.freeze import plan_freeze, write_freeze
from tl_megamoe.explorer.table import SUMMARY_COLUMNS, append_rows, parse, table_path
from tl_megamoe.frozen import device_key, frozen_paths, lookup, read_frozen, resolve
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import ALL_RECIPES
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule

FAST, SLOW = replace(BASE, stages=3), replace(BASE, rows_in_flight=2)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    rows = [
        *confirm_rows(16, {SLOW: 220.0, FAST: 210.0}),
        *confirm_rows(16, {BASE: 2.0}, source="model", run="m"),
        *confirm_rows(16, {BASE: 3.0}, phase="linear1", run="p"),
        *confirm_rows(16, {BASE: 4.0}, routing="hot1", run="h"),
        *confirm_rows(16, {BASE: 5.0}, recipe="pow2-128", run="r"),
        *confirm_rows(16, {BASE: 6.0}, num_ranks=4, run="4"),
        *confirm_rows(16, {BASE: 7.0}, hidden=1024, run="s"),
        *confirm_rows(64, {BASE: 230.0}),
        *confirm_rows(1024, {SLOW: 480.0}),
    ]
    append_rows(table_path(tmp_path / "results", DEVICE, VIEW.name), rows)
    return tmp_path


def run_freeze(tables: Path, problem: Problem = VIEW) -> Path:
    plan = plan_freeze(problem, DEVICE, tables / "results", tables / "schedules")
    write_freeze(plan)
    return plan.path


def test_confirmed_rows_are_frozen(tables: Path) -> None:
    path = run_freeze(tables)
    assert path == tables / "schedules" / DEVICE / "deepseek-v4-flash.json"
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert data["device"] == DEVICE
    assert data["problem"] == {
        "name": "deepseek-v4-flash",
        "hidden": 4096,
        "intermediate": 2048,
        "num_experts": 256,
        "num_topk": 6,
    }
    got = [(e["num_ranks"], e["rank_mode"], e["max_tokens"]) for e in data["entries"]]
    assert got == [(8, "one", 32), (8, "one", 256), (8, "one", 1024)]  # geometric middles
    first = data["entries"][0]
    assert Schedule.from_dict(first["schedule"]) == FAST
    assert first["candidate"] == FAST.name
    assert first["measured_at"]
    (cell,) = first["cells"]
    rows = confirm_rows(16, {SLOW: 220.0, FAST: 210.0})
    measured = median(r["median_us"] for r in rows if r["candidate"] == FAST.name)
    assert (cell["num_tokens"], cell["median_us"]) == (16, pytest.approx(measured, rel=1e-4))
    assert (cell["num_seeds"], cell["num_observations"]) == (3, 9)
    assert cell["runner_up"] == SLOW.name
    assert cell["margin"] == pytest.approx(10 / 220, rel=0.1)


def test_intervals_have_no_surprises(tables: Path) -> None:
    run_freeze(tables)
    root = tables / "schedules"
    expected = {0: FAST, 1: FAST, 16: FAST, 32: FAST, 33: BASE, 64: BASE, 256: BASE, 257: SLOW}
    for tokens, schedule in {**expected, 1024: SLOW, 8192: SLOW}.items():
        found = resolve(VIEW, "NVIDIA H200", 8192, tokens, root=root)
        assert (found.origin, found.schedule) == ("frozen", schedule), tokens
        assert found.entry is not None
    assert "for 33 to 256 tokens" in resolve(VIEW, DEVICE, 8192, 64, root=root).message
    assert "for 257 and more tokens" in resolve(VIEW, DEVICE, 8192, 8192, root=root).message


def test_sizes_decide_and_names_do_not(tables: Path) -> None:
    run_freeze(tables)
    root = tables / "schedules"
    same = replace(VIEW, name="my-layer", from_num_ranks=None)
    assert lookup(same, DEVICE, 16, root=root) is not None
    for other in (
        replace(VIEW, hidden=2048),
        replace(VIEW, intermediate=1024),
        replace(VIEW, num_topk=8),
        replace(VIEW, num_experts=64),
        replace(FLASH, num_ranks=4),
        replace(FLASH, num_ranks=4).one_rank(),
    ):
        assert lookup(other, DEVICE, 16, root=root) is None
    assert lookup(VIEW, "NVIDIA H100 80GB HBM3", 16, root=root) is None


def test_fallback_is_the_default_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = [resolve(VIEW, "NVIDIA H200", 8192, t, root=tmp_path) for t in (16, 16, 512)]
    assert [f.schedule for f in found] == [default_schedule(VIEW, t) for t in (16, 16, 512)]
    assert {f.origin for f in found} == {"default"}
    assert len(caplog.records) == 1
    command = "tl-megamoe search --problem deepseek-v4-flash --tokens 16"
    assert command in caplog.text


def test_a_frozen_schedule_that_broke_a_rule_falls_back(
    tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_freeze(tables)
    path.write_text(path.read_text().replace('"experts_per_wave": 32', '"experts_per_wave": 5'))
    with caplog.at_level(logging.WARNING):
        found = resolve(VIEW, DEVICE, 64, 16, root=tables / "schedules")
    assert found.origin == "default"
    assert "experts_per_wave=5 does not divide" in caplog.text


def test_tokens_over_the_capacity() -> None:
    with pytest.raises(ValueError, match="num_tokens=65 must be within 0 and capacity=64"):
        resolve(VIEW, DEVICE, 64, 65)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema=2 must be 1"),
        (lambda d: d.update(device="nvidia-h100"), "device='nvidia-h100' must be that of its"),
        (lambda d: d["problem"].pop("hidden"), "problem.hidden=None must be a positive"),
        (lambda d: d.update(entries={}), "entries={} must be a list"),
        (lambda d: d["entries"][1].update(max_tokens="x"), r"entries\[1\].max_tokens='x'"),
        (lambda d: d["entries"][1].update(num_ranks=7), r"num_ranks=7 must divide"),
        (lambda d: d["entries"][0].update(rank_mode="two"), r"entries\[0\].rank_mode='two'"),
        (lambda d: d["entries"][0]["schedule"].pop("lag"), r"entries\[0\].schedule.*missing"),
        (lambda d: d["entries"][0]["schedule"].update(lag="0"), "lag='0' of a schedule"),
    ],
)
def test_foreign_files_name_file_and_field(tables: Path, change: Any, message: str) -> None:
    path = run_freeze(tables)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        resolve(VIEW, DEVICE, 64, 16, root=tables / "schedules")
    assert str(path) in str(caught.value)


def test_corrupt_file(tables: Path) -> None:
    path = run_freeze(tables)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="not readable JSON"):
        resolve(VIEW, DEVICE, 64, 16, root=tables / "schedules")


def test_read_once_until_it_changes(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_freeze(tables)
    first = read_frozen(path)
    monkeypatch.setattr(frozen.json, "loads", None)
    assert read_frozen(path) is first
    monkeypatch.undo()
    append_rows(
        table_path(tables / "results", DEVICE, VIEW.name),
        confirm_rows(16, {SLOW: 150.0, FAST: 200.0}, run="later"),
    )
    run_freeze(tables)
    assert read_frozen(path).entries[0].schedule == SLOW


def test_other_ranks_in_the_file_stay(tables: Path) -> None:
    run_freeze(tables)
    four = replace(FLASH, num_ranks=4).one_rank()
    schedule = replace(BASE, experts_per_wave=64)
    append_rows(
        table_path(tables / "results", DEVICE, VIEW.name),
        confirm_rows(
            16, {schedule: 400.0}, problem=four, num_ranks=4, num_local_experts=64, run="four"
        ),
    )
    path = run_freeze(tables, four)
    entries = read_frozen(path).entries
    assert [(e.num_ranks, e.max_tokens) for e in entries] == [(4, 16), (8, 32), (8, 256), (8, 1024)]
    root = tables / "schedules"
    assert resolve(four, DEVICE, 64, 16, root=root).schedule == schedule
    assert resolve(VIEW, DEVICE, 64, 16, root=root).schedule == FAST


def test_real_ranks_take_a_one_rank_schedule_without_evict_first(tmp_path: Path) -> None:
    first = replace(FAST, evict_first=1)
    append_rows(table_path(tmp_path / "results", DEVICE, VIEW.name), confirm_rows(16, {first: 9.0}))
    run_freeze(tmp_path)
    root = tmp_path / "schedules"
    ran = {
        mode: resolve(FLASH, DEVICE, 64, 16, root=root, rank_mode=mode)
        for mode in ("virtual", "real")
    }
    assert {mode: it.schedule for mode, it in ran.items()} == {"virtual": first, "real": FAST}
    assert [mode for mode, it in ran.items() if "without its evict_first" in it.message] == ["real"]
    assert resolve(VIEW, DEVICE, 64, 16, root=root).schedule == first


def test_summary_has_a_row_a_frozen_cell(tables: Path) -> None:
    run_freeze(tables)
    path = tables / "results" / DEVICE / "summary.csv"
    frame = parse(path.read_text(), path, SUMMARY_COLUMNS)
    assert frame["num_tokens"].tolist() == [16, 64, 1024]
    assert frame["candidate"].tolist() == [FAST.name, BASE.name, SLOW.name]
    before = path.read_text()
    run_freeze(tables)
    assert path.read_text() == before


def test_nothing_measured_cannot_be_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results at .*run tl-megamoe search"):
        run_freeze(tmp_path)
    path = table_path(tmp_path / "results", DEVICE, VIEW.name)
    append_rows(path, confirm_rows(16, {BASE: 5.0}, stage="screen"))
    append_rows(path, confirm_rows(16, {BASE: 5.0}, seeds=2, run="few"))
    append_rows(path, confirm_rows(16, {BASE: 5.0}, observations=2, run="short"))
    with pytest.raises(ValueError, match="no confirmed row in .*3 observations of 3 seeds"):
        run_freeze(tmp_path)
    assert not (tmp_path / "schedules").exists()


def test_device_key() -> None:
    assert device_key("NVIDIA H200") == DEVICE == device_key(DEVICE)
    assert device_key("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_shipped_files_are_readable_and_valid() -> None:
    assert frozen_paths()
    for path in frozen_paths():
        file = read_frozen(path)
        for entry in file.entries:
            assert entry.schedule.violations(file.problem_of(entry)) == [], (path, entry)


def test_ranks_without_entries_take_those_of_one_of_them(tables: Path) -> None:
    path = run_freeze(tables)
    root = tables / "schedules"
    for mode in ("real", "virtual"):
        found = resolve(FLASH, DEVICE, 8192, 16, root=root, rank_mode=mode)
        assert (found.origin, found.schedule) == ("frozen", FAST)
        assert "measured with rank mode 'one' as one of 8 ranks" in found.message
        assert f"nothing is frozen for rank mode {mode!r}" in found.message
        assert lookup(replace(FLASH, num_ranks=4), DEVICE, 16, root=root, rank_mode=mode) is None
    data = json.loads(path.read_text())
    real = {**data["entries"][0], "rank_mode": "real", "max_tokens": 64}
    real["schedule"] = SLOW.to_dict()
    data["entries"].append(real)
    path.write_text(json.dumps(data))
    found = resolve(FLASH, DEVICE, 8192, 16, root=root)  # `real` is the mode of the problem
    assert found.schedule == SLOW
    assert "measured with" not in found.message
    assert resolve(FLASH, DEVICE, 8192, 16, root=root, rank_mode="virtual").schedule == FAST
    assert resolve(VIEW, DEVICE, 8192, 16, root=root).schedule == FAST
    with pytest.raises(ValueError, match="rank_mode='two' must be one of one, virtual, real"):
        lookup(FLASH, DEVICE, 16, root=root, rank_mode="two")


def test_a_group_of_one_virtual_rank_is_one_rank(tables: Path) -> None:
    run_freeze(tables)
    found = resolve(VIEW, DEVICE, 64, 16, root=tables / "schedules", rank_mode="virtual")
    assert found.schedule == FAST


def test_forced_math_mode(tables: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_freeze(tables)
    root = tables / "schedules"
    with caplog.at_level(logging.WARNING):
        frozen_one = resolve(VIEW, DEVICE, 8192, 16, root=root, math_mode="cooperative")
        other = resolve(VIEW, DEVICE, 8192, 16, root=root, math_mode="pingpong")
    assert (frozen_one.origin, frozen_one.schedule) == ("frozen", FAST)
    assert (other.origin, other.schedule) == ("default", default_schedule(VIEW, 16, "pingpong"))
    assert "math mode 'pingpong' is forced, and the schedule frozen in" in other.message
    assert not caplog.records
    nowhere = resolve(VIEW, "other", 8192, 16, root=root, math_mode="cooperative", quiet=True)
    assert nowhere.schedule == default_schedule(VIEW, 16, "cooperative")
    with pytest.raises(ValueError, match="math_mode='both' must be one of"):
        resolve(VIEW, DEVICE, 8192, 16, root=root, math_mode="both")
    narrow = replace(VIEW, name="narrow", hidden=384)
    with pytest.raises(ScheduleError, match="'pingpong' is forced and not valid for narrow"):
        resolve(narrow, DEVICE, 8192, 16, root=root, math_mode="pingpong")
    with pytest.raises(ScheduleError, match="'pingpong' is forced and not valid for narrow"):
        resolve(narrow, DEVICE, 8192, 8192, root=root, math_mode="pingpong")


def test_the_default_is_that_of_the_recipe(tmp_path: Path) -> None:
    for recipe in ALL_RECIPES:
        found = resolve(VIEW, "other", 64, 16, root=tmp_path, quiet=True, recipe=recipe)
        assert found.schedule == default_schedule(VIEW, 16, recipe=recipe)
        assert found.schedule.pingpong == (recipe.intermediate_group == 128)


def test_the_threshold_is_for_what_no_table_covers(tables: Path) -> None:
    run_freeze(tables)
    root = tables / "schedules"
    for tokens, threshold, mode in ((16, 0, "cooperative"), (16, 17, "pingpong")):
        found = resolve(
            VIEW, "other", 64, tokens, root=root, quiet=True, cooperative_threshold=threshold
        )
        assert found.schedule.math_mode == mode
        found = resolve(VIEW, DEVICE, 64, tokens, root=root, cooperative_threshold=threshold)
        assert found.schedule == FAST
    # Pingpong is never the default of a problem that it does not fit.
    for hidden in (128, 384, 512, 4096):
        for intermediate in (128, 256, 3072):
            problem = replace(VIEW, name="odd", hidden=hidden, intermediate=intermediate)
            for recipe in ALL_RECIPES:
                found = resolve(problem, "other", 64, 8, root=root, quiet=True, recipe=recipe)
                assert found.schedule.violations(problem, recipe) == []
