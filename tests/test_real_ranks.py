"""Ranks with a GPU each, driven as one: what is merged, who is named, and two processes on the CPU.

The kernels of the CPU ranks meet in every launch, as real ones do: a rank that launches once more
than its peer, or another kernel, fails or hangs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from tl_megamoe import reference
from tl_megamoe.explorer.child import ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.gpu_state import card_id
from tl_megamoe.explorer.measure import RemoteBench
from tl_megamoe.explorer.messages import CellInfo, CheckResult, WorkerConfig, merge_checks
from tl_megamoe.explorer.protocol import (
    Block,
    CudaBench,
    Failure,
    GpuState,
    Measurement,
    Rules,
    run_rounds,
)
from tl_megamoe.explorer.ranks import RealRanks, exchange
from tl_megamoe.explorer.real_ranks import (
    RankChild,
    RealRanksProcess,
    join_job,
    make_real_worker,
    spawn_real_ranks,
)
from tl_megamoe.explorer.worker import Worker
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule
from tl_megamoe.virtual import VirtualGroup
from tl_megamoe.weights import PlainWeights, restore_weights

PAIR = Problem(name="t", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=2)


# ---- merging, on fake children


class FakeChild(RankChild):
    """Answers from a thread: `answers[method]` is a value, an exception, seconds, or `death`."""

    def __init__(self, answers: dict[str, Any]):
        self.answers = answers
        self._connection, self._theirs = Pipe()
        self.killed = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                method, _ = self._theirs.recv()
                answer = self.answers.get(method)
                if answer == "death":
                    self._theirs.close()
                    return
                if answer == "hang":
                    continue
                if isinstance(answer, ChildError):
                    self._theirs.send(("error", answer.kind, str(answer)))
                else:
                    self._theirs.send(("ok", answer))
        except (EOFError, OSError):
            return

    def exit_code(self) -> int | None:
        return 7

    def kill(self) -> None:
        self.killed = True
        self._connection.close()


def fake_ranks(*answers: Any, method: str = "work") -> RealRanksProcess:
    return RealRanksProcess([FakeChild({method: a}) for a in answers], grace_s=0.2)


def ask(*answers: Any, method: str = "work", timeout_s: float = 20.0) -> Any:
    return fake_ranks(*answers, method=method).call(method, timeout_s=timeout_s)


def test_a_block_is_that_of_the_slowest_rank() -> None:
    fast = Block((100.0, 100.0, 400.0), GpuState(1700.0), GpuState(1600.0))
    slow = Block((110.0, 120.0, 115.0), GpuState(1500.0), GpuState(1400.0))
    for order in ((fast, slow), (slow, fast)):
        found = ask(*order)
        assert found == replace(slow, ranks=tuple(block.samples_us for block in order))


def test_cells_yardsticks_and_names_are_merged() -> None:
    assert ask(CellInfo(3, 40, 9, 3, 40), CellInfo(4, 24, 11, 4, 24)) == CellInfo(7, 64, 11, 4, 40)
    assert ask(1300.0, 1400.0, method="yardstick") == 1350.0
    assert ask(None, None) is None
    names = {"device": "NVIDIA H200", "torch": "2.9.0", "driver": "580.65"}
    cards = [{**names, "card": card_id(uuid)} for uuid in ("GPU-a", "GPU-b")]
    merged = ask(*cards, method="describe")
    assert {k: merged[k] for k in names} == names
    assert len(merged["card"]) == 8
    assert merged["card"] not in {card["card"] for card in cards}
    assert ask(*reversed(cards), method="describe")["card"] != merged["card"]
    assert ask(cards[0], {**cards[1], "card": ""}, method="describe")["card"] == ""
    with pytest.raises(ValueError, match="rank 0: NVIDIA H200, rank 1: NVIDIA H100"):
        ask(cards[0], {**cards[1], "device": "NVIDIA H100"}, method="describe")


OK = CheckResult("ok", "rel_error=2.0e-03", rel_error=2e-3)
FAR = CheckResult("ok", "rel_error=3.0e-03", rel_error=3e-3)
WRONG = CheckResult("incorrect", "rel_error=2.0e-01", "token 3 is off", rel_error=0.2)
UNSTEADY = CheckResult("nondeterministic", "", "5 values differ")
LATE = CheckResult("timeout", "", "rank 1 has not arrived", context_lost=True)
BROKEN = CheckResult("launch_error", "", "illegal address", context_lost=True)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([OK, OK], OK),
        ([OK, FAR], FAR),  # how far off is that of the rank that is farthest
        ([WRONG, WRONG], WRONG),  # workers that have merged already
        ([OK, WRONG, UNSTEADY], replace(WRONG, reason="rank 1: token 3 is off")),
        ([UNSTEADY, OK], replace(UNSTEADY, reason="rank 0: 5 values differ")),
        ([LATE, BROKEN], replace(BROKEN, reason="rank 1: illegal address")),  # the cause
        (
            [replace(OK, context_lost=True), WRONG],
            replace(WRONG, reason="rank 1: token 3 is off", context_lost=True),
        ),
    ],
)
def test_the_worst_rank_decides_a_check(results: list[CheckResult], expected: CheckResult) -> None:
    assert merge_checks(results) == expected
    assert ask(*results) == expected


def test_a_rank_that_is_late_ends_all() -> None:
    ranks = fake_ranks(1.0, "hang", 1.0, "hang")
    with pytest.raises(ChildTimeout, match="ranks 1, 3 gave no answer to 'work' in 0.1 s"):
        ranks.call("work", timeout_s=0.1)
    assert all(child.killed for child in ranks._children)


def test_a_rank_that_dies_ends_all() -> None:
    ranks = fake_ranks("hang", "death")
    with pytest.raises(ChildDied, match="rank 1: process ended during 'work' with exit code 7"):
        ranks.call("work", timeout_s=20.0)
    assert all(child.killed for child in ranks._children)
    with pytest.raises(ChildDied, match="rank 0"):
        ranks.call("work", timeout_s=20.0)


def test_an_error_of_a_rank_is_not_waited_out() -> None:
    ranks = fake_ranks("hang", ChildError("OutOfMemoryError", "no room"))
    start = time.monotonic()
    with pytest.raises(ChildError, match="^rank 1: no room$") as caught:
        ranks.call("work", timeout_s=60.0)
    assert caught.value.kind == "OutOfMemoryError"
    assert time.monotonic() - start < 10
    assert all(child.killed for child in ranks._children)


def test_the_rank_that_failed_itself_is_named() -> None:
    heard = ChildError("RankFailed", "rank 1: ValueError: too few GPUs")
    ranks = fake_ranks(heard, ChildError("ValueError", "too few GPUs"))
    with pytest.raises(ChildError, match="^rank 1: too few GPUs$") as caught:
        ranks.call("work", timeout_s=20.0)
    assert caught.value.kind == "ValueError"
    assert not any(child.killed for child in ranks._children)


# ---- two processes on the CPU

RIGHT, WRONG_ON_1, RAISES_ON_1, NO_KERNEL_ON_1, DRIFTS_ON_1, DIES_ON_1 = 3, 4, 5, 6, 7, 8
RULES = Rules(rounds=2, warm_up_ms=2.0, min_samples=3, min_block_ms=1.0, min_sample_ms=1.0)
TIMES_US = (100.0, 150.0)
"""Of a launch on each rank, by its own clock: four, or three, launches reach a sample's 1 ms."""


def schedule(behaviour: int) -> Schedule:
    return replace(default_schedule(PAIR, 16), rows_in_flight=behaviour)


class MeetingKernel:
    """One rank of the layer, by the reference; every launch meets the same launch of the peer.

    The layer in its fused form, or in the last of the phases.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.launches = 0

    def launch(self, buffer: Any, weights: Any, y: torch.Tensor, n: int, s: Schedule) -> None:
        behaviour = s.rows_in_flight
        self.launches += 1
        own = restore_weights(weights)  # as bytes: float8 does not travel
        parts = (own.l1.view(torch.uint8), own.l1_sf, own.l2.view(torch.uint8), own.l2_sf)
        every = exchange(((behaviour, self.spec.phase), self.launches, parts))
        assert len({ticket[:2] for ticket in every}) == 1, "the ranks run different launches"
        if self.spec.phase not in ("fused", "combine"):
            return
        l1, l1_sf, l2, l2_sf = (
            torch.cat(part) for part in zip(*(e[2] for e in every), strict=True)
        )
        plain = PlainWeights(l1.view(own.l1.dtype), l1_sf, l2.view(own.l2.dtype), l2_sf)
        inputs = [t[:n] for t in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)]
        y.copy_(reference.moe(self.spec.problem, *inputs, plain, self.spec.recipe))
        if buffer.rank == 1:
            if behaviour == WRONG_ON_1:
                y[2] *= 1.5
            if behaviour == RAISES_ON_1:
                raise RuntimeError("CUDA error: misaligned address")
            if behaviour == DIES_ON_1:
                os._exit(9)
            if behaviour == DRIFTS_ON_1 and self.launches > 2:
                y[0, 0] += 1.0


class CpuBench(CudaBench):
    """CudaBench's own counting, with a clock that each rank has of its own."""

    def __init__(self, rank: int):
        self.rank = rank
        self.cell = {}
        self.rules = RULES
        self._graphs = {}
        self.counts: list[int] = []

    def _capture(self, launch: Callable[[int], None], launches: int) -> Any:
        assert self.meet is not None
        self.meet()
        return launch, launches

    def _time(self, graph: Any, count: int, states: list[GpuState] | None = None) -> list[float]:
        launch, launches = graph
        for n in range(count * launches):
            launch(n % 3)
        if states is not None:
            states += [GpuState(power_w=600.0 + self.rank), GpuState(power_w=700.0 + self.rank)]
        return [1e-3 * TIMES_US[self.rank] * launches] * count

    def yardstick(self) -> float:
        return 1300.0 + 100.0 * self.rank


def cpu_sets(config: WorkerConfig, device: str) -> list[Any]:
    import torch.distributed as dist

    rank, group = dist.get_rank(), VirtualGroup(2, "cpu")
    every = [group.buffers(config.problem, config.capacity) for _ in range(3)]
    return [RealRanks(config.problem, {rank: buffers[rank]}) for buffers in every]


def make_cpu_worker(config: WorkerConfig, rank: int, port: int) -> Worker:
    join_job(rank, 2, port, "gloo")

    def compile_spec(spec: KernelSpec) -> Any:
        if spec.schedule.rows_in_flight == NO_KERNEL_ON_1 and rank == 1:
            raise RuntimeError("nvcc failed")
        return MeetingKernel(spec)

    options: dict[str, Any] = {"compile_spec": compile_spec, "bench": CpuBench(rank)}
    return Worker(config, device="cpu", open_sets=cpu_sets, **options)


CONFIG = WorkerConfig(
    problem=PAIR, capacity=24, recipe=Recipe(), rank_mode="real", rules=RULES, seed=2
)


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


def test_two_ranks_are_checked_and_timed_as_one(bench: RemoteBench) -> None:
    assert bench.start() == {"device": "cpu", "torch": torch.__version__, "card": "", "driver": ""}
    info = bench.cell(17, "uniform")
    # What one process sees that holds both ranks.
    whole = Worker(
        replace(CONFIG, rank_mode="virtual"),
        device="cpu",
        bench=CpuBench(0),
        open_sets=lambda config, device: [
            _Together(PAIR, dict(enumerate(VirtualGroup(2, "cpu").buffers(PAIR, 24))))
            for _ in range(3)
        ],
    )
    assert info == whole.cell(17, "uniform")
    assert (info.touched, info.pairs) == (4, 68)
    assert bench.check("a", schedule(RIGHT)).status == "ok"
    assert bench.check("b", replace(schedule(RIGHT), prefetch=0)).status == "ok"
    found = run_rounds(bench, ["a", "b"], rules=RULES)
    for name in ("a", "b"):
        result = found[name]
        assert isinstance(result, Measurement), result
        # Three launches a sample on both ranks, although rank 0 alone would take six or four.
        assert result.ranks_us == pytest.approx(TIMES_US)
        assert result.median_us == pytest.approx(150.0)
        assert result.yardstick_tflops == 1350.0
        assert (result.state.power_w, result.end.power_w) == (601.0, 701.0)
        assert result.num_samples == 2 * 3
        assert bench.recheck(name).status == "ok"


class _Together(RealRanks):
    """Both ranks in this process, which needs no exchange."""

    def gather(self, values: Any) -> list[Any]:
        return [values[rank] for rank in range(self.num_ranks)]

    def barrier(self) -> None: ...


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        (WRONG_ON_1, "incorrect", "token 2 has relative error"),
        (RAISES_ON_1, "launch_error", "RuntimeError: CUDA error: misaligned address"),
        (NO_KERNEL_ON_1, "compile_error", "nvcc failed"),
    ],
)
def test_what_one_rank_does_wrong_all_know(
    bench: RemoteBench, behaviour: int, status: str, reason: str
) -> None:
    all_know(bench, ("bad", "good"), behaviour, status, reason)


def all_know(
    bench: RemoteBench, names: tuple[str, str], behaviour: int, status: str, reason: str
) -> None:
    """What rank 1 does wrong under the first name is told; the second is right after it."""
    bad, good = names
    bench.cell(16, "uniform", 5)
    found = bench.check(bad, schedule(behaviour))
    assert (found.status, found.context_lost) == (status, False), found
    assert found.reason.startswith("rank 1: ")
    assert reason in found.reason
    assert bench.check(good, schedule(RIGHT)).status == "ok"  # they are in step
    assert bench.recheck(good).status == "ok"


def test_a_result_that_moves_on_one_rank(bench: RemoteBench) -> None:
    bench.cell(16, "uniform")
    assert bench.check("drifts", schedule(DRIFTS_ON_1)).status == "ok"
    assert bench.check("good", schedule(RIGHT)).status == "ok"
    found = bench.recheck("drifts")
    assert found.status == "nondeterministic"
    assert found.reason == "rank 1: 1 values of set 0 differ after timing"
    assert bench.recheck("good").status == "ok"


def test_a_rank_that_dies_is_replaced_with_its_peer(bench: RemoteBench) -> None:
    bench.cell(16, "uniform")
    assert bench.check("good", schedule(RIGHT)).status == "ok"
    found = bench.check("dies", schedule(DIES_ON_1))
    assert found.status == "launch_error"
    assert "rank 1: process ended during 'check' with exit code 9" in found.reason
    timed = run_rounds(bench, ["good"], rules=replace(RULES, rounds=1))["good"]
    assert not isinstance(timed, Failure)
    assert timed.ranks_us == pytest.approx(TIMES_US)


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="num_ranks=2 with rank_mode='real' needs a GPU a rank"):
        make_real_worker(CONFIG, 0, 1)


@pytest.mark.multi_gpu
def test_two_gpus_are_checked_and_timed_as_one() -> None:
    """The default schedule of a small layer through check, timing and recheck on two GPUs."""
    problem = replace(PAIR, hidden=512, intermediate=256, num_experts=8)
    rules = Rules(rounds=2, warm_up_ms=10.0, min_block_ms=5.0)
    config = WorkerConfig(
        problem=problem, capacity=1024, recipe=Recipe(), rank_mode="real", rules=rules
    )
    chosen = replace(default_schedule(problem, 512), stages=2, prefetch=4)
    bench = RemoteBench(config, control=chosen)
    try:
        assert len(bench.start()["card"]) == 8
        info = bench.cell(512, "uniform")
        assert (info.touched, info.pairs, info.max_touched) == (8, 2048, 4)
        checked = bench.check("a", chosen)
        assert checked.status == "ok", checked
        found = run_rounds(bench, ["a"], rules=rules)["a"]
        assert isinstance(found, Measurement), found
        assert len(found.ranks_us) == 2
        assert found.median_us == max(found.ranks_us)
        # A launch of a rank ends when its peer has sent its rows: they take the same time.
        assert found.ranks_us[0] == pytest.approx(found.ranks_us[1], rel=0.1)
        assert bench.recheck("a").status == "ok"
    finally:
        bench.close()
