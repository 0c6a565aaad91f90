"""What gets frozen: evidence, the bar for a change, shared entries, and what stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_rows import BASE, DEVICE, VIEW, confirm_rows

from tl_megamoe.explorer.evidence import compare, confirmed
from tl_megamoe.explorer.freeze import Plan, plan_freeze, write_freeze
from tl_megamoe.explorer.merge import merge
from tl_megamoe.explorer.space import default_of
from tl_megamoe.explorer.table import append_rows, read_table, table_path
from tl_megamoe.frozen import read_frozen
from tl_megamoe.problem import PRESETS
from tl_megamoe.schedule import Schedule, default_schedule

FAST, SLOW = replace(BASE, stages=3), replace(BASE, rows_in_flight=2)
THIRD = replace(BASE, prefetch=0)


def frame_of(tmp_path: Path, rows: list[dict[str, Any]]) -> pd.DataFrame:
    path = table_path(tmp_path / "results", DEVICE, VIEW.name)
    append_rows(path, rows)
    return read_table(path)


def plan(tmp_path: Path, rows: list[dict[str, Any]], **fields: Any) -> Plan:
    frame_of(tmp_path, rows)
    return plan_freeze(VIEW, DEVICE, tmp_path / "results", tmp_path / "schedules", **fields)


def freeze(tmp_path: Path, rows: list[dict[str, Any]], **fields: Any) -> Plan:
    found = plan(tmp_path, rows, **fields)
    write_freeze(found)
    return found


def frozen_names(found: Plan) -> list[tuple[int, str]]:
    return [(e["max_tokens"], e["candidate"]) for e in found.entries]


# ---- evidence


def test_rounds_cancel_what_the_card_does(tmp_path: Path) -> None:
    times = {FAST: 200.0, SLOW: 206.0, BASE: 230.0}
    found = confirmed(frame_of(tmp_path, confirm_rows(512, times)))
    assert [c.schedule for c in found] == [FAST, SLOW, BASE]
    best = found[0]
    assert best.p90_us / best.p10_us > 1.1  # the card was that unsteady
    assert best.spread < 0.004  # the ratios were not
    assert best.ratio_to_default == pytest.approx(200 / 230, rel=0.005)
    gain = compare(found[0], found[1])
    assert gain.gain == pytest.approx(6 / 206, abs=0.003)
    assert gain.num_rounds == 9
    assert compare(found[1], found[0]).gain < 0


def test_a_failure_or_a_missing_round_confirms_nothing(tmp_path: Path) -> None:
    rows = confirm_rows(512, {FAST: 200.0, SLOW: 206.0, BASE: 230.0})
    rows = [r for r in rows if (r["candidate"], r["seed"], r["observation"]) != (SLOW.name, 1, 2)]
    rows += [
        {**r, "status": "nondeterministic", "median_us": None, "observation": 9}
        for r in rows
        if (r["candidate"], r["seed"], r["observation"]) == (FAST.name, 0, 0)
    ]
    assert [c.schedule for c in confirmed(frame_of(tmp_path, rows))] == [BASE]


def test_the_latest_complete_run_counts(tmp_path: Path) -> None:
    rows = confirm_rows(512, {FAST: 200.0, SLOW: 206.0})
    rows += confirm_rows(512, {FAST: 210.0, SLOW: 206.0}, run="second")
    rows += confirm_rows(512, {FAST: 100.0, SLOW: 206.0}, run="third", observations=2)
    found = confirmed(frame_of(tmp_path, rows))
    assert found[0].schedule == SLOW
    assert {c.run for c in found} == {"second"}


def test_a_mix_weighs_routings(tmp_path: Path) -> None:
    rows = confirm_rows(512, {FAST: 200.0, SLOW: 210.0})
    rows += confirm_rows(512, {FAST: 260.0, SLOW: 210.0}, routing="zipf:1.2")
    frame = frame_of(tmp_path, rows)
    assert confirmed(frame, {"uniform": 1.0})[0].schedule == FAST
    assert confirmed(frame, {"uniform": 0.9, "zipf:1.2": 0.1})[0].schedule == FAST
    assert confirmed(frame, {"uniform": 0.5, "zipf:1.2": 0.5})[0].schedule == SLOW
    assert confirmed(frame, {"uniform": 0.5, "skew": 0.5}) == []


# ---- the bar for a change


@pytest.mark.parametrize(
    ("faster", "noise", "changes"),
    [(0.03, 0.001, True), (0.008, 0.001, False), (0.015, 0.03, False), (-0.02, 0.001, False)],
    ids=["clearly faster", "under 1 %", "within 2 spreads", "slower"],
)
def test_what_runs_today_stays_unless_clearly_beaten(
    tmp_path: Path, faster: float, noise: float, changes: bool
) -> None:
    freeze(tmp_path, confirm_rows(512, {SLOW: 230.0}))
    times = {SLOW: 230.0, FAST: 230.0 * (1 - faster)}
    found = plan(tmp_path, confirm_rows(512, times, noise=noise, run="second"))
    assert frozen_names(found) == [(512, (FAST if changes else SLOW).name)]
    (line,) = found.changes
    assert ("->" in line) == changes
    assert ("stays" in line) != changes


def test_without_a_file_the_built_in_default_is_to_be_beaten(tmp_path: Path) -> None:
    default = default_schedule(VIEW, 512)
    found = plan(tmp_path, confirm_rows(512, {default: 250.0, FAST: 249.0}))
    assert frozen_names(found) == [(512, default.name)]
    found = plan(tmp_path, confirm_rows(512, {default: 250.0, FAST: 240.0}, run="second"))
    assert frozen_names(found) == [(512, FAST.name)]
    assert "faster (spread" in found.changes[0]


def test_what_runs_today_and_was_not_timed_stays_and_is_said(tmp_path: Path) -> None:
    freeze(tmp_path, confirm_rows(512, {SLOW: 230.0}))
    found = plan(tmp_path, confirm_rows(512, {FAST: 200.0}, run="second"))
    assert frozen_names(found) == [(512, SLOW.name)]
    assert "was not timed in run second; search again" in found.changes[0]


def test_what_runs_today_and_failed_is_replaced(tmp_path: Path) -> None:
    freeze(tmp_path, confirm_rows(512, {SLOW: 230.0}))
    rows = confirm_rows(512, {FAST: 229.0}, run="second")
    failed = {**rows[0], **SLOW.to_dict(), "candidate": SLOW.name, "status": "incorrect"}
    rows.append({**failed, "median_us": None, "reason": "rel_error=0.3"})
    found = plan(tmp_path, rows)
    assert frozen_names(found) == [(512, FAST.name)]
    assert "which runs today, failed: incorrect (rel_error=0.3)" in found.changes[0]


def test_a_gain_that_one_seed_does_not_show_changes_nothing(tmp_path: Path) -> None:
    freeze(tmp_path, confirm_rows(512, {SLOW: 230.0}))
    rows = confirm_rows(512, {SLOW: 230.0, FAST: 215.0}, run="second")
    for row in rows:
        if row["seed"] == 2 and row["candidate"] == FAST.name:
            row["median_us"] *= 1.08
            row["ratio_to_baseline"] *= 1.08
    found = plan(tmp_path, rows)
    assert frozen_names(found) == [(512, SLOW.name)]
    assert "won 2 of 3 seeds" in found.changes[0]


def test_virtual_ranks_are_compared_with_their_part_of_the_default(tmp_path: Path) -> None:
    layer = replace(PRESETS["deepseek-v4-flash"], num_ranks=4)
    default = default_of(layer, 512, gpu_ranks=4)
    assert default.num_sms == 33
    fast = replace(default, stages=3)
    ranks = {"num_ranks": 4, "rank_mode": "virtual", "num_local_experts": 64}
    rows = confirm_rows(512, {default: 900.0, fast: 899.0}, problem=layer, **ranks)
    rows = [row for row in rows if row["num_sms"] == 33]
    frame_of(tmp_path, rows)
    where = (DEVICE, tmp_path / "results", tmp_path / "schedules")
    found = plan_freeze(layer, *where, rank_mode="virtual")
    assert frozen_names(found) == [(512, default.name)]


def test_a_file_of_another_layer_is_not_overwritten(tmp_path: Path) -> None:
    freeze(tmp_path, confirm_rows(512, {SLOW: 230.0}))
    other = replace(VIEW, hidden=2048)
    frame_of(tmp_path, confirm_rows(512, {SLOW: 200.0}, hidden=2048, run="second"))
    with pytest.raises(ValueError, match="holds another layer: .*name of its own"):
        plan_freeze(other, DEVICE, tmp_path / "results", tmp_path / "schedules")


# ---- entries


def test_token_counts_share_a_schedule_that_is_as_good(tmp_path: Path) -> None:
    rows = confirm_rows(16, {FAST: 200.0, SLOW: 201.0})
    rows += confirm_rows(64, {FAST: 211.5, SLOW: 210.0})
    rows += confirm_rows(256, {FAST: 260.0, SLOW: 230.0})
    rows += confirm_rows(512, {FAST: 300.0, SLOW: 299.0, THIRD: 280.0})
    found = plan(tmp_path, rows)
    # SLOW is within 1 % at 16 and 64 and the best at 256; at 512 it is not.
    assert frozen_names(found) == [(362, SLOW.name), (512, THIRD.name)]
    first = found.entries[0]
    assert [c["num_tokens"] for c in first["cells"]] == [16, 64, 256]
    assert [c["best"] for c in first["cells"]] == [FAST.name, SLOW.name, SLOW.name]
    assert first["cells"][0]["ratio_to_best"] == pytest.approx(1.005, abs=0.002)


def test_provenance_is_complete(tmp_path: Path) -> None:
    fields = {"card": "0badcafe", "driver": "570.1", "torch": "2.11.0", "tilelang": "0.1.15"}
    found = plan(tmp_path, confirm_rows(512, {FAST: 200.0, SLOW: 206.0}, commit="abc", **fields))
    (entry,) = found.entries
    for name, value in {**fields, "commit": "abc", "device": DEVICE, "kernel": "abc"}.items():
        assert entry[name] == value, name
    assert entry["table"] == f"results/{DEVICE}/{VIEW.name}.csv"
    assert entry["routing"] == "uniform"
    (cell,) = entry["cells"]
    assert cell["run"] == "first"
    json.dumps(found.data, allow_nan=False)


def test_nothing_is_lost_by_a_partial_freeze(tmp_path: Path) -> None:
    freeze(tmp_path, confirm_rows(16, {FAST: 200.0}) + confirm_rows(512, {SLOW: 230.0}))
    table_path(tmp_path / "results", DEVICE, VIEW.name).unlink()
    found = freeze(tmp_path, confirm_rows(64, {BASE: 200.0, FAST: 210.0}, run="second"))
    assert frozen_names(found) == [(32, FAST.name), (181, BASE.name), (512, SLOW.name)]
    again = read_frozen(found.path).entries
    assert [e.evidence["cells"][0]["num_tokens"] for e in again] == [16, 64, 512]


def test_planning_writes_nothing(tmp_path: Path) -> None:
    found = plan(tmp_path, confirm_rows(512, {FAST: 200.0}))
    assert not found.path.exists()
    assert not (tmp_path / "results" / DEVICE / "summary.csv").exists()


def test_what_broke_a_rule_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = freeze(tmp_path, confirm_rows(64, {FAST: 200.0}) + confirm_rows(512, {SLOW: 230.0}))
    data = json.loads(found.path.read_text())
    data["entries"][0]["schedule"]["experts_per_wave"] = 5
    found.path.write_text(json.dumps(data))
    table_path(tmp_path / "results", DEVICE, VIEW.name).unlink()
    wrong = replace(BASE, experts_per_wave=5)
    again = plan(tmp_path, confirm_rows(512, {wrong: 100.0, SLOW: 230.0}, run="second"))
    assert frozen_names(again) == [(512, SLOW.name)]
    assert "dropped: experts_per_wave=5 does not divide" in caplog.text


def test_merged_machines_freeze_as_each_alone(tmp_path: Path) -> None:
    """Rounds stay rounds: rows of one are never divided by those of another."""
    paths = []
    runs = {"one": {FAST: 200.0, SLOW: 230.0}, "two": {SLOW: 231.0, THIRD: 190.0}}
    for run, times in runs.items():
        paths.append(table_path(tmp_path / run, DEVICE, VIEW.name))
        stamp = f"2026-01-0{len(paths)}T00:00:00+00:00"
        append_rows(paths[-1], confirm_rows(512, times, run=run, measured_at=stamp))
    joined = confirmed(merge(paths))
    alone = confirmed(read_table(paths[1]))
    assert [c.candidate for c in joined] == [c.candidate for c in alone]
    for one, other in zip(joined, alone, strict=True):
        assert compare(joined[0], one) == compare(alone[0], other)


def test_schedules_survive_the_table(tmp_path: Path) -> None:
    odd = Schedule(math_mode="pingpong", block_m=64, experts_per_wave=32, order="lag", lag=8)
    found = confirmed(frame_of(tmp_path, confirm_rows(64, {odd: 200.0})))
    assert found[0].schedule == odd
