"""What a search does about budgets, routings, several GPUs and kernels that are missing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_search import VIEW, FakeGpu, InlineFarm
from search_runs import options as options
from search_runs import rows_of, run, screened

from tl_megamoe.explorer.evidence import confirmed
from tl_megamoe.explorer.farm import NOT_BUILT, BuildResult
from tl_megamoe.explorer.protocol import Block, CandidateFailed
from tl_megamoe.explorer.screen import Budget
from tl_megamoe.explorer.search import SearchOptions, run_search
from tl_megamoe.explorer.space import load_space
from tl_megamoe.explorer.table import RESUME_KEY
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.schedule import Schedule, default_schedule

# ---- budget, routings, many GPUs


class Clock:
    """Time that passes with every block."""

    def __init__(self, gpu: FakeGpu):
        self.gpu = gpu

    def __call__(self) -> float:
        return 0.1 * self.gpu.blocks


def test_a_budget_ends_the_screen_and_is_not_overrun(
    options: SearchOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = tmp_path / "wide.toml"
    wide.write_text('[product]\nexperts_per_wave = "divisors"\nrows_in_flight = [1, 2, 3, 4]\n')
    limited = replace(options, space=load_space(str(wide)), budget_s=4.0, tokens=(16, 512))
    seen = 0
    for _ in range(8):  # a budget far below what confirming takes still gets somewhere
        gpu = FakeGpu()
        run(limited, gpu, tmp_path, budget=Budget(4.0, Clock(gpu)))
        now = screened(rows_of(options)).groupby("num_tokens")["candidate"].nunique().sum()
        assert gpu.blocks < 60
        if now == seen:
            break
        seen = now
    assert "the budget is spent" in caplog.text
    assert "too little of the budget is left to confirm" in caplog.text
    frame = rows_of(options)
    assert screened(frame).groupby("num_tokens")["candidate"].nunique().min() >= 24
    assert not (frame["stage"] == "confirm").any()
    run(replace(limited, budget_s=None), FakeGpu(), tmp_path)
    frame = rows_of(options)
    assert not frame.duplicated(list(RESUME_KEY)).any()
    assert all(confirmed(frame[frame["num_tokens"] == n]) for n in (16, 512))


def test_a_budget_leaves_room_to_confirm(options: SearchOptions, tmp_path: Path) -> None:
    gpu = FakeGpu()
    limited = replace(options, budget_s=40.0)
    run(limited, gpu, tmp_path, budget=Budget(40.0, Clock(gpu)))
    assert confirmed(rows_of(options))


# ---- kernels that are missing, a default that fails


class PartialFarm(InlineFarm):
    """A cache that lacks the kernels of some schedules."""

    def __init__(self, folder: Path, lacks: Any):
        super().__init__(folder)
        self.lacks = lacks

    def run(self, specs: Any, on_done: Any = None) -> dict[KernelSpec, BuildResult]:
        out = super().run(specs, on_done)
        lacks = [key for key in out if self.lacks(key.schedule)]
        return {**out, **{key: BuildResult(NOT_BUILT) for key in lacks}}


@pytest.mark.parametrize("strategy", ["grid", "halving", "optuna"])
def test_a_candidate_without_a_kernel_is_left_out(
    options: SearchOptions, tmp_path: Path, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    if strategy == "optuna":
        pytest.importorskip("optuna")
    farm = PartialFarm(tmp_path / "reports", lambda s: s.rows_in_flight == 2)
    some = replace(options, strategy=strategy, limit=8 if strategy == "optuna" else None)
    for _ in range(2):
        run_search(some, farm, lambda c, s: FakeGpu(), "NVIDIA H200")
    frame = rows_of(options)
    assert 2 not in set(frame["rows_in_flight"])
    assert confirmed(frame)
    if strategy != "optuna":
        assert "are not prebuilt and are left out" in caplog.text


def test_a_cache_without_the_default_is_refused(options: SearchOptions, tmp_path: Path) -> None:
    farm = PartialFarm(tmp_path / "reports", lambda s: s.stages == 4)
    gpu = FakeGpu()
    with pytest.raises(ValueError, match="built-in default .* has no prebuilt kernel"):
        run_search(options, farm, lambda c, s: gpu, "NVIDIA H200")
    assert gpu.starts == 0


def test_a_kernel_that_is_gone_is_not_asked_for_again(
    options: SearchOptions, tmp_path: Path
) -> None:
    run(replace(options, strategy="grid", confirm_top=0), FakeGpu(), tmp_path)
    before = len(rows_of(options))
    farm = PartialFarm(tmp_path / "reports", lambda s: s.rows_in_flight == 2)
    gpu = FakeGpu()
    run_search(options, farm, lambda c, s: gpu, "NVIDIA H200")
    fresh = rows_of(options).iloc[before:]
    assert 2 not in set(fresh["rows_in_flight"])
    assert confirmed(rows_of(options))


class FailingDefault(FakeGpu):
    """The default fails in some of its blocks."""

    def __init__(self, blocks: set[int]):
        super().__init__()
        self.bad_blocks = blocks
        self.of_default = 0

    def block(self, name: str) -> Block:
        if name == default_schedule(VIEW, 512).name:
            self.of_default += 1
            if self.of_default in self.bad_blocks:
                raise CandidateFailed("timeout", "killed")
        return super().block(name)


def test_a_default_that_fails_once_is_tried_again(options: SearchOptions, tmp_path: Path) -> None:
    run(options, FailingDefault({1}), tmp_path)
    frame = rows_of(options)
    ok = screened(frame)
    ok = ok[ok["status"] == "ok"]
    # Who ran beside the failure was timed again, beside the default.
    assert ok.groupby("candidate")["ratio_to_baseline"].count().min() >= 1
    assert confirmed(frame)[0].schedule.rows_in_flight == 2


def test_a_default_that_fails_in_a_confirmation_spoils_that_run_only(
    options: SearchOptions, tmp_path: Path
) -> None:
    run(replace(options, confirm_top=0), FakeGpu(), tmp_path)
    run(options, FailingDefault({4}), tmp_path)
    assert not confirmed(rows_of(options))
    run(options, FakeGpu(), tmp_path)
    frame = rows_of(options)
    assert confirmed(frame)
    assert not frame.duplicated(list(RESUME_KEY)).any()


def test_a_default_that_never_runs_confirms_nothing(
    options: SearchOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(options, FakeGpu({3: "incorrect"}), tmp_path)
    assert "nothing can be confirmed beside it" in caplog.text
    frame = rows_of(options)
    assert not (frame["stage"] == "confirm").any()
    assert (frame[frame["status"] == "ok"].groupby("candidate").size() <= 3).all()


def test_each_routing_is_a_cell(options: SearchOptions, tmp_path: Path) -> None:
    both = replace(options, routings={"uniform": "uniform", "zipf:1.2": "zipf:1.2"})
    gpu = FakeGpu()
    run(both, gpu, tmp_path)
    frame = rows_of(options)
    assert set(frame["routing"]) == {"uniform", "zipf:1.2"}
    assert {routing for _, routing, _ in gpu.cells} == {"uniform", "zipf:1.2"}
    mix = {"uniform": 0.7, "zipf:1.2": 0.3}
    assert confirmed(frame, mix)[0].num_observations == 30
    # All routings of a token count confirm the same candidates in one run.
    names = frame[frame["stage"] == "confirm"].groupby("routing")["candidate"].agg(set)
    assert names["uniform"] == names["zipf:1.2"]


def test_routings_that_come_one_after_the_other_are_confirmed_together(
    options: SearchOptions, tmp_path: Path
) -> None:
    run(options, FakeGpu(), tmp_path)
    both = {"uniform": "uniform", "zipf:1.2": "zipf:1.2"}
    run(replace(options, routings=both), FakeGpu(), tmp_path)
    frame = rows_of(options)
    assert confirmed(frame, {"uniform": 0.7, "zipf:1.2": 0.3})
    assert run(replace(options, routings=both), FakeGpu(), tmp_path).written == 0


class OneLikesEach(FakeGpu):
    """Either routing has a favourite that is slow in the other; 2 rows are second best in both."""

    def block(self, name: str) -> Block:
        rows, zipf = self.schedules[name].rows_in_flight, self.cells[-1][1] != "uniform"
        us = {1: 330.0 if zipf else 240.0, 2: 250.0, 3: 300.0, 4: 240.0 if zipf else 330.0}[rows]
        return replace(super().block(name), samples_us=(us,) * 20)


def test_a_mix_confirms_what_is_good_in_all_its_routings(
    options: SearchOptions, tmp_path: Path
) -> None:
    both = {"uniform": "uniform", "zipf:1.2": "zipf:1.2"}
    run(replace(options, routings=both, confirm_top=1), OneLikesEach(), tmp_path)
    found = confirmed(rows_of(options), {"uniform": 1.0, "zipf:1.2": 1.0})
    assert found[0].schedule.rows_in_flight == 2


def test_cells_run_on_several_gpus_at_once(options: SearchOptions, tmp_path: Path) -> None:
    made: list[FakeGpu] = []
    both = threading.Barrier(2)

    def make(config: Any, control: Schedule) -> FakeGpu:
        both.wait(60)  # two are at work before either has taken a piece
        made.append(FakeGpu(pause_s=0.001))
        return made[-1]

    farm = InlineFarm(tmp_path / "reports")
    several = replace(options, tokens=(16, 64, 512, 1024))
    run_search(several, farm, make, "NVIDIA H200", num_gpus=2)
    assert len(made) == 2
    assert all(gpu.closed for gpu in made)
    assert sorted({t for gpu in made for t in gpu.tokens}) == [16, 64, 512, 1024]
    frame = rows_of(options)
    assert not frame.duplicated(list(RESUME_KEY)).any()
    for tokens in several.tokens:
        assert confirmed(frame[frame["num_tokens"] == tokens])
