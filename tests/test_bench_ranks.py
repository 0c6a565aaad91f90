"""`tl-megamoe bench` of ranks with a GPU each: rows, flags, and two workers on the CPU.

The kernels of the CPU ranks meet in every launch, as in test_real_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tilelang
import torch
from fake_bench import FakeGpu, InlineFarm, Named, parse
from test_real_ranks import (
    CONFIG,
    DIES_ON_1,
    NO_KERNEL_ON_1,
    PAIR,
    RIGHT,
    RULES,
    TIMES_US,
    WRONG_ON_1,
    CpuBench,
    MeetingKernel,
    all_know,
    cpu_sets,
    schedule,
)
from tilelang import tvm

from tl_megamoe import metrics
from tl_megamoe.device import barriers
from tl_megamoe.explorer import bench as command
from tl_megamoe.explorer.baselines.base import Layer, Prepared
from tl_megamoe.explorer.baselines.beside import BenchOptions, CellResult, choose, run_beside
from tl_megamoe.explorer.baselines.serve import BenchWorker, make_real_bench_worker
from tl_megamoe.explorer.baselines.torch_bf16 import TorchBf16
from tl_megamoe.explorer.baselines.unfused import Unfused, unfused_specs
from tl_megamoe.explorer.measure import RemoteBench
from tl_megamoe.explorer.messages import CellInfo, WorkerConfig
from tl_megamoe.explorer.protocol import Block, Measurement, Rules, run_rounds
from tl_megamoe.explorer.real_ranks import join_job, spawn_real_ranks
from tl_megamoe.explorer.table import read_table
from tl_megamoe.kernel import TARGET, KernelSpec
from tl_megamoe.kernel import _program as program_of
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.program import PASS_CONFIGS
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import default_schedule

WHOLE = replace(PRESETS["deepseek-v4-flash"], num_experts=64, num_ranks=2, name="half")
SIZES = ("--hidden", "4096", "--intermediate", "2048", "--num-experts", "64", "--num-topk", "6")
REAL = ("--ranks", "2", "--rank-mode", "real")


# ---- flags and rows


def test_flags_of_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--tokens", "16", "--out", str(tmp_path), "--device", "nvidia-h200")
    opts = command.options_of(parse(*SIZES, *REAL, *flags, "--capacity", "2048"))
    assert (opts.rank_mode, opts.problem.num_ranks, opts.capacity) == ("real", 2, 2048)
    assert opts.config.rank_mode == "real"
    frozen = choose(opts.problem, "nvidia-h200", [16], "frozen", Recipe(), "real")
    assert opts.schedules == frozen
    assert frozen != choose(opts.problem, "no-such-card", [16], "frozen", Recipe(), "real")
    monkeypatch.setattr(command.doctor, "find_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(command.doctor, "count_gpus", lambda: 1)
    with pytest.raises(ValueError, match="needs 2 SM90 GPUs.* this machine has 1. Bench fewer"):
        command.run(parse(*SIZES, *REAL, *flags, "--baseline", "unfused"))


class OneRankOnly(Named):
    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return TorchBf16().refuses(problem, recipe)


def test_what_runs_over_ranks_is_chosen() -> None:
    single = OneRankOnly("single")
    every: list[Any] = [Named("x"), single]
    assert command.chosen_baselines(WHOLE, Recipe(), None, every) == every[:1]
    with pytest.raises(ValueError, match="--baseline single does not run: 2 ranks: it runs one"):
        command.chosen_baselines(WHOLE, Recipe(), ["single"], every)


class FakeGpus(FakeGpu):
    """A bench of two ranks: the second takes 4 us longer."""

    def cell(self, num_tokens: int, routing: str) -> CellInfo:
        return CellInfo(64, 12 * num_tokens, 6 * num_tokens // 2, 32, 6 * num_tokens)

    def block(self, name: str) -> Block:
        block = super().block(name)
        slow = tuple(sample + 4.0 for sample in block.samples_us)
        return replace(block, samples_us=slow, ranks=(block.samples_us, slow))


def test_a_row_of_real_ranks(tmp_path: Path) -> None:
    opts = BenchOptions(
        problem=WHOLE,
        schedules={512: default_schedule(WHOLE, 512)},
        capacity=2048,
        results=tmp_path,
        rank_mode="real",
        rules=Rules(rounds=2),
    )
    gpus, cells = FakeGpus({"unfused": 200.0}), list[CellResult]()
    path = run_beside(
        opts,
        [Unfused()],
        InlineFarm(tmp_path),
        lambda config, control: gpus,
        "NVIDIA H200",
        cells.append,
    )
    assert path == tmp_path / "nvidia-h200-x2" / "half.csv"
    (row,) = read_table(path).to_dict("records")
    assert (row["stage"], row["baseline"], row["status"]) == ("bench", "unfused", "ok")
    assert (row["rank_mode"], row["num_ranks"], row["capacity"]) == ("real", 2, 2048)
    assert (row["median_us"], row["ranks_us"]) == (104.0, "100.00/104.00")
    assert row["baseline_us"] == 204.0
    assert row["ratio_to_baseline"] == pytest.approx(104 / 204, rel=1e-5)
    assert "baseline_ranks_us=200.00/204.00" in row["notes"]
    sent = metrics.nvlink_gbs(WHOLE, 1536, 1536, 104.0)
    assert row["nvlink_gbs"] == pytest.approx(sent, rel=1e-5)
    # What one GPU does: its own tokens, the experts and rows of the busiest rank.
    assert row["tflops"] == pytest.approx(metrics.tflops(WHOLE, 3072, 104.0), rel=1e-5)
    assert row["hbm_gbs"] == pytest.approx(metrics.hbm_gbs(WHOLE, 512, 32, 3072, 104.0), rel=1e-5)
    text = command.report(opts, cells[0], "nvidia-h200")
    assert "512 tokens, 2 ranks with a GPU each, uniform" in text
    assert f"  {sent:.0f}  " in text.splitlines()[2]


# ---- the barriers that the unfused baseline rests on


def test_every_phase_of_ranks_meets_its_peers() -> None:
    """Which barriers of all ranks a phase holds: what the docstring of unfused.py says."""
    problem = replace(PAIR, hidden=512, intermediate=256, num_experts=8)
    specs = unfused_specs(problem, default_schedule(problem, 512), 1024, Recipe())
    found = {}
    for spec in specs:
        configs = {**PASS_CONFIGS, "tl.enable_fast_math": True}
        with tvm.target.Target(TARGET), tvm.transform.PassContext(config=configs):
            text = tilelang.lower(program_of(spec.key())).kernel_source
        calls = [part.split(");")[0] for part in text.split("tlmm_rank_sync((")[1:]]
        found[spec.phase] = [int(call.rsplit(",", 1)[1]) for call in calls]
    ends = [barriers.TAG_COMBINE_PEER]
    assert found == {
        "dispatch": [barriers.TAG_DISPATCH_PEER, *ends],
        "linear1": ends,
        "linear2": ends,
        "combine": ends,
    }


# ---- two processes on the CPU


class Alone(TorchBf16):
    """A baseline that fails to prepare on rank 1."""

    name = "alone"

    def prepare(self, layer: Layer) -> Prepared:
        if layer.group is not None and torch.distributed.get_rank(layer.group) == 1:
            raise torch.cuda.OutOfMemoryError("no room")
        return Prepared(lambda index: None, [torch.zeros(1)])


def make_cpu_worker(config: WorkerConfig, rank: int, port: int) -> BenchWorker:
    join_job(rank, 2, port, "gloo")

    def compile_spec(spec: KernelSpec) -> Any:
        if spec.schedule.rows_in_flight == NO_KERNEL_ON_1 and rank == 1:
            raise RuntimeError("nvcc failed")
        return MeetingKernel(spec)

    baselines: list[Any] = [Unfused(), Alone()]
    options: dict[str, Any] = {"compile_spec": compile_spec, "bench": CpuBench(rank)}
    return BenchWorker(config, baselines, device="cpu", open_sets=cpu_sets, **options)


@pytest.fixture(scope="module")
def bench() -> Iterator[RemoteBench]:
    started = RemoteBench(
        CONFIG,
        timeout_s=60.0,
        control=schedule(RIGHT),
        spawn=lambda config: spawn_real_ranks(config, factory=make_cpu_worker),
    )
    yield started
    started.close()


def test_unfused_over_two_ranks_beside_ours(bench: RemoteBench) -> None:
    bench.start()
    bench.cell(17, "uniform")
    assert bench.check("ours", schedule(RIGHT)).status == "ok"
    found = bench.check("unfused", schedule(RIGHT))
    assert found.status == "ok", found
    assert found.observation.startswith("rel_error=")
    timed = run_rounds(bench, ["ours", "unfused"], rules=RULES)
    for name in ("ours", "unfused"):
        result = timed[name]
        assert isinstance(result, Measurement), result
        assert result.ranks_us == pytest.approx(TIMES_US)
        assert result.median_us == pytest.approx(150.0)
        assert bench.recheck(name).status == "ok"


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        (WRONG_ON_1, "incorrect", "token 2 has relative error"),
        (NO_KERNEL_ON_1, "launch_error", "RuntimeError: nvcc failed"),
    ],
)
def test_what_a_phase_does_wrong_on_one_rank_all_know(
    bench: RemoteBench, behaviour: int, status: str, reason: str
) -> None:
    all_know(bench, ("unfused", "unfused"), behaviour, status, reason)


def test_a_baseline_that_one_rank_cannot_prepare(bench: RemoteBench) -> None:
    bench.cell(16, "uniform")
    found = bench.check("alone", schedule(RIGHT))
    assert (found.status, found.reason) == ("oom", "rank 1: no room")
    assert bench.check("ours", schedule(RIGHT)).status == "ok"


def test_rows_that_do_not_fit_at_once_name_a_capacity(bench: RemoteBench) -> None:
    bench.cell(24, "uniform")
    assert bench.check("unfused", schedule(RIGHT)).status == "ok"
    many = WorkerConfig(
        problem=replace(PAIR, num_topk=256), capacity=24, recipe=Recipe(), rank_mode="real"
    )
    crowded = RemoteBench(
        many,
        timeout_s=60.0,
        spawn=lambda config: spawn_real_ranks(config, factory=make_cpu_worker),
    )
    try:
        crowded.cell(24, "uniform")
        found = crowded.check("unfused", schedule(RIGHT))
    finally:
        crowded.close()
    assert found.status == "invalid"
    assert "have memory for 46 at --capacity 24: pass --capacity 128 or more" in found.reason


def test_a_phase_that_ends_a_rank_ends_all(bench: RemoteBench) -> None:
    bench.cell(16, "uniform")
    found = bench.check("unfused", schedule(DIES_ON_1))
    assert found.status == "launch_error"
    assert "rank 1: process ended during 'check' with exit code 9" in found.reason
    assert bench.check("unfused", schedule(RIGHT)).status == "ok"


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="num_ranks=2 with rank_mode='real' needs a GPU a rank"):
        make_real_bench_worker(CONFIG, 0, 1)


@pytest.mark.multi_gpu
def test_two_gpus_run_the_unfused_phases() -> None:
    """Ours and the phases of a small layer through check, timing and recheck on two GPUs."""
    from tl_megamoe.explorer.baselines.serve import spawn_bench_worker

    problem: Problem = replace(PAIR, hidden=512, intermediate=256, num_experts=8)
    rules = Rules(rounds=2, warm_up_ms=10.0, min_block_ms=5.0)
    config = WorkerConfig(
        problem=problem, capacity=1024, recipe=Recipe(), rank_mode="real", rules=rules
    )
    chosen = replace(default_schedule(problem, 512), stages=2, prefetch=4)
    bench = RemoteBench(config, control=chosen, spawn=spawn_bench_worker)
    try:
        bench.start()
        bench.cell(256, "uniform")
        for name in ("ours", "unfused"):
            checked = bench.check(name, chosen)
            assert checked.status == "ok", checked
        found = run_rounds(bench, ["ours", "unfused"], rules=rules)
        for name in ("ours", "unfused"):
            result = found[name]
            assert isinstance(result, Measurement), result
            assert len(result.ranks_us) == 2
            assert bench.recheck(name).status == "ok"
    finally:
        bench.close()
