"""The GPU worker on the CPU: kernels that are right, wrong, unsteady or broken; rechecks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tl_megamoe import reference
from tl_megamoe.explorer.protocol import Block
from tl_megamoe.explorer.worker import STAGES, Worker, WorkerConfig, make_worker
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule
from tl_megamoe.weights import restore_weights

TINY = Problem(name="t", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
GOOD = default_schedule(TINY, 16)

# What the fake kernel does, by rows_in_flight.
RIGHT, WRONG, UNSTEADY, RAISES, NO_KERNEL, TIMES_OUT, NO_MEMORY, DRIFTS = 3, 4, 5, 6, 7, 8, 9, 10


def schedule(behaviour: int) -> Schedule:
    return replace(GOOD, rows_in_flight=behaviour)


class FakeKernel:
    """Computes the layer by the reference, in its fused form or in the last of the phases."""

    def __init__(self, spec: KernelSpec, log: list[tuple[str, int]]):
        self.spec = spec
        self.log = log
        self.launches = 0

    def launch(self, buffer: Any, weights: Any, y: torch.Tensor, n: int, s: Schedule) -> None:
        self.launches += 1
        behaviour = self.spec.schedule.rows_in_flight
        self.log.append((self.spec.phase, buffer.x.data_ptr()))
        if behaviour == RAISES:
            raise RuntimeError("CUDA error: misaligned address")
        if behaviour == NO_MEMORY:
            raise torch.cuda.OutOfMemoryError("no room")
        if behaviour == TIMES_OUT:
            buffer.report[:7] = torch.tensor([5, 0, 1, 2, 3, 4, 32])
            raise RuntimeError("CUDA error: illegal address")
        if self.spec.phase not in ("fused", "combine"):
            return
        inputs = [buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights]
        plain = restore_weights(weights)
        result = reference.moe(self.spec.problem, *[t[:n] for t in inputs], plain)
        if behaviour == WRONG:
            result[1] *= 1.5
        if behaviour == UNSTEADY or (behaviour == DRIFTS and self.launches > 2):
            result[0, 0] += result[0, 0].abs() * 0.01 * self.launches + 1e-3
        y.copy_(result)


class FakeBench:
    """Stands for CudaBench."""

    def __init__(self) -> None:
        self.cell: dict[str, Any] = {}
        self.prepare: Any = None

    def forget(self, name: str) -> None:
        self.cell.pop(name, None)

    def warm_up(self, name: str) -> None:
        self.cell[name](0)

    def block(self, name: str) -> Block:
        self.prepare(name)
        for index in range(3):
            self.cell[name](index)
        return Block((1.0,))

    def yardstick(self) -> float:
        return 1.0


def make(phase: str = "fused") -> tuple[Worker, list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []

    def compile_spec(spec: KernelSpec) -> Any:
        if spec.schedule.rows_in_flight == NO_KERNEL:
            raise RuntimeError("nvcc failed")
        return FakeKernel(spec, log)

    config = WorkerConfig(problem=TINY, capacity=24, recipe=Recipe(), phase=phase)
    bench: Any = FakeBench()
    return Worker(config, device="cpu", compile_spec=compile_spec, bench=bench), log


@pytest.mark.parametrize("phase", ["fused", "linear1"])
def test_statuses(phase: str) -> None:
    worker, _ = make(phase)
    info = worker.cell(17, "uniform")
    assert (info.touched, info.pairs) == (4, 34)
    expected = {
        RIGHT: ("ok", ""),
        WRONG: ("incorrect", "token 1 has relative error"),
        UNSTEADY: ("nondeterministic", "1 values differ between two launches"),
        RAISES: ("launch_error", "misaligned address"),
        NO_KERNEL: ("compile_error", "nvcc failed"),
        TIMES_OUT: ("timeout", "pool block 3 waits for linear1"),
        NO_MEMORY: ("oom", "no room"),
    }
    for behaviour, (status, reason) in expected.items():
        for buffer in worker.buffers:
            buffer.report.zero_()
        found = worker.check(f"c{behaviour}", schedule(behaviour))
        assert (found.status, found.context_lost) == (status, False), found
        assert reason in found.reason
        if status in ("ok", "incorrect", "nondeterministic"):
            assert "rel_error=" in found.observation
    assert set(worker.bench.cell) == {f"c{RIGHT}"}
    assert set(worker.results) == {f"c{RIGHT}"}


def test_three_sets_share_a_routing_and_nothing_else() -> None:
    worker, log = make()
    worker.cell(16, "zipf:1.2")
    a, b, c = worker.buffers
    assert torch.equal(a.topk_idx[:16], b.topk_idx[:16])
    assert torch.equal(a.topk_weights[:16], c.topk_weights[:16])
    for first, second in ((a, b), (b, c), (a, c)):
        assert not torch.equal(first.x.view(torch.uint8), second.x.view(torch.uint8))
    codes = [w.l1[0].view(torch.uint8) for w in worker.weights]
    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[1], codes[2])
    worker.check("a", schedule(RIGHT))
    log.clear()
    worker.block("a")
    assert log == [("fused", buffer.x.data_ptr()) for buffer in worker.buffers]


def test_recheck_sees_a_result_that_moved() -> None:
    worker, _ = make()
    worker.cell(16, "uniform")
    for name, behaviour in (("right", RIGHT), ("drifts", DRIFTS)):
        assert worker.check(name, schedule(behaviour)).status == "ok"
    for index in (1, 2):  # as the timed launches of any candidate do
        worker._run_once("right", index)
    assert worker.recheck("right").status == "ok"
    found = worker.recheck("drifts")
    assert found.status == "nondeterministic"
    assert "differ after timing" in found.reason
    assert set(worker.results) == {"right"}


def test_a_phase_is_fed_by_the_others_and_timed_alone() -> None:
    worker, log = make("linear2")
    worker.cell(16, "uniform")
    assert worker.check("a", schedule(RIGHT)).status == "ok"
    assert [phase for phase, _ in log] == list(STAGES) * 2
    log.clear()
    worker.block("a")
    assert [phase for phase, _ in log] == list(STAGES) * 3 + ["linear2"] * 3
    assert len({address for _, address in log[-3:]}) == 3


def test_a_new_cell_forgets_the_old_one() -> None:
    worker, _ = make()
    worker.cell(16, "uniform")
    worker.check("a", schedule(RIGHT))
    worker.cell(5, "uniform")
    assert not worker.bench.cell
    assert not worker.kernels
    assert worker.outputs[0].shape == (5, 256)
    assert worker.check("a", schedule(RIGHT)).status == "ok"


@pytest.mark.sm90
def test_a_real_worker_checks_and_times() -> None:
    """The default schedule of a small layer through check, timing and recheck on the GPU."""
    from tl_megamoe.explorer.protocol import Measurement, Rules, run_rounds

    problem = replace(TINY, hidden=512, intermediate=256, num_experts=8)
    rules = Rules(rounds=2, warm_up_ms=10.0, min_block_ms=5.0)
    worker = make_worker(WorkerConfig(problem=problem, capacity=1024, recipe=Recipe(), rules=rules))
    info = worker.cell(512, "uniform")
    assert (info.touched, info.pairs) == (8, 1024)
    chosen = default_schedule(problem, 512)
    chosen = replace(chosen, stages=2, prefetch=4)  # a kernel that the other sm90 tests build
    assert worker.check("a", chosen).status == "ok"
    found = run_rounds(worker, ["a"], rules=rules)["a"]
    assert isinstance(found, Measurement)
    assert 1.0 < found.median_us < 1000.0
    assert 300.0 < found.yardstick_tflops < 2500.0
    assert worker.recheck("a").status == "ok"
    assert not worker.context_lost()
