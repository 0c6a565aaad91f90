"""`tl-megamoe bench` with a fake compiler and GPU: rows, statuses, what is printed, flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_megamoe import reference
from tl_megamoe.explorer import bench as command
from tl_megamoe.explorer.baselines import BASELINES
from tl_megamoe.explorer.baselines.base import Layer, Prepared, Tolerance
from tl_megamoe.explorer.baselines.beside import (
    BenchOptions,
    CellResult,
    bench_specs,
    build,
    choose,
    rows_of,
    run_beside,
    schedule_of,
)
from tl_megamoe.explorer.baselines.serve import BenchWorker
from tl_megamoe.explorer.baselines.torch_bf16 import TorchBf16
from tl_megamoe.explorer.baselines.unfused import Unfused
from tl_megamoe.explorer.cli import main
from tl_megamoe.explorer.farm import BuildResult, Farm, ReportCache, classify
from tl_megamoe.explorer.messages import CellInfo, CheckResult, WorkerConfig
from tl_megamoe.explorer.protocol import Block, CandidateFailed, GpuState, Rules
from tl_megamoe.explorer.table import read_table
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, ScheduleError, default_schedule
from tl_megamoe.weights import restore_weights

VIEW = PRESETS["deepseek-v4-flash"].one_rank()
TINY = Problem(name="t", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
OURS_US = 100.0


class Named:
    """A baseline that is only a name: the fake GPU knows its time."""

    what = "a name"
    tested = ""
    tolerance: Tolerance | None = None

    def __init__(self, name: str, reason: str | None = None):
        self.name = name
        self.reason = reason

    def available(self) -> str | None:
        return self.reason

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return "it rounds otherwise" if recipe.scale == "pow2" else None

    def version(self) -> str:
        return f"{self.name} 1.2"

    def prepare(self, layer: Layer) -> Prepared:
        raise AssertionError("prepared in the parent process")


class InlineFarm(Farm):
    """Builds in this process; spills in the phases named."""

    def __init__(self, folder: Path, spills: Sequence[str] = ()):
        super().__init__(cache=ReportCache(folder))
        self.spills = spills
        self.built: list[str] = []

    def run(self, specs: Any, on_done: Any = None) -> dict[KernelSpec, BuildResult]:
        out = {}
        for spec in {s.key(): s for s in specs}.values():
            self.built.append(spec.phase)
            spilled = 64 if spec.phase in self.spills else 0
            report = KernelReport(168, spilled, 200_000, 8, (), f"hash of {spec.phase}")
            out[spec.key()] = classify(spec, report)
        return out


class FakeGpu:
    """A `BesideBench`: a name's time, or how it fails."""

    def __init__(self, times: dict[str, float | str]):
        self.times = times
        self.log: list[str] = []
        self.closed = False

    def start(self) -> dict[str, str]:
        return {"device": "NVIDIA H200", "torch": "2.11.0", "card": "0badcafe", "driver": "580.1"}

    def cell(self, num_tokens: int, routing: str) -> CellInfo:
        self.log.append(f"cell {num_tokens} {routing}")
        return CellInfo(31, num_tokens * 6)

    def found(self, name: str) -> float | str:
        return self.times.get(name, OURS_US)

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        self.log.append(f"check {name}")
        found = self.found(name)
        if found in ("incorrect", "oom"):
            return CheckResult(str(found), "rel_error=9e-01", f"it is {found}")
        return CheckResult("ok", f"rel_error=2e-03 of={name}")

    def recheck(self, name: str) -> CheckResult:
        moved = self.found(name) == "moves"
        return CheckResult("nondeterministic", "", "moved") if moved else CheckResult("ok")

    def warm_up(self, name: str) -> None: ...

    def block(self, name: str) -> Block:
        self.log.append(f"block {name}")
        found = self.found(name)
        if found == "hangs":
            raise CandidateFailed("timeout", "block took over 300 s")
        us = OURS_US if isinstance(found, str) else found
        samples = tuple(us + n / 10 for n in range(-10, 11))
        return Block(samples, GpuState(1500.0, 2600.0, 690.0, 60.0), GpuState(1450.0))

    def yardstick(self) -> float:
        return 1400.0

    def close(self) -> None:
        self.closed = True


def options(tmp_path: Path, tokens: Sequence[int] = (512,), **changes: Any) -> BenchOptions:
    schedules = choose(VIEW, "nvidia-h200", tokens, "default", Recipe())
    return BenchOptions(
        problem=VIEW,
        schedules=schedules,
        capacity=max(tokens),
        results=tmp_path / "results",
        commit="abc",
        rules=Rules(rounds=2),
        **changes,
    )


def beside(
    opts: BenchOptions, baselines: Sequence[Any], gpu: FakeGpu, farm: Farm
) -> tuple[Path, list[CellResult]]:
    cells: list[CellResult] = []
    path = run_beside(
        opts, baselines, farm, lambda config, control: gpu, "NVIDIA H200", cells.append
    )
    assert gpu.closed
    return path, cells


# ---- the schedule


@pytest.mark.parametrize(
    "schedule",
    [
        default_schedule(VIEW, 16),
        default_schedule(VIEW, 8192),
        replace(default_schedule(VIEW, 8192), order="lag", lag=7, prefetch=2, load_warps=2),
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


def parse(*arguments: str) -> argparse.Namespace:
    parsers = argparse.ArgumentParser().add_subparsers()

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        parser = parsers.add_parser(name)
        parser.set_defaults(command=run)
        return parser

    command.add_parser(add)
    return parsers.choices["bench"].parse_args(arguments)


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


# ---- the GPU side


class FakeKernel:
    """The layer by the reference, in its fused form or in the last of the phases."""

    def __init__(self, spec: KernelSpec, log: list[str]):
        self.spec = spec
        self.log = log

    def launch(self, buffer: Any, weights: Any, y: torch.Tensor, n: int, s: Schedule) -> None:
        self.log.append(self.spec.phase)
        if self.spec.phase in ("fused", "combine"):
            inputs = [t[:n] for t in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)]
            y.copy_(reference.moe(self.spec.problem, *inputs, restore_weights(weights)))


class FakeCudaBench:
    def __init__(self) -> None:
        self.cell: dict[str, Any] = {}
        self.prepare: Any = None
        self.agree: Any = None
        self.meet: Any = None

    def forget(self, name: str) -> None:
        self.cell.pop(name, None)


class Off(TorchBf16):
    """Right at first; wrong or broken as asked."""

    def __init__(self, name: str, factor: float = 1.0, error: Exception | None = None):
        self.name = name
        self.factor = factor
        self.error = error

    def prepare(self, layer: Layer) -> Prepared:
        if self.error is not None:
            raise self.error
        prepared = super().prepare(layer)

        def launch(index: int) -> None:
            prepared.launch(index)
            prepared.outputs[index].mul_(self.factor)

        return Prepared(launch, prepared.outputs, "pieces=fake")


@pytest.fixture
def worker() -> tuple[BenchWorker, list[str]]:
    log: list[str] = []
    baselines: list[Any] = [
        Unfused(),
        Off("right"),
        Off("wrong", 1.5),
        Off("nan", float("nan")),
        Off("broken", error=RuntimeError("no kernel image")),
        Off("large", error=torch.cuda.OutOfMemoryError("no room")),
    ]
    bench: Any = FakeCudaBench()
    compile_spec: Any = lambda spec: FakeKernel(spec, log)  # noqa: E731
    config = WorkerConfig(problem=TINY, capacity=24, recipe=Recipe())
    made = BenchWorker(config, baselines, device="cpu", compile_spec=compile_spec, bench=bench)
    made.cell(17, "zipf:1")
    return made, log


def test_a_baseline_is_checked_like_a_candidate(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    schedule = default_schedule(TINY, 16)
    statuses = {
        "ours": ("ok", ""),
        "right": ("ok", ""),
        "unfused": ("ok", ""),
        "wrong": ("incorrect", "relative error 5.0"),
        "nan": ("incorrect", "values are NaN or infinite on one side"),
        "broken": ("launch_error", "no kernel image"),
        "large": ("oom", "no room"),
    }
    for name, (status, reason) in statuses.items():
        found = made.check(name, schedule)
        assert found.status == status, (name, found)
        assert reason in found.reason
    assert set(made.bench.cell) == {"ours", "right", "unfused"}
    assert set(made.prepared) == {"right", "unfused"}
    assert "pieces=fake" in made.check("right", schedule).observation


def test_unfused_runs_the_phases_in_order_on_its_own_output(
    worker: tuple[BenchWorker, list[str]],
) -> None:
    made, log = worker
    made.check("ours", default_schedule(TINY, 16))
    made.check("unfused", default_schedule(TINY, 16))
    outputs = [y.clone() for y in made.outputs]
    log.clear()
    for index in range(3):
        made.bench.cell["unfused"](index)
    assert log == ["dispatch", "linear1", "linear2", "combine"] * 3
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(outputs, made.outputs, strict=True)
    )
    assert torch.equal(made.prepared["unfused"].outputs[0], made.results["ours"])


def test_recheck_sees_a_baseline_that_went_wrong(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    made.check("right", default_schedule(TINY, 16))
    assert made.recheck("right").status == "ok"
    made.baselines["right"].factor = 1.2  # type: ignore[attr-defined]
    found = made.recheck("right")
    assert found.status == "incorrect"
    assert "relative error" in found.reason
    assert not made.bench.cell


def test_recheck_sees_what_timed_launches_left(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    for index, wrong in ((0, 2.0), (2, torch.nan)):
        made.check("right", default_schedule(TINY, 16))
        made.prepared["right"].outputs[index].mul_(wrong)
        assert made.recheck("right").status == "incorrect"
        assert not made.bench.cell


def test_unfused_that_writes_nothing_is_not_right(
    worker: tuple[BenchWorker, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = worker
    schedule = default_schedule(TINY, 16)
    made.check("ours", schedule)
    monkeypatch.setattr(FakeKernel, "launch", lambda *arguments: None)
    found = made.check("unfused", schedule)
    assert found.status == "incorrect"
    assert "values are NaN or infinite on one side" in found.reason


def test_a_new_cell_forgets_prepared_baselines(worker: tuple[BenchWorker, list[str]]) -> None:
    made, _ = worker
    made.check("right", default_schedule(TINY, 16))
    made.cell(5, "uniform")
    assert not made.prepared
    assert made.check("right", default_schedule(TINY, 16)).status == "ok"
    assert made.prepared["right"].outputs[0].shape == (5, 256)


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
