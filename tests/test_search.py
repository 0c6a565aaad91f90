"""A whole search with a fake compiler and a fake GPU: rows, statuses, resume, restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tl_megamoe.explorer import search as search_module
from tl_megamoe.explorer.child import Child, ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.farm import BuildResult, Farm, ReportCache, classify
from tl_megamoe.explorer.measure import GpuUnusable, RemoteBench
from tl_megamoe.explorer.protocol import Block, CandidateFailed, GpuState, Measurement, run_rounds
from tl_megamoe.explorer.report import render
from tl_megamoe.explorer.search import SearchOptions, run_search, worker_config
from tl_megamoe.explorer.space import load_space
from tl_megamoe.explorer.table import read_table
from tl_megamoe.explorer.worker import CellInfo, CheckResult, WorkerConfig, kernel_specs
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.problem import PRESETS
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule

VIEW = PRESETS["deepseek-v4-flash"].one_rank()
SPACE = """
[[base]]
[vary]
stages = [3, 4]
rows_in_flight = [1, 2, 3, 4, 5]
num_sms = [132, 128]
"""


class InlineFarm(Farm):
    """Builds in this process; rows_in_flight 5 spills."""

    def __init__(self, folder: Path):
        super().__init__(cache=ReportCache(folder))
        self.built: list[str] = []

    def run(self, specs: Any, on_done: Any = None) -> dict[KernelSpec, BuildResult]:
        out = {}
        for spec in {s.key(): s for s in specs}.values():
            self.built.append(spec.schedule.name)
            spills = 64 if spec.schedule.rows_in_flight == 5 else 0
            report = KernelReport(168, spills, 200_000, 8, (), "f")
            out[spec.key()] = classify(spec, report)
            if on_done is not None:
                on_done(spec.key(), out[spec.key()])
        return out


class FakeGpu:
    """A `CellBench` on which a candidate's time follows from its fields."""

    def __init__(self, bad: dict[int, str] | None = None, interrupt_after: int | None = None):
        self.bad = bad or {}
        self.interrupt_after = interrupt_after
        self.tokens: list[int] = []
        self.checked: list[str] = []
        self.schedules: dict[str, Schedule] = {}
        self.blocks = 0
        self.closed = False

    def start(self) -> dict[str, str]:
        return {"device": "NVIDIA H200", "torch": "2.11.0"}

    def cell(self, num_tokens: int, routing: str) -> CellInfo:
        self.tokens.append(num_tokens)
        return CellInfo(31, num_tokens * 6)

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        self.checked.append(name)
        self.schedules[name] = schedule
        status = self.bad.get(schedule.rows_in_flight, "ok")
        if status in ("timeout_later", "differs_later"):
            status = "ok"
        return CheckResult(status, "rel_error=2e-03", "" if status == "ok" else f"it is {status}")

    def recheck(self, name: str) -> CheckResult:
        if self.bad.get(self.schedules[name].rows_in_flight) == "differs_later":
            return CheckResult("nondeterministic", "", "3 values differ after timing")
        return CheckResult("ok")

    def warm_up(self, name: str) -> None: ...

    def block(self, name: str) -> Block:
        self.blocks += 1
        if self.interrupt_after is not None and self.blocks > self.interrupt_after:
            raise KeyboardInterrupt
        schedule = self.schedules[name]
        if self.bad.get(schedule.rows_in_flight) == "timeout_later":
            raise CandidateFailed("timeout", "killed")
        us = 250.0 + 10 * abs(schedule.rows_in_flight - 2) + (132 - schedule.num_sms)
        return Block((us,) * 20, GpuState(1500.0, 3201.0, 690.0, 55.0))

    def yardstick(self) -> float:
        return 1400.0 + self.blocks

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchOptions:
    monkeypatch.setattr(search_module.frozen, "lookup", lambda *a, **k: None)
    space = tmp_path / "space.toml"
    space.write_text(SPACE)
    return SearchOptions(
        problem=VIEW,
        tokens=(512,),
        space=load_space(str(space)),
        results=tmp_path / "results",
        capacity=512,
        commit="abc",
    )


def run(options: SearchOptions, gpu: FakeGpu | None, tmp_path: Path) -> Any:
    name = None if gpu is None else "NVIDIA H200"
    make = None if gpu is None else (lambda config, control: gpu)
    return run_search(options, InlineFarm(tmp_path / "reports"), make, name)


def rows_of(options: SearchOptions, device: str = "nvidia-h200") -> pd.DataFrame:
    return read_table(options.results / device / f"{VIEW.name}.csv")


def test_every_candidate_leaves_a_row(options: SearchOptions, tmp_path: Path) -> None:
    bad = {1: "incorrect", 3: "timeout_later", 4: "differs_later"}
    gpu = FakeGpu(bad)
    done = run(options, gpu, tmp_path)
    frame = rows_of(options)
    by_rows = frame.groupby("rows_in_flight")["status"].agg(set).to_dict()
    assert by_rows == {
        1: {"incorrect"},
        2: {"ok"},
        3: {"timeout"},
        4: {"nondeterministic"},
        5: {"spilled"},
    }
    assert done.written == len(frame) == frame["candidate"].nunique()
    assert done.statuses == frame["status"].value_counts().to_dict()
    assert (frame["reason"] != "").equals(frame["status"] != "ok")
    assert frame["measured_at"].str.startswith("20").all()
    assert (frame["capacity"] == 512).all()
    assert (frame["torch"].isin(["2.11.0"])).all()
    assert gpu.closed
    spilled = frame[frame["status"] == "spilled"].iloc[0]
    assert spilled["spill_bytes"] == 64
    assert spilled["candidate"] not in gpu.checked
    assert pd.isna(frame[frame["status"] != "ok"]["median_us"]).all()


def test_measured_rows_carry_the_protocol(options: SearchOptions, tmp_path: Path) -> None:
    run(options, FakeGpu(), tmp_path)
    frame = rows_of(options)
    ok = frame[frame["status"] == "ok"].set_index("candidate")
    default = default_schedule(VIEW, 512)
    best = ok.loc[replace(default, rows_in_flight=2, prefetch=8).name]
    assert best["median_us"] == 250.0
    assert best["touched_experts"] == 31
    assert best["pairs"] == 3072
    # The floor takes the highest yardstick of the cell, the same for every row.
    assert ok["floor_us"].nunique() == 1
    assert best["ratio_to_floor"] == pytest.approx(250.0 / best["floor_us"], rel=1e-4)
    assert (ok["yardstick_tflops"] > 1400).all()
    base = ok.loc[default.name]
    assert base["ratio_to_baseline"] == 1.0
    assert best["ratio_to_baseline"] == pytest.approx(250 / 260, rel=1e-4)
    assert (ok["baseline"] == "default_schedule").all()
    assert best["power_w"] == 690.0
    assert "rel_error" in best["observation"]
    assert "rounds_us=250.0/250.0/250.0" in best["observation"]
    assert best["num_ranks"] == 8
    assert best["rank_mode"] == "one"
    assert best["num_local_experts"] == 32
    text = render(frame)
    assert text.index(str(ok["median_us"].idxmin())) < text.index(default.name)
    assert "1 spilled" in text


def test_resume_repeats_nothing(options: SearchOptions, tmp_path: Path) -> None:
    options = replace(options, capacity=1024)  # the capacity is part of the kernel and the key
    run(options, FakeGpu({1: "incorrect"}), tmp_path)
    before = rows_of(options)
    gpu = FakeGpu()
    done = run(options, gpu, tmp_path)
    assert (done.written, done.skipped) == (0, len(before))
    assert gpu.checked == []
    assert len(rows_of(options)) == len(before)
    more = replace(options, tokens=(512, 1024))
    gpu = FakeGpu()
    assert run(more, gpu, tmp_path).skipped == len(before)
    assert gpu.tokens == [1024]
    again = run(replace(options, again=True), FakeGpu(), tmp_path)
    assert (again.written, again.skipped) == (len(before), 0)


def test_an_interrupt_keeps_finished_cells(options: SearchOptions, tmp_path: Path) -> None:
    two = replace(options, tokens=(512, 1024), capacity=1024)
    gpu = FakeGpu(interrupt_after=30)
    with pytest.raises(KeyboardInterrupt):
        run(two, gpu, tmp_path)
    assert gpu.closed
    kept = rows_of(options)
    done = kept[kept["status"] == "ok"]
    assert set(done["num_tokens"]) == {512}
    gpu = FakeGpu()
    run(two, gpu, tmp_path)
    assert gpu.tokens == [1024]
    frame = rows_of(options)
    key = ["num_tokens", "candidate"]
    assert not frame.duplicated(key).any()
    assert frame.groupby("num_tokens")["candidate"].nunique().nunique() == 1


def test_a_new_candidate_is_timed_beside_the_baseline(
    options: SearchOptions, tmp_path: Path
) -> None:
    run(options, FakeGpu(), tmp_path)
    count = len(rows_of(options))
    wider = tmp_path / "wider.toml"
    wider.write_text(SPACE.replace("[132, 128]", "[132, 128, 120]"))
    gpu = FakeGpu()
    run(replace(options, space=load_space(str(wider))), gpu, tmp_path)
    frame = rows_of(options)
    assert len(frame) == count + 1
    assert frame.iloc[-1]["num_sms"] == 120
    assert frame.iloc[-1]["ratio_to_baseline"] == pytest.approx(272 / 260, rel=1e-4)
    assert default_schedule(VIEW, 512).name in gpu.checked  # timed again, no second row


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
    assert len(frame) == 4
    assert Found.schedule.name in set(frame["candidate"])


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
        def cell(self, num_tokens: int, routing: str) -> CellInfo:
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
    assert row["floor_us"] == pytest.approx(
        search_module.metrics.memory_floor_us(*size[:3]), rel=1e-4
    )
    assert row["tflops"] == pytest.approx(6 * size[3] * 4096 * 2048 / (us * 1e6), rel=1e-4)
    assert row["hbm_gbs"] == pytest.approx(search_module.metrics.hbm_gbs(*size, us), rel=1e-4)
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
    run(replace(options, recipe=recipe, limit=2), FakeGpu(), tmp_path)
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


# ---- the GPU process: deadlines, restarts, the control


class FakeProcess:
    """A worker whose behaviour is scripted by method and candidate."""

    started: list[FakeProcess]

    def __init__(self, script: dict[tuple[str, str], Exception]):
        self.script = script
        self.calls: list[tuple[str, Any]] = []
        self.dead = False

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        assert not self.dead
        first = payload[0] if payload else ""
        self.calls.append((method, first))
        error = self.script.pop((method, str(first)), None)
        if error is not None:
            raise error
        answers = {
            "describe": {"device": "NVIDIA H200", "torch": "2.11.0"},
            "cell": CellInfo(32, 96),
            "check": CheckResult("ok"),
            "recheck": CheckResult("ok"),
            "block": Block((100.0,) * 20),
            "yardstick": 1400.0,
        }
        return answers.get(method)

    def kill(self) -> None:
        self.dead = True


def make_bench(
    script: dict[tuple[str, str], Exception],
) -> tuple[RemoteBench, list[FakeProcess]]:
    started: list[FakeProcess] = []

    def spawn(config: WorkerConfig) -> FakeProcess:
        started.append(FakeProcess(script))
        return started[-1]

    config = WorkerConfig(problem=VIEW, capacity=512, recipe=search_module.Recipe())
    return RemoteBench(config, timeout_s=1.0, control=Schedule(), spawn=spawn), started


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ChildTimeout("slow"), "timeout"),
        (ChildDied("exit code -9"), "launch_error"),
        (ChildError("AcceleratorError", "illegal address"), "launch_error"),
        (ChildError("OutOfMemoryError", "no room"), "oom"),
    ],
)
def test_a_lost_process_is_replaced_and_controlled(error: Exception, status: str) -> None:
    bench, started = make_bench({("check", "b"): error})
    bench.start()
    bench.cell(16, "uniform")
    assert bench.check("a", Schedule()).status == "ok"
    assert bench.check("b", Schedule()).status == status
    assert started[0].dead
    assert bench.check("c", Schedule()).status == "ok"
    names = [call for call in started[1].calls if call[0] != "drop"]
    assert names == [("cell", 16), ("check", "control"), ("check", "c")]


def test_timing_goes_on_in_a_new_process() -> None:
    bench, started = make_bench({("block", "b"): ChildTimeout("hangs")})
    bench.start()
    bench.cell(16, "uniform")
    for name in ("a", "b", "c"):
        bench.check(name, Schedule())
    found = run_rounds(bench, ["a", "b", "c"], seed=3)
    assert isinstance(found["a"], Measurement)
    assert isinstance(found["c"], Measurement)
    assert found["a"].num_samples == 60  # rounds before the restart count
    assert getattr(found["b"], "status", None) == "timeout"
    assert len(started) == 2
    assert bench.recheck("a").status == "ok"
    # The new process has checked what it timed, and never saw the candidate that hung.
    assert {n for m, n in started[1].calls if m == "check"} == {"control", "a", "c"}


def test_a_context_that_is_lost_by_a_failed_check_is_left() -> None:
    bench, started = make_bench({})
    bench.start()
    bench.cell(16, "uniform")
    lost = CheckResult("timeout", "", "linear2 waits", context_lost=True)
    started[0].call = lambda *a, **k: lost  # type: ignore[method-assign]
    assert bench.check("a", Schedule()) == lost
    assert started[0].dead
    assert bench.check("b", Schedule()).status == "ok"


def test_a_failing_control_stops_the_search() -> None:
    script: dict[tuple[str, str], Exception] = {("check", "a"): ChildTimeout("hangs")}
    bench, started = make_bench(script)
    bench.start()
    bench.cell(16, "uniform")
    bench.check("a", Schedule())
    script[("check", "control")] = ChildTimeout("hangs too")
    with pytest.raises(GpuUnusable, match="hangs too"):
        bench.check("b", Schedule())
    assert all(process.dead for process in started)


# ---- the child process itself


class Handler:
    """Served by a real child."""

    def __init__(self, start: int):
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def fail(self) -> None:
        raise KeyError("missing")

    def hang(self) -> None:
        import time

        time.sleep(600)

    def die(self) -> None:
        import os

        os._exit(7)


def test_child_answers_fails_hangs_and_dies() -> None:
    child = Child(Handler, (40,))
    assert child.call("add", 2, timeout_s=60) == 42
    with pytest.raises(ChildError, match="missing") as caught:
        child.call("fail", timeout_s=60)
    assert caught.value.kind == "KeyError"
    assert child.call("add", 1, timeout_s=60) == 43
    with pytest.raises(ChildTimeout, match="no answer to 'hang'"):
        child.call("hang", timeout_s=0.2)
    with pytest.raises(ChildDied):
        child.call("add", 1, timeout_s=1)
    child.kill()
    other = Child(Handler, (0,))
    with pytest.raises(ChildDied, match="exit code 7"):
        other.call("die", timeout_s=60)
    third = Child(Handler, (0,))
    third.close()
    assert third._process.exitcode == 0
