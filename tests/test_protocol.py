"""The timing loop on a fake card: interleaving, drift, failures, statistics."""

from __future__ import annotations

import random
import sys
from collections import Counter
from statistics import median
from typing import Any

import pytest

from tl_megamoe.explorer import gpu_state
from tl_megamoe.explorer import protocol as module
from tl_megamoe.explorer.protocol import (
    SCREEN_RULES,
    Block,
    CandidateFailed,
    CudaBench,
    Failure,
    GpuState,
    Measurement,
    Rules,
    measure,
    percentile,
    run_rounds,
)


class FakeBench:
    """A card whose yardstick follows a script; candidates take fixed times with noise."""

    def __init__(self, times: dict[str, float], yardsticks: list[float] | None = None):
        self.times = times
        self.log: list[str] = []
        self._script = list(yardsticks or [])
        self._random = random.Random(0)
        self.fail_at: dict[str, int] = {}

    def warm_up(self, name: str) -> None:
        self.log.append(f"warm {name}")

    def block(self, name: str) -> Block:
        self.log.append(name)
        if self.log.count(name) == self.fail_at.get(name):
            raise CandidateFailed("timeout", "hangs")
        noise = self._random.uniform
        samples = tuple(self.times[name] * noise(0.99, 1.01) for _ in range(20))
        clock = 1500.0 + len(self.log)
        return Block(
            samples,
            GpuState(clock, None, 650.0, 60.0),
            GpuState(clock - 100.0, None, 700.0, 66.0),
        )

    def yardstick(self) -> float:
        self.log.append("yardstick")
        return self._script.pop(0) if self._script else 1300.0


def test_interleaves_with_a_yardstick_around_each_block() -> None:
    bench = FakeBench({"a": 100.0, "b": 200.0, "c": 300.0})
    found = run_rounds(bench, ["a", "b", "c"], seed=1)
    assert bench.log[0].startswith("warm ")
    assert bench.log[:3] == ["warm a", "warm b", "warm c"]  # nothing is captured later
    assert sum(entry.startswith("warm") for entry in bench.log) == 3
    assert bench.log[3::2] == ["yardstick"] * 10
    blocks = bench.log[4::2]
    rounds = [blocks[i : i + 3] for i in range(0, 9, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1  # random order
    for name, us in (("a", 100), ("b", 200), ("c", 300)):
        result = found[name]
        assert isinstance(result, Measurement)
        assert result.median_us == pytest.approx(us, rel=0.01)
        assert result.p10_us < result.median_us < result.p90_us
        assert result.num_samples == 60
        assert len(result.rounds_us) == 3
        assert result.yardstick_tflops == 1300.0
        assert result.drifted == 0
        assert result.state.mem_clock_mhz is None
        assert result.state.power_w == 650.0
        assert (result.end.power_w, result.end.temperature_c) == (700.0, 66.0)
        assert result.state.sm_clock_mhz == pytest.approx(result.end.sm_clock_mhz + 100.0)
        assert result.end.mem_clock_mhz is None
        assert result.ranks_us == ()


def test_the_order_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        bench = FakeBench(dict.fromkeys("abcdef", 100.0))
        run_rounds(bench, list("abcdef"), seed=seed)
        return bench.log

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_drifting_block_is_repeated() -> None:
    bench = FakeBench({"a": 100.0}, [1300.0, 1200.0, 1190.0, 1195.0, 1195.0])
    found = run_rounds(bench, ["a"])["a"]
    assert isinstance(found, Measurement)
    assert bench.log.count("a") == 4
    assert found.num_samples == 60  # the repeated block is not in it
    assert found.drifted == 0
    assert found.max_yardstick_tflops == 1195.0  # of a block: the mean of its two readings


def test_endless_drift_is_kept_and_told() -> None:
    bench = FakeBench({"a": 100.0}, [1000.0 * 1.1**n for n in range(20)])
    found = run_rounds(bench, ["a"], rules=Rules(max_repeats=2))["a"]
    assert isinstance(found, Measurement)
    assert bench.log.count("a") == 9
    assert found.drifted == 3


def test_a_failing_candidate_leaves_the_others() -> None:
    bench = FakeBench({"a": 100.0, "b": 200.0})
    bench.fail_at["b"] = 2
    found = run_rounds(bench, ["a", "b"])
    assert found["b"] == Failure("timeout", "hangs")
    assert isinstance(found["a"], Measurement)
    assert len(found["a"].rounds_us) == 3
    assert Counter(bench.log)["b"] == 2
    # The bench may have started anew: the card is warmed up again.
    assert sum(entry.startswith("warm") for entry in bench.log) == 3


def test_a_candidate_that_fails_the_warm_up() -> None:
    class Broken(FakeBench):
        def warm_up(self, name: str) -> None:
            if name == "b":
                raise CandidateFailed("launch_error", "no")

    for seed in range(4):
        found = run_rounds(Broken({"a": 100.0, "b": 1.0}), ["b"], seed=seed)
        assert found == {"b": Failure("launch_error", "no")}


def test_a_warm_bench_is_not_warmed_up_again() -> None:
    bench = FakeBench({"a": 100.0, "b": 200.0})
    found = run_rounds(bench, ["a", "b"], rules=SCREEN_RULES, warm_up=False)
    assert bench.log[0] == "yardstick"
    assert not any(entry.startswith("warm") for entry in bench.log)
    assert all(isinstance(m, Measurement) and len(m.rounds_us) == 1 for m in found.values())
    failing = FakeBench({"a": 100.0, "b": 200.0})
    failing.fail_at["b"] = 1
    run_rounds(failing, ["a", "b"], warm_up=False)  # a bench that may have started anew is cold
    assert failing.log.count("warm a") == 1


class RanksBench(FakeBench):
    """Ranks with a GPU each; whose is the slowest changes from block to block."""

    def __init__(self, ranks: list[list[float]]):
        super().__init__({})
        self.rounds = ranks

    def block(self, name: str) -> Block:
        times = self.rounds.pop(0)
        samples = [tuple(t + d for d in (-1.0, 0.0, 4.0)) for t in times]
        return Block(max(samples, key=median), ranks=tuple(samples))


def test_a_time_is_the_maximum_of_the_ranks_medians() -> None:
    # Rank 1 is the slowest overall and rank 0 in the second round.
    bench = RanksBench([[100.0, 110.0], [120.0, 112.0], [101.0, 114.0]])
    found = run_rounds(bench, ["a"])["a"]
    assert isinstance(found, Measurement)
    assert found.ranks_us == (104.0, 113.0)  # over all nine samples of each
    assert found.median_us == 113.0
    assert found.rounds_us == (110.0, 112.0, 114.0)
    assert found.num_samples == 9
    assert found.p90_us == pytest.approx(
        percentile([109, 110, 114, 111, 112, 116, 113, 114, 118], 0.9)
    )


def test_screening_is_shorter_and_judges_drift_alike() -> None:
    full = Rules()
    for name in ("rounds", "warm_up_ms", "min_samples", "min_block_ms", "max_repeats"):
        assert getattr(SCREEN_RULES, name) < getattr(full, name)
    assert SCREEN_RULES.max_drift == full.max_drift
    assert SCREEN_RULES.min_sample_ms == full.min_sample_ms


def test_measure_takes_foreign_kernels_and_another_bench() -> None:
    def launch(index: int) -> None:
        raise AssertionError("the bench launches")

    bench = FakeBench({"ours": 90.0, "theirs": 100.0})
    found = measure({"ours": launch, "theirs": launch}, bench=bench)
    assert set(found) == {"ours", "theirs"}
    assert run_rounds(bench, []) == {}


def test_percentile() -> None:
    assert percentile([3.0], 0.9) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0, 5.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.1) == pytest.approx(1.1)


class StubCudaBench(CudaBench):
    """CudaBench's own arithmetic, with replays that take a fixed time."""

    def __init__(self, us: dict[str, float]):
        self.us = us
        self.rules = Rules()
        self.cell = {name: (lambda i, n=name: None) for name in us}
        self.prepare = None
        self.agree = float
        self.meet = None
        self._graphs = {}
        self._yardstick = None
        self.replays: list[tuple[str, int, int]] = []

    def _capture(self, launch: object, launches: int) -> object:
        name = next((n for n, f in self.cell.items() if f is launch), "yardstick")
        return name, launches

    def _time(
        self, graph: tuple[str, int], count: int, states: list[GpuState] | None = None
    ) -> list[float]:
        name, launches = graph
        self.replays.append((name, launches, count))
        if states is not None:
            states += [GpuState(1700.0), GpuState(1500.0)]
        return [self.us[name] * launches * 1e-3] * count


@pytest.mark.parametrize("us", [2.0, 40.0, 99.0, 200.0, 2500.0, 30_000.0])
def test_a_block_is_long_enough(us: float) -> None:
    bench = StubCudaBench({"a": us})
    block = bench.block("a")
    name, launches, count = bench.replays[-1]
    assert launches % 3 == 0
    assert launches * us >= 300.0 * 0.999
    assert count >= 20
    assert count * launches * us >= 50_000.0
    assert block.samples_us == pytest.approx([us] * count)
    assert (block.state.sm_clock_mhz, block.end.sm_clock_mhz) == (1700.0, 1500.0)
    assert count * launches * us <= 2 * max(50_000.0, 20 * launches * us)
    bench.warm_up("a")
    assert bench.replays[-1][2] * launches * us >= 100_000.0


def test_a_graph_is_captured_once() -> None:
    bench = StubCudaBench({"a": 200.0})
    bench.block("a")
    first = dict(bench._graphs)
    bench.block("a")
    assert bench._graphs == first
    bench.forget("a")
    assert not bench._graphs


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_ranks_launch_as_often_as_the_slowest_of_them(slower: float) -> None:
    """Two ranks whose own times differ count by one number, so that no launch waits in vain."""
    replays: list[Any] = []
    met: list[str] = []
    for us in (40.0, 40.0 * slower):
        bench = StubCudaBench({"a": us})
        bench.agree = lambda ms, us=us: ms * 40.0 * slower / us  # the maximum over the ranks
        bench.meet = lambda: met.append("met")
        bench.warm_up("a")
        bench.block("a")
        replays.append(bench.replays)
    assert replays[0] == replays[1]
    assert len(met) == 2


class FakeCuda:
    """`torch.cuda` as far as `_time` needs it: replays take 2 ms of a clock of their own."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queued = 0

    class _Event:
        def __init__(self, cuda: FakeCuda) -> None:
            self.cuda = cuda
            self.at = 0

        def record(self) -> None:
            self.at = self.cuda.queued
            self.cuda.log.append(f"record {self.at}")

        def synchronize(self) -> None:
            self.cuda.log.append(f"wait {self.at}")

        def elapsed_time(self, other: Any) -> float:
            return 2.0 * (other.at - self.at)

    def Event(self, enable_timing: bool) -> _Event:  # noqa: N802 - torch's name
        assert enable_timing
        return self._Event(self)

    def synchronize(self, device: object) -> None:
        self.log.append("wait all")

    def replay(self) -> None:
        self.queued += 1


def test_the_card_is_read_at_the_start_and_near_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    bench = StubCudaBench({})
    bench._torch = type("Torch", (), {"cuda": cuda})
    bench._handle = None
    bench.device = None

    def read(handle: object) -> GpuState:
        cuda.log.append("read")
        return GpuState(float(len(cuda.log)))

    monkeypatch.setattr(module, "read_state", read)
    states: list[GpuState] = []
    times = CudaBench._time(bench, cuda, 20, states)
    assert times == [2.0] * 20
    first, last = cuda.log.index("read"), len(cuda.log) - cuda.log[::-1].index("read") - 1
    assert cuda.log[:first] == [f"record {n}" for n in range(1, 22)]  # one replay is not timed
    assert cuda.log[first:] == ["read", "wait 19", "read", "wait all"]
    assert [s.sm_clock_mhz for s in states] == [first + 1.0, last + 1.0]
    cuda.log.clear()
    assert CudaBench._time(bench, cuda, 3) == [2.0] * 3
    assert cuda.log == ["record 21", "record 22", "record 23", "record 24", "wait all"]


# ---- NVML


class FakeNvml:
    """Bindings of a host with one card, whose temperature cannot be read."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    uuid = "GPU-1b2c"

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVML's names

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self.uuid:
            raise RuntimeError("Not Found")
        return "card"

    def nvmlDeviceGetClockInfo(self, card: str, which: int) -> int:  # noqa: N802
        assert card == "card"
        return {1: 1755, 2: 3201}[which]

    def nvmlDeviceGetPowerUsage(self, card: str) -> int:  # noqa: N802
        return 651_500

    def nvmlDeviceGetTemperature(self, card: str, sensor: int) -> int:  # noqa: N802
        raise RuntimeError("Not Supported")

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65.06"


def test_readings_are_by_uuid_and_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    handle = gpu_state.open_handle("GPU-1b2c")
    assert gpu_state.read_state(handle) == GpuState(1755.0, 3201.0, 651.5, None)
    assert gpu_state.open_handle("GPU-other") is None
    assert gpu_state.read_state(None) == GpuState()
    assert gpu_state.driver_version() == "580.65.06"


def test_without_nvml_there_are_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state.open_handle("GPU-1b2c") is None
    assert gpu_state.driver_version() == ""


def test_a_card_has_an_anonymous_name() -> None:
    name = gpu_state.card_id("GPU-1b2c")
    assert len(name) == 8
    assert int(name, 16) >= 0
    assert name == gpu_state.card_id("GPU-1b2c") != gpu_state.card_id("GPU-1b2d")
    assert gpu_state.card_id("") == ""


def test_a_block_beside_a_throttled_card_is_repeated() -> None:
    """Both readings may be low, and agree: the readings before say what is usual."""

    class Throttled:
        def __init__(self) -> None:
            self.readings = [1300.0] * 10 + [1000.0, 1005.0] + [1290.0] * 50
            self.blocks = 0

        def warm_up(self, name: str) -> None: ...

        def block(self, name: str) -> Block:
            self.blocks += 1
            slow = self.readings[0] < 1100
            return Block((130.0 if slow else 100.0,) * 20)

        def yardstick(self) -> float:
            return self.readings.pop(0)

    bench, usual = Throttled(), list[float]()
    for _ in range(4):
        found = run_rounds(bench, ["a"], rules=Rules(max_repeats=3), readings=usual)["a"]
        assert isinstance(found, Measurement)
        assert (found.median_us, found.drifted) == (100.0, 0)
    assert bench.blocks > 12
    assert min(usual) == 1000.0  # it was seen, and its blocks were made again
