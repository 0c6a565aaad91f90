"""A whole search with a fake compiler and a fake GPU: rows, resume, refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_search import SPACE, VIEW, FakeGpu, InlineFarm, time_of
from search_runs import ROUND, rows_of, run, screened
from search_runs import options as options

from tl_megamoe import metrics
from tl_megamoe.explorer import search as search_module
from tl_megamoe.explorer.evidence import confirmed
from tl_megamoe.explorer.messages import CellInfo, kernel_specs
from tl_megamoe.explorer.protocol import SCREEN_RULES, Rules
from tl_megamoe.explorer.report import render
from tl_megamoe.explorer.search import SearchOptions, run_search, worker_config
from tl_megamoe.explorer.space import load_space
from tl_megamoe.explorer.table import RESUME_KEY, TableError, append_rows
from tl_megamoe.problem import PRESETS
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule

# ---- rows


def test_every_candidate_leaves_a_row(options: SearchOptions, tmp_path: Path) -> None:
    bad = {1: "incorrect", 3: "timeout_later", 4: "differs_later"}
    gpu = FakeGpu(bad)
    done = run(replace(options, confirm_top=0), gpu, tmp_path)
    frame = rows_of(options)
    last = frame.drop_duplicates("candidate", keep="last")
    # The default has rows_in_flight 3: it stops, and nothing is left to compare with.
    assert last.groupby("rows_in_flight")["status"].agg(set).to_dict() == {
        1: {"incorrect"},
        2: {"ok"},
        3: {"timeout"},
        4: {"nondeterministic"},
        5: {"spilled"},
    }
    assert done.written == len(frame)
    assert done.statuses == frame["status"].value_counts().to_dict()
    assert (frame["reason"] != "").equals(frame["status"] != "ok")
    assert frame["measured_at"].str.startswith("20").all()
    assert (frame["capacity"] == 1024).all()
    assert (frame["torch"] == "2.11.0").sum() > 0
    assert gpu.closed
    spilled = frame[frame["status"] == "spilled"].iloc[0]
    assert spilled["spill_bytes"] == 64
    assert spilled["candidate"] not in gpu.checked
    assert pd.isna(frame[frame["status"] != "ok"]["median_us"]).all()


def test_measured_rows_carry_the_protocol(options: SearchOptions, tmp_path: Path) -> None:
    run(options, FakeGpu(), tmp_path)
    frame = rows_of(options)
    ok = screened(frame[frame["status"] == "ok"]).drop_duplicates("candidate")
    ok = ok.set_index("candidate")
    default = default_schedule(VIEW, 512)
    best = ok.loc[replace(default, rows_in_flight=2).name]
    assert best["median_us"] == 250.0
    assert best["touched_experts"] == 31
    assert best["pairs"] == 3072
    assert best["ratio_to_floor"] == pytest.approx(250.0 / best["floor_us"], rel=1e-4)
    assert (ok["yardstick_tflops"] >= 1400).all()
    assert ok.loc[default.name]["ratio_to_baseline"] == 1.0
    assert best["ratio_to_baseline"] == pytest.approx(250 / 260, rel=1e-4)
    assert (ok["baseline"] == "default_schedule").all()
    assert (best["power_w"], best["power_end_w"]) == (690.0, 700.0)
    assert (best["sm_clock_mhz"], best["sm_clock_end_mhz"]) == (1500.0, 1480.0)
    assert (best["card"], best["driver"]) == ("0badcafe", "570.1")
    assert best["source_hash"]
    assert best["run"].startswith("20")
    assert frame["run"].nunique() == 1
    assert best["num_ranks"] == 8
    assert best["rank_mode"] == "one"
    assert best["num_local_experts"] == 32
    text = render(frame)
    assert "1 spilled" in text


def test_the_best_is_confirmed_over_seeds_and_observations(
    options: SearchOptions, tmp_path: Path
) -> None:
    gpu = FakeGpu(noise=0.002)
    run(options, gpu, tmp_path)
    frame = rows_of(options)
    rows = frame[frame["stage"] == "confirm"]
    fast = replace(default_schedule(VIEW, 512), rows_in_flight=2)
    assert fast.name in set(rows["candidate"])
    assert default_schedule(VIEW, 512).name in set(rows["candidate"])
    sizes = rows.groupby("candidate")[ROUND].nunique()
    assert (sizes["seed"] == 3).all()
    assert (sizes["observation"] == 5).all()
    assert (rows.groupby("candidate").size() == 15).all()
    # The default runs in every round, so that each row has a ratio measured beside it.
    assert rows["ratio_to_baseline"].notna().all()
    found = confirmed(frame)
    assert found[0].schedule.rows_in_flight == 2
    assert found[0].num_observations == 15
    assert found[0].median_us == pytest.approx(250, rel=0.01)
    assert 0 < found[0].spread < 0.01
    assert gpu.starts == 1  # one GPU process for both parts
    assert {r for r in gpu.rules if r is not None} == {SCREEN_RULES, Rules()}
    assert [seed for _, _, seed in gpu.cells] == [0, 0, 1, 2]


def test_halving_times_the_good_ones_again(options: SearchOptions, tmp_path: Path) -> None:
    run(replace(options, confirm_top=1), FakeGpu(), tmp_path)
    ok = screened(rows_of(options))
    ok = ok[ok["status"] == "ok"]
    times = ok.groupby("candidate").size()
    best = replace(default_schedule(VIEW, 512), rows_in_flight=2).name
    worst = replace(default_schedule(VIEW, 512), rows_in_flight=4).name
    assert times[best] >= 2
    assert times[worst] == 1
    grid = replace(options, strategy="grid", confirm_top=0, results=tmp_path / "grid")
    run(grid, FakeGpu(), tmp_path)
    times = rows_of(grid).groupby("candidate").size()
    assert times[worst] == 1


def test_the_default_and_the_best_run_in_every_batch(
    options: SearchOptions, tmp_path: Path
) -> None:
    wide = tmp_path / "wide.toml"
    wide.write_text('[product]\nexperts_per_wave = "divisors"\nrows_in_flight = [1, 2, 3, 4]\n')
    many = replace(
        options, space=load_space(str(wide)), strategy="grid", confirm_top=0, results=tmp_path / "w"
    )
    run(many, FakeGpu(), tmp_path)
    frame = rows_of(many)
    assert frame["candidate"].nunique() > 16
    times = frame.groupby("candidate").size()
    assert times[default_schedule(VIEW, 512).name] == 4  # 26 candidates in batches of 8
    assert (times > 1).sum() >= 2
    assert not frame.duplicated(list(RESUME_KEY)).any()


def test_equal_launches_are_timed_once(options: SearchOptions, tmp_path: Path) -> None:
    default = default_schedule(VIEW, 512)
    pair = (default, replace(default, rows_in_flight=4))
    same = {s.kernel_key().name: "one text" for s in pair}
    farm = InlineFarm(tmp_path / "reports", same)
    gpu = FakeGpu()
    run_search(options, farm, lambda config, control: gpu, "NVIDIA H200")
    frame = rows_of(options)
    twins = frame[frame["status"] == "duplicate"]
    assert len(twins) >= 1
    assert (twins["rows_in_flight"] == 4).all()
    assert twins["reason"].str.contains("the same launch as").all()
    assert not set(twins["candidate"]) & set(gpu.checked)
    assert set(twins["source_hash"]) == {"one text"}


# ---- resume


def test_resume_repeats_nothing(options: SearchOptions, tmp_path: Path) -> None:
    run(options, FakeGpu({1: "incorrect"}), tmp_path)
    before = rows_of(options)
    gpu = FakeGpu()
    done = run(options, gpu, tmp_path)
    assert (done.written, done.skipped) == (0, before["candidate"].nunique())
    assert (gpu.checked, gpu.starts) == ([], 0)
    assert len(rows_of(options)) == len(before)
    more = replace(options, tokens=(512, 1024))
    gpu = FakeGpu()
    assert run(more, gpu, tmp_path).skipped == before["candidate"].nunique()
    assert set(gpu.tokens) == {1024}
    again = run(replace(options, again=True), FakeGpu(), tmp_path)
    assert again.written >= len(before) - 1
    assert not rows_of(options).duplicated(list(RESUME_KEY)).any()
    assert confirmed(rows_of(options)[lambda f: f["num_tokens"] == 512])[0].num_observations == 15


@pytest.mark.parametrize("blocks", [5, 12, 30, 40])
def test_an_interrupt_keeps_what_was_written(
    options: SearchOptions, tmp_path: Path, blocks: int
) -> None:
    two = replace(options, tokens=(512, 1024))
    gpu = FakeGpu(interrupt_after=blocks)
    with pytest.raises(KeyboardInterrupt):
        run(two, gpu, tmp_path)
    assert gpu.closed
    kept = rows_of(options)
    gpu = FakeGpu()
    run(two, gpu, tmp_path)
    frame = rows_of(options)
    pd.testing.assert_frame_equal(frame.iloc[: len(kept)], kept)
    assert not frame.duplicated(list(RESUME_KEY)).any()
    first = frame[(frame["stage"] == "screen") & (frame["observation"] == 0)]
    assert (first.groupby("num_tokens").size() == first["candidate"].nunique()).all()
    for tokens in (512, 1024):
        assert confirmed(frame[frame["num_tokens"] == tokens])


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fake_search import FakeGpu, InlineFarm
from search_runs import make_options
from tl_megamoe import frozen
from tl_megamoe.explorer.search import run_search
from dataclasses import replace
frozen.lookup = lambda *a, **k: None
folder = Path({folder!r})
options = replace(make_options(folder), tokens=(512, 1024))
farm = InlineFarm(folder / "reports")
run_search(options, farm, lambda c, s: FakeGpu(pause_s=0.01), "NVIDIA H200")
"""


def test_kill_9_loses_and_doubles_no_row(options: SearchOptions, tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    kills, kept = 0, 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True
        )
        path = options.results / "nvidia-h200" / f"{VIEW.name}.csv"
        size, until = path.stat().st_size if path.exists() else 0, time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            grown = path.exists() and path.stat().st_size > size
            if kills < 4 and grown:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.wait(60)
        frame = rows_of(options)
        assert len(frame) >= kept
        kept = len(frame)
        if process.returncode == 0:
            break
    assert kills == 4
    assert process.returncode == 0
    assert not frame.duplicated(list(RESUME_KEY)).any()
    first = frame[(frame["stage"] == "screen") & (frame["observation"] == 0)]
    assert (first.groupby("num_tokens").size() == first["candidate"].nunique()).all()
    for tokens in (512, 1024):
        assert confirmed(frame[frame["num_tokens"] == tokens])[0].num_observations == 15


def test_a_new_candidate_is_timed_beside_the_default(
    options: SearchOptions, tmp_path: Path
) -> None:
    run(options, FakeGpu(), tmp_path)
    before = len(rows_of(options))
    wider = tmp_path / "wider.toml"
    wider.write_text(SPACE + "\nprefetch = [4]\nexperts_per_wave = [2]\n")
    gpu = FakeGpu()
    run(replace(options, space=load_space(str(wider))), gpu, tmp_path)
    fresh = rows_of(options).iloc[before:]
    assert {0, 4} >= set(fresh["prefetch"])
    assert fresh[fresh["stage"] == "screen"]["ratio_to_baseline"].notna().all()
    assert default_schedule(VIEW, 512).name in gpu.checked


# ---- Optuna


def test_optuna_finds_the_best_of_a_wide_space(options: SearchOptions, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    wide = tmp_path / "wide.toml"
    wide.write_text(
        "[product]\nrows_in_flight = [1, 2, 3, 4]\nnum_sms = [132, 128, 120, 112, 104, 96]\n"
        'experts_per_wave = "divisors"\nprefetch = [0, 4, 8]\ndispatch_warps = [1, 2, 3]\n'
    )
    space = load_space(str(wide))
    search = replace(options, space=space, strategy="optuna", limit=40, confirm_top=2)
    run(search, FakeGpu(), tmp_path)
    frame = screened(rows_of(options))
    tried = frame["candidate"].nunique()
    assert 10 < tried <= 41
    best = frame[frame["status"] == "ok"]["median_us"].min()
    assert best < time_of(default_schedule(VIEW, 512))
    assert (options.results / "nvidia-h200" / f"{VIEW.name}.optuna.log").exists()
    done = run(search, FakeGpu(), tmp_path)
    assert done.written == 0  # the journal and the rows say that all is done
    # Numbers of choices mean nothing in another space: it has a study of its own.
    small = tmp_path / "small.toml"
    small.write_text("[product]\nrows_in_flight = [3, 2]\nnum_sms = [132]\n")
    fresh = replace(search, space=load_space(str(small)), results=tmp_path / "results")
    run(fresh, FakeGpu(), tmp_path)


# ---- refusals


def test_a_damaged_or_foreign_table_stops_a_search_before_it_starts(
    options: SearchOptions, tmp_path: Path
) -> None:
    run(options, FakeGpu(), tmp_path)
    path = options.results / "nvidia-h200" / f"{VIEW.name}.csv"
    good = path.read_text()
    path.write_text(good.replace("nvidia-h200", "nvidia-h100"))
    gpu = FakeGpu()
    with pytest.raises(TableError, match="nvidia-h100"):
        run(options, gpu, tmp_path)
    lines = good.splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][: len(lines[4]) // 2] + "\n", *lines[5:]]))
    with pytest.raises(TableError, match="line 5"):
        run(options, gpu, tmp_path)
    assert gpu.starts == 0


def test_a_full_disk_ends_a_search_and_leaves_a_whole_table(
    options: SearchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def full(path: Path, rows: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(28, "No space left on device")
        append_rows(path, rows)

    monkeypatch.setattr("tl_megamoe.explorer.record.append_rows", full)
    gpu = FakeGpu()
    with pytest.raises(OSError, match="No space left"):
        run(options, gpu, tmp_path)
    assert gpu.closed
    kept = rows_of(options)
    run(options, FakeGpu(), tmp_path)
    pd.testing.assert_frame_equal(rows_of(options).iloc[: len(kept)], kept)
    assert confirmed(rows_of(options))


def test_an_unknown_strategy_is_refused(options: SearchOptions) -> None:
    with pytest.raises(ValueError, match="strategy='odd' must be one of grid, halving, optuna"):
        replace(options, strategy="odd")


def test_without_a_gpu_the_model_ranks(options: SearchOptions, tmp_path: Path) -> None:
    done = run(options, None, tmp_path)
    frame = rows_of(options, "sm90-model")
    assert done.written == len(frame) > 5
    assert set(frame["source"]) == {"model"}
    assert set(frame["status"]) == {"ok", "spilled"}
    assert frame["median_us"].isna().all()
    assert frame["floor_us"].isna().all()
    assert (frame["predicted_us"] > 100).all()
    assert (frame["registers"] == 168).all()
    text = render(frame)
    assert "source=model" in text
    assert "predicted us" in text


def test_a_limit_and_a_frozen_schedule(
    options: SearchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        schedule = replace(default_schedule(VIEW, 512), experts_per_wave=2)

    monkeypatch.setattr(search_module.frozen, "lookup", lambda *a, **k: Found)
    run(replace(options, limit=4), FakeGpu(), tmp_path)
    frame = rows_of(options)
    assert frame["candidate"].nunique() == 4
    confirm = frame[frame["stage"] == "confirm"]
    assert Found.schedule.name in set(confirm["candidate"])  # what runs today is always compared


def test_virtual_ranks_count_the_whole_gpu(
    options: SearchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def lookup(*args: Any, **fields: Any) -> None:
        asked.append(fields["rank_mode"])

    monkeypatch.setattr(search_module.frozen, "lookup", lookup)
    layer = replace(PRESETS["deepseek-v4-flash"], num_ranks=4)
    virtual = replace(options, problem=layer, rank_mode="virtual", capacity=512)
    config = worker_config(virtual)
    assert (config.rank_mode, config.problem) == ("virtual", layer)
    specs = kernel_specs(config, default_schedule(layer, 512))
    assert {spec.problem.num_ranks for spec in specs.values()} == {4}

    class FourRanks(FakeGpu):
        def cell(self, num_tokens: int, *args: Any) -> CellInfo:
            super().cell(num_tokens, *args)
            return CellInfo(250, 4 * 6 * num_tokens, 2400)

    run(virtual, FourRanks(), tmp_path)
    assert asked == ["virtual"]
    frame = rows_of(options)
    ok = frame[frame["status"] == "ok"]
    assert set(frame["num_ranks"]) == {4}
    assert set(frame["rank_mode"]) == {"virtual"}
    assert set(frame["num_local_experts"]) == {64}
    assert set(frame["num_sms"]) == {33, 32}
    assert set(ok["num_tokens"]) == {512}  # of a rank; what follows is of the GPU
    row = ok.iloc[0]
    us, size = row["median_us"], (layer, 4 * 512, 250, 4 * 6 * 512)
    assert row["pairs"] == 4 * 6 * 512
    assert row["floor_us"] == pytest.approx(metrics.memory_floor_us(*size[:3]), rel=1e-4)
    assert row["tflops"] == pytest.approx(6 * size[3] * 4096 * 2048 / (us * 1e6), rel=1e-4)
    assert row["hbm_gbs"] == pytest.approx(metrics.hbm_gbs(*size, us), rel=1e-4)
    assert row["nvlink_gbs"] == pytest.approx(2400 * 2 * 4096 / (us * 1e3), rel=1e-4)
    assert "NVLink GB/s" in render(frame)
    # A one-rank row is another piece of work, and has no NVLink.
    done = run(options, FakeGpu(), tmp_path)
    assert done.skipped == 0
    alone = rows_of(options)
    alone = alone[alone["rank_mode"] == "one"]
    assert alone["nvlink_gbs"].isna().all()
    assert "NVLink" not in render(alone)
    assert run(virtual, FourRanks(), tmp_path).written == 0


def test_virtual_ranks_without_a_gpu(options: SearchOptions, tmp_path: Path) -> None:
    layer = replace(PRESETS["deepseek-v4-flash"], num_ranks=4)
    run(replace(options, problem=layer, rank_mode="virtual"), None, tmp_path)
    frame = rows_of(options, "sm90-model")
    assert set(frame["pairs"]) == {4 * 6 * 512}
    assert set(frame["touched_experts"]) == {256}
    assert (frame["predicted_us"] > 1400).all()  # all experts' weights through one memory


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_rows_say_their_recipe(options: SearchOptions, tmp_path: Path, recipe: Recipe) -> None:
    specs = kernel_specs(worker_config(replace(options, recipe=recipe)), Schedule(stages=3))
    assert {spec.recipe for spec in specs.values()} == {recipe}
    run(replace(options, recipe=recipe, limit=2, confirm_top=0), FakeGpu(), tmp_path)
    assert set(rows_of(options)["recipe"]) == {str(recipe)}
    assert f"fused, {recipe}, measured on" in render(rows_of(options))


def test_a_problem_without_a_default_is_refused_before_compiling(options: SearchOptions) -> None:
    many = replace(VIEW, num_experts=16384, from_num_ranks=None)  # tables that fill shared memory
    with pytest.raises(ScheduleError, match="leaves no room"):
        search_module.plan_cells(replace(options, problem=many))


def test_a_phase_needs_the_phases_before_it(options: SearchOptions, tmp_path: Path) -> None:
    config = worker_config(replace(options, phase="linear2"))
    specs = kernel_specs(config, default_schedule(VIEW, 512))
    assert list(specs) == ["dispatch", "linear1", "linear2", "combine"]
    run(replace(options, phase="linear2"), FakeGpu(), tmp_path)
    frame = rows_of(options)
    assert set(frame["phase"]) == {"linear2"}
    assert frame["floor_us"].isna().all()  # a floor of the whole layer says nothing about a phase
    assert "linear2" in render(frame)
