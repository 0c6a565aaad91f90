"""The timing loop on a fake card: interleaving, drift, failures, statistics."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tl_megamoe.explorer.protocol import (
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
        return Block(samples, GpuState(1500.0 + len(self.log), None, 650.0, 60.0))

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
        self._graphs = {}
        self._yardstick = None
        self._nvml = None
        self.replays: list[tuple[str, int, int]] = []

    def _capture(self, launch: object, launches: int) -> object:
        name = next((n for n, f in self.cell.items() if f is launch), "yardstick")
        return name, launches

    def _time(self, graph: tuple[str, int], count: int, meanwhile: object = None) -> list[float]:  # type: ignore[override]
        name, launches = graph
        self.replays.append((name, launches, count))
        if callable(meanwhile):
            meanwhile()
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
