"""`tl-megamoe bench` with a fake compiler and GPU: rows, statuses, what is printed, flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_bench import VIEW, FakeGpu, InlineFarm, Named, beside, options, parse

from tl_megamoe.explorer import bench as command
from tl_megamoe.explorer.baselines import BASELINES
from tl_megamoe.explorer.baselines.beside import (
    bench_specs,
    build,
    choose,
    rows_of,
    schedule_of,
)
from tl_megamoe.explorer.baselines.unfused import Unfused
from tl_megamoe.explorer.cli import main
from tl_megamoe.explorer.farm import Farm, ReportCache
from tl_megamoe.explorer.table import read_table
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule

# ---- the schedule


@pytest.mark.parametrize(
    "schedule",
    [
        default_schedule(VIEW, 16),
        default_schedule(VIEW, 8192),
        replace(default_schedule(VIEW, 8192), order="lag", lag=7, prefetch=2, load_warps=2),
        replace(default_schedule(VIEW, 16, "swapped"), evict_first=1),
        replace(default_schedule(VIEW, 512), experts_per_wave=8, num_sms=128, rows_in_flight=2),
    ],
    ids=lambda s: s.name,
)
def test_a_schedule_is_found_by_its_name(schedule: Schedule) -> None:
    assert schedule_of(VIEW, schedule.name) == schedule


@pytest.mark.parametrize("name", ["m64", "", "pp-m64-n256.256", "frozen2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a schedule's name. Write one as tl-megamoe list"):
        schedule_of(VIEW, name)


def test_frozen_default_or_a_name() -> None:
    recipe = Recipe()
    frozen = choose(VIEW, "nvidia-h200", [16, 8192], "frozen", recipe)
    default = choose(VIEW, "nvidia-h200", [16, 8192], "default", recipe)
    assert list(frozen) == [16, 8192]
    assert default == {n: default_schedule(VIEW, n) for n in (16, 8192)}
    assert frozen != default
    assert choose(VIEW, "no-such-card", [16, 8192], "frozen", recipe) == default
    name = default[16].name
    assert choose(VIEW, "", [16, 8192], name, recipe) == dict.fromkeys([16, 8192], default[16])
    with pytest.raises(ScheduleError, match="experts_per_wave=5 does not divide"):
        choose(VIEW, "", [16], name.replace("-w32-", "-w5-"), recipe)


# ---- kernels


def test_a_bench_compiles_the_fused_kernel_and_the_phases(tmp_path: Path) -> None:
    opts = options(tmp_path)
    farm = InlineFarm(tmp_path)
    build(opts, [Unfused(), Named("theirs")], farm)  # type: ignore[list-item]
    assert sorted(farm.built) == ["combine", "dispatch", "fused", "linear1", "linear2"]
    farm.built.clear()
    build(opts, [Named("theirs")], farm)  # type: ignore[list-item]
    assert farm.built == ["fused"]


def test_kernels_that_are_not_prebuilt_are_named(tmp_path: Path) -> None:
    farm = Farm(cache=ReportCache(tmp_path), prebuilt=True)
    with pytest.raises(ValueError, match=r"5 of 5 kernels are not in the cache: fused .*--compile"):
        build(options(tmp_path), [Unfused()], farm)


# ---- rows


def test_a_row_for_each_baseline(tmp_path: Path) -> None:
    gpu = FakeGpu({"theirs": 125.0, "slow": 400.0})
    opts = options(tmp_path, (16, 512))
    baselines = [Named("theirs"), Named("slow")]
    path, cells = beside(opts, baselines, gpu, InlineFarm(tmp_path))
    assert path == tmp_path / "results" / "nvidia-h200" / "deepseek-v4-flash.csv"
    frame = read_table(path)
    assert [*zip(frame["num_tokens"], frame["baseline"], strict=True)] == [
        (16, "theirs"),
        (16, "slow"),
        (512, "theirs"),
        (512, "slow"),
    ]
    assert set(frame["stage"]) == {"bench"}
    assert set(frame["status"]) == {"ok"}
    assert list(frame["candidate"][1:3]) == [s.name for s in opts.schedules.values()]
    assert list(frame["baseline_version"][:2]) == ["theirs 1.2", "slow 1.2"]
    assert list(frame["baseline_us"][:2]) == [125.0, 400.0]
    assert list(frame["ratio_to_baseline"][:2]) == [0.8, 0.25]
    assert set(frame["median_us"]) == {100.0}
    assert len(set(frame["run"])) == 1
    assert set(frame["card"]) == {"0badcafe"}
    assert set(frame["source_hash"]) == {"hash of fused"}
    assert set(frame["sm_clock_end_mhz"]) == {1450.0}
    assert set(frame["num_ranks"]) == {8}
    assert set(frame["rank_mode"]) == {"one"}
    last = frame.iloc[3]
    weights = 31 * 3 * 4096 * 2048
    pairs = 512 * 6
    assert last["tflops"] == pytest.approx(6 * pairs * 4096 * 2048 / 100e6, rel=1e-4)
    memory = (weights + 512 * 4096 * 3) / 4.589e6
    assert last["floor_us"] == pytest.approx(memory, rel=1e-4)
    assert last["ratio_to_floor"] == pytest.approx(100 / memory, rel=1e-4)
    assert "baseline_p10_us=399.2 baseline_p90_us=400.8" in last["notes"]
    assert "of=slow" in last["notes"]
    assert [cell.num_tokens for cell in cells] == [16, 512]


def test_all_are_timed_in_turn_in_one_run(tmp_path: Path) -> None:
    gpu = FakeGpu({})
    beside(options(tmp_path), [Named("a"), Named("b")], gpu, InlineFarm(tmp_path))
    blocks = [line.removeprefix("block ") for line in gpu.log if line.startswith("block")]
    name = next(iter(options(tmp_path).schedules.values())).name
    assert sorted(blocks[:3]) == sorted(blocks[3:]) == sorted([name, "a", "b"])
    assert [line for line in gpu.log if line.startswith("cell")] == ["cell 512 uniform"]


def test_a_second_bench_goes_on_numbering(tmp_path: Path) -> None:
    opts = options(tmp_path)
    for _ in range(2):
        path, _ = beside(opts, [Named("a"), Named("b")], FakeGpu({}), InlineFarm(tmp_path))
    frame = read_table(path)
    assert list(frame["observation"]) == [0, 1, 2, 3]
    assert len(set(frame["run"])) == 2


@pytest.mark.parametrize(
    ("found", "status", "reason"),
    [
        ("incorrect", "incorrect", "it is incorrect"),
        ("oom", "oom", "it is oom"),
        ("hangs", "timeout", "block took over 300 s"),
        ("moves", "nondeterministic", "moved"),
    ],
)
def test_a_baseline_that_fails_has_a_row_and_a_line(
    tmp_path: Path, found: str, status: str, reason: str
) -> None:
    opts = options(tmp_path)
    gpu = FakeGpu({"bad": found, "good": 200.0})
    path, cells = beside(opts, [Named("bad"), Named("good")], gpu, InlineFarm(tmp_path))
    bad, good = read_table(path).to_dict("records")
    assert (bad["baseline"], bad["status"], bad["median_us"]) == ("bad", "ok", 100.0)
    assert bad["baseline_us"] != bad["baseline_us"]
    assert f"baseline {status}: {reason}" in bad["notes"]
    assert good["ratio_to_baseline"] == 0.5
    text = command.report(opts, cells[0], "nvidia-h200")
    assert f"bad: {status}: {reason}" in text


def test_ours_that_fails_is_one_row(tmp_path: Path) -> None:
    opts = options(tmp_path)
    name = next(iter(opts.schedules.values())).name
    path, cells = beside(
        opts, [Named("theirs")], FakeGpu({name: "incorrect"}), InlineFarm(tmp_path)
    )
    (row,) = read_table(path).to_dict("records")
    assert (row["status"], row["reason"], row["baseline"]) == ("incorrect", "it is incorrect", "")
    assert cells[0].ours.time is None
    assert cells[0].baselines[0].time is not None
    assert len(rows_of(cells[0])) == 1


def test_a_phase_that_spills_costs_the_unfused_baseline_alone(tmp_path: Path) -> None:
    gpu = FakeGpu({"theirs": 200.0})
    baselines = [Unfused(), Named("theirs")]
    path, _ = beside(options(tmp_path), baselines, gpu, InlineFarm(tmp_path, ["linear2"]))
    unfused, theirs = read_table(path).to_dict("records")
    assert "baseline spilled: 64 bytes of register spills" in unfused["notes"]
    assert theirs["ratio_to_baseline"] == 0.5
    assert "check unfused" not in gpu.log


def test_ours_that_spills_is_not_run(tmp_path: Path) -> None:
    gpu = FakeGpu({})
    path, _ = beside(options(tmp_path), [Named("a")], gpu, InlineFarm(tmp_path, ["fused"]))
    (row,) = read_table(path).to_dict("records")
    assert (row["status"], row["spill_bytes"]) == ("spilled", 64)
    assert [line for line in gpu.log if line.startswith("check")] == ["check a"]


def test_the_printed_table(tmp_path: Path) -> None:
    opts = options(tmp_path)
    gpu = FakeGpu({"theirs": 125.0})
    _, (cell,) = beside(opts, [Named("theirs")], gpu, InlineFarm(tmp_path))
    title, header, ours, theirs, *_ = command.report(opts, cell, "nvidia-h200").splitlines()
    assert "deepseek-v4-flash on nvidia-h200, 512 tokens, uniform, recipe exact-128" in title
    assert header.split("  ")[0] == "name"
    assert ours.startswith("tl_megamoe")
    assert "100.0 (99.2-100.8)" in ours
    cells = [part.strip() for part in theirs.split("  ") if part.strip()]
    floor = (31 * 3 * 4096 * 2048 + 512 * 4096 * 3) / 4.589e6
    assert cells[:4] == ["theirs", "theirs 1.2", "125.0 (124.2-125.8)", "0.800"]
    assert cells[-1] == f"{125 / floor:.3f}"
    assert header.index("ratio") == ours.index(" 1 ") + 1


# ---- the command


FLASH = ("--problem", "deepseek-v4-flash", "--tokens", "16,512")


def test_flags_become_options(tmp_path: Path) -> None:
    args = parse(*FLASH, "--schedule", "default", "--out", str(tmp_path), "--commit", "c1")
    opts = command.options_of(args)
    assert opts.problem == VIEW
    assert opts.capacity == 512
    assert opts.schedules[16] == default_schedule(VIEW, 16)
    assert (opts.results, opts.commit, opts.routing) == (tmp_path, "c1", "uniform")
    frozen = command.options_of(parse(*FLASH, "--device", "NVIDIA H200"))
    assert frozen.schedules == choose(VIEW, "nvidia-h200", [16, 512], "frozen", Recipe())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*FLASH, "--ranks", "2", "--rank-mode", "virtual"),
            "bench times one rank alone, or ranks",
        ),
        ((*FLASH, "--ranks", "2"), "--ranks 2 with --rank-mode one: one rank runs alone"),
        ((*FLASH, "--rank-mode", "real"), "needs the number of ranks that run"),
        (("--problem", "deepseek-v4-flash"), "bench needs --tokens"),
        ((*FLASH, "--capacity", "100"), "--capacity 100 is below the 512 of --tokens"),
        ((*FLASH, "--routing", "zip"), "routing='zip' must be one of"),
        ((*FLASH, "--schedule", "fast"), "--schedule fast: not a schedule's name"),
    ],
)
def test_wrong_flags_are_told(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.options_of(parse(*arguments))


def test_baselines_are_chosen_by_name_or_by_what_runs() -> None:
    every: list[Any] = [Named("here"), Named("away", "not installed")]

    def chosen(names: Sequence[str] | None, recipe: Recipe | None = None) -> list[str]:
        found = command.chosen_baselines(VIEW, recipe or Recipe(), names, every)
        return [baseline.name for baseline in found]

    assert chosen(None) == ["here"]
    assert chosen(None, Recipe(scale="pow2")) == []
    assert chosen(["here", "here"]) == ["here"]
    with pytest.raises(ValueError, match="--baseline away does not run: not installed"):
        chosen(["away"])
    with pytest.raises(ValueError, match="--baseline here does not run: it rounds otherwise"):
        chosen(["here"], Recipe(scale="pow2"))
    with pytest.raises(ValueError, match="--baseline gone: there is no such baseline. All: here"):
        chosen(["gone"])


def test_list_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parse("--list")) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["baseline", "here", "version", "tested"]
    assert [line.split()[0] for line in lines] == [baseline.name for baseline in BASELINES]
    torch_line = next(line for line in lines if line.startswith("torch "))
    assert torch.__version__ in torch_line
    tested = Named("x")
    tested.tested = "torch 2.11.0, NVIDIA H200, 2026-11-29"
    assert command.list_line(tested)[1:] == ("yes", "x 1.2", f"tested on {tested.tested}")
    assert command.list_line(Named("x", "no GPU"))[1::2] == ("no GPU", "untested")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.doctor, "find_gpu", lambda: None)
    with pytest.raises(ValueError, match="bench times on an SM90 GPU, and there is none here"):
        command.run(parse(*FLASH, "--schedule", "default"))


def test_compile_only_compiles_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    farm = InlineFarm(tmp_path)
    monkeypatch.setattr("tl_megamoe.explorer.farm.Farm", lambda **options: farm)
    flags = (*FLASH, "--schedule", "default", "--compile-only")
    assert command.run(parse(*flags, "--baseline", "unfused,torch")) == 0
    kernels = {s.kernel_key() for s in (default_schedule(VIEW, n) for n in (16, 512))}
    assert len(farm.built) == 5 * len(kernels)
    assert capsys.readouterr().out == f"{len(farm.built)} ok\n"
    farm.built.clear()
    assert command.run(parse(*flags, "--baseline", "torch-bf16")) == 0
    assert set(farm.built) == {"fused"}


def test_specs_of_a_cell_share_one_capacity(tmp_path: Path) -> None:
    opts = options(tmp_path)
    (schedule,) = opts.schedules.values()
    specs = bench_specs(opts, schedule, unfused=True)
    assert {spec.capacity for spec in specs} == {512}
    assert [spec.phase for spec in specs] == ["fused", "dispatch", "linear1", "linear2", "combine"]


def test_a_wrong_name_is_said_before_a_gpu_that_is_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["bench", "--problem", "deepseek-v4-flash", "--tokens", "16", "--baseline", "torchh"]
    assert main(argv) == 2
    assert "torchh" in capsys.readouterr().err
