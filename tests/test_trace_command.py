"""`tl-megamoe trace` with a fake compiler and GPU process; its worker, with fake kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fake_stamps import stamp_launch
from test_worker import GOOD, TINY, UNSTEADY, WRONG, FakeBench, FakeKernel, schedule

from tl_megamoe.device.plan import Plan
from tl_megamoe.device.trace import trace_shape
from tl_megamoe.explorer import trace_command as command
from tl_megamoe.explorer.child import ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.cli import main
from tl_megamoe.explorer.farm import BuildResult, Farm, classify
from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.explorer.protocol import Block
from tl_megamoe.explorer.trace import read_trace, wrong_tiles
from tl_megamoe.explorer.trace_worker import PROFILING, SHIPPED, Stamped, TraceWorker
from tl_megamoe.frozen import MATH_MODES
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

SIZES = "--hidden 512 --intermediate 256 --num-experts 8 --num-topk 2 --num-ranks 1".split()
ARGV = ["trace", *SIZES, "--tokens", "48", "--schedule", "default"]
RECEIVED = (16, 0, 40, 8, 0, 1, 30, 1)


class FakeWorker:
    """The GPU process: a launch that was made up, or what it raises."""

    def __init__(self, config: WorkerConfig, **changes: Any):
        self.config = config
        self.changes = changes
        self.calls: list[tuple[Any, ...]] = []
        self.killed = False

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        self.calls.append((method, *payload))
        if method == self.changes.get("fails_in"):
            raise self.changes["error"]
        if method == "cell":
            return None
        words = stamp_launch(
            self.config.problem, *payload, RECEIVED, events=self.changes.get("events", 100)
        )
        if self.changes.get("loses_a_tile"):
            words[0, 4, 4:, 3] = 0xC0000000
        return Stamped(words, RECEIVED, 100.0, 104.0, self.changes.get("same", True))

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeWorker]]:
    """Set up the fakes; returns the workers that were started."""

    def set_up(status: dict[bool, str] | None = None, **changes: Any) -> list[FakeWorker]:
        workers: list[FakeWorker] = []

        def spawn(config: WorkerConfig) -> FakeWorker:
            workers.append(FakeWorker(config, **changes))
            return workers[-1]

        def compiled(
            _: Farm, specs: list[KernelSpec], on_done: Any = None
        ) -> dict[KernelSpec, BuildResult]:
            return {
                spec.key(): built(spec, (status or {}).get(spec.profile, "ok")) for spec in specs
            }

        monkeypatch.setattr(command, "spawn", spawn)
        monkeypatch.setattr(Farm, "run", compiled)
        monkeypatch.setattr(command.doctor, "find_gpu", lambda: "NVIDIA H200")
        return workers

    return set_up


def built(spec: KernelSpec, status: str) -> BuildResult:
    if status == "compile_error":
        return BuildResult(status, None, "nvcc failed")
    return classify(spec, KernelReport(168, 64 * (status == "spilled"), 200_000, 8, (), "hash"))


def test_it_prints_and_writes(
    gpu: Callable[..., list[FakeWorker]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = gpu()
    out, summary = tmp_path / "t.json", tmp_path / "s.csv"
    argv = [*ARGV, "--out", str(out), "--summary", str(summary), "--routing", "zipf:1.2"]
    assert main([*argv, "--capacity", "64", "--seed", "5"]) == 0
    said = capsys.readouterr()
    assert "h512-i256-e8-k2, 48 tokens, zipf:1.2, recipe exact-128, pp-m64" in said.out
    assert f"shipped kernel        {100.0:9.1f} us" in said.out
    assert f"profiling build       {104.0:9.1f} us (+4.0%)" in said.out
    assert "K loop" in said.out
    assert "events; open it in ui.perfetto.dev" in said.err
    (worker,) = workers
    problem = worker.config.problem
    assert (worker.config.capacity, worker.config.seed) == (64, 5)
    assert worker.calls == [("cell", 48, "zipf:1.2"), ("trace", default_schedule(problem, 48))]
    assert worker.killed
    value = json.loads(out.read_text())
    assert value["otherData"]["profiling_us"] == 104.0
    assert any(event["name"] == "K loop" for event in value["traceEvents"])
    rows = pd.read_csv(summary)
    assert list(rows.columns) == ["table", "subject", "measure", "value"]
    assert (rows["measure"] == "tail_us").sum() == 1


def test_a_schedule_by_its_name(gpu: Callable[..., list[FakeWorker]]) -> None:
    workers = gpu()
    name = "m128-n256.256-s2-w8-d2l1-r40.232-f3-sm7-p4"
    assert main([*ARGV[:-1], name]) == 0
    assert workers[0].calls[1][1].name == name
    assert workers[0].config.capacity == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"same": False}, "the profiling build's result is not the shipped kernel's"),
        ({"events": 5}, "events did not fit and are missing: trace a launch of fewer tokens"),
        ({"loses_a_tile": True}, "math: 1 tiles were not traced exactly once"),
    ],
)
def test_a_defect_is_said_after_the_tables(
    changes: dict[str, Any],
    message: str,
    gpu: Callable[..., list[FakeWorker]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu(**changes)
    assert main(ARGV) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert "span of the launch" in said.out


@pytest.mark.parametrize(
    ("where", "error", "code", "message"),
    [
        ("trace", ChildTimeout("late"), 1, "no launch in 300 s; its process was killed"),
        ("trace", ChildDied("exit code -9"), 1, "the launch failed: exit code -9"),
        ("trace", ChildError("MegaMoeTimeout", "rank 0"), 1, "the launch failed: rank 0"),
        ("cell", ChildError("ValueError", "routing='x' cannot be"), 2, "routing='x' cannot be"),
    ],
)
def test_a_launch_that_fails(
    where: str,
    error: Exception,
    code: int,
    message: str,
    gpu: Callable[..., list[FakeWorker]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = gpu(fails_in=where, error=error)
    assert main(ARGV) == code
    said = capsys.readouterr()
    assert f"tl-megamoe: {message}" in said.err
    assert said.out == ""
    assert workers[0].killed


def test_what_the_compiler_says(
    gpu: Callable[..., list[FakeWorker]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu(status={True: "spilled"}) == []
    assert main(ARGV) == 0
    assert "profiling build: spilled: 64 bytes of register spills" in capsys.readouterr().err
    workers = gpu(status={False: "compile_error"})
    assert main(ARGV) == 1
    assert "shipped kernel: compile_error: nvcc failed" in capsys.readouterr().err
    assert main([*ARGV, "--compile-only"]) == 1
    assert workers == []


def test_it_compiles_without_a_gpu(
    gpu: Callable[..., list[FakeWorker]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = gpu()
    monkeypatch.setattr(command.doctor, "find_gpu", lambda: None)
    assert main(ARGV) == 2
    assert "trace runs a launch on an SM90 GPU, and there is none here" in capsys.readouterr().err
    assert main([*ARGV, "--compile-only"]) == 0
    frozen = [*ARGV[:-1], "frozen", "--compile-only"]
    assert main(frozen) == 2
    assert "--device nvidia-h200" in capsys.readouterr().err
    assert main([*frozen, "--device", "nvidia-h200"]) == 0
    assert workers == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "argument --tokens: '0' must be a positive integer"),
        (["--capacity", "47"], "--capacity 47 is below the 48 of --tokens"),
        (["--schedule", "m5"], "--schedule m5: not a schedule's name"),
        (["--routing", "zip"], "routing='zip' must be one of uniform"),
        (["--out", "/nowhere/t.json"], "/nowhere/t.json: there is no folder /nowhere to write"),
        (["--recipe", "pow3"], "argument --recipe: invalid choice: 'pow3'"),
        (["--timeout", "-1"], "argument --timeout: '-1' must be a positive number"),
    ],
)
def test_flags_that_are_wrong(
    words: list[str],
    message: str,
    gpu: Callable[..., list[FakeWorker]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = gpu()
    assert main([*ARGV, *words]) == 2
    assert message in capsys.readouterr().err
    assert workers == []


# ---- the worker


class FakeStampedKernel(FakeKernel):
    """A fake kernel of either build; the profiling one leaves the stamps of what it was given."""

    def launch(  # type: ignore[override]
        self,
        buffer: Any,
        weights: Any,
        y: torch.Tensor,
        n: int,
        s: Schedule,
        *,
        trace: torch.Tensor | None = None,
    ) -> None:
        assert (trace is not None) == self.spec.profile
        super().launch(buffer, weights, y, n, s)
        if trace is None:
            return
        if self.spec.schedule.dispatch_warps == BREAKS:
            y[0, 0] += 1
        counts = buffer.topk_idx[:n].flatten().bincount(minlength=buffer.problem.num_experts)
        words = stamp_launch(buffer.problem, s, counts.tolist(), events=30)
        trace.zero_()
        trace[:, :, :31] = torch.from_numpy(words.view("int32"))


class TimingBench(FakeBench):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def warm_up(self, name: str) -> None:
        self.log.append(f"warm {name}")
        super().warm_up(name)

    def block(self, name: str) -> Block:
        self.log.append(f"block {name}")
        super().block(name)
        return Block((30.0, 20.0, 25.0) if name == PROFILING else (10.0,))


BREAKS = 1
"""Dispatch warps with which the fake profiling build computes something else."""


def trace_worker() -> TraceWorker:
    config = WorkerConfig(problem=TINY, capacity=24, recipe=Recipe())
    bench: Any = TimingBench()
    compiled: Any = lambda spec: FakeStampedKernel(spec, [])  # noqa: E731
    return TraceWorker(config, device="cpu", compile_spec=compiled, bench=bench)


def test_a_worker_traces() -> None:
    worker = trace_worker()
    worker.cell(17, "uniform")
    chosen = replace(GOOD, num_sms=5)
    stamped = worker.trace(chosen)
    assert stamped.same
    assert (stamped.shipped_us, stamped.profiling_us) == (10.0, 25.0)
    bench: Any = worker.bench
    # The last launch is one of the profiling build's block.
    assert bench.log == [f"{w} {n}" for w in ("warm", "block") for n in (SHIPPED, PROFILING)]
    assert sum(stamped.received) == 34
    events = int(stamped.words[:, :, 0, 0].max())
    assert stamped.words.shape == (5, 6, events + 1, 4)
    assert events + 1 < trace_shape(5)[2]
    found = read_trace(stamped.words, TINY, chosen, 17, stamped.received)
    assert set(wrong_tiles(found).values()) == {0}


def test_a_worker_compares_the_builds() -> None:
    worker = trace_worker()
    worker.cell(17, "uniform")
    assert not worker.trace(replace(GOOD, dispatch_warps=BREAKS, num_sms=5)).same


@pytest.mark.parametrize(
    ("behaviour", "message"), [(WRONG, "incorrect: "), (UNSTEADY, "nondeterministic: 1 values")]
)
def test_a_worker_refuses_a_wrong_kernel(behaviour: int, message: str) -> None:
    worker = trace_worker()
    worker.cell(17, "uniform")
    with pytest.raises(RuntimeError, match=f"^{message}"):
        worker.trace(schedule(behaviour))


@pytest.mark.parametrize("mode", MATH_MODES)
def test_it_says_where_the_profiling_build_counts_otherwise(mode: str) -> None:
    """Of the two builds' own rule, at the last launch of few routes and the first of many."""
    chosen = default_schedule(TINY, 16, mode)  # type: ignore[arg-type]
    config = WorkerConfig(problem=TINY, capacity=512, recipe=Recipe())
    shipped, profiling = (
        Plan.make("fused", TINY, chosen, Recipe(), 512, False, True, False, profile=p).counts_few
        for p in (False, True)
    )
    assert shipped
    most = chosen.few_routes(TINY) // TINY.num_topk
    assert command.exchanges_few(chosen, config, most) == (shipped and not profiling)
    assert not command.exchanges_few(chosen, config, most + 1)
