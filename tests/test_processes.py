"""The GPU process of a search: deadlines, restarts, the control; and the child process itself."""

from __future__ import annotations

from typing import Any

import pytest
from fake_search import VIEW

from tl_megamoe.explorer.child import Child, ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.measure import GpuUnusable, RemoteBench
from tl_megamoe.explorer.messages import CellInfo, CheckResult, WorkerConfig
from tl_megamoe.explorer.protocol import Block, Measurement, run_rounds
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule


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

    config = WorkerConfig(problem=VIEW, capacity=512, recipe=Recipe())
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
    names = [call for call in started[1].calls if call[0] not in ("drop", "describe")]
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
    assert third.call("add", 1, timeout_s=60) == 1  # it runs: `close` waits 5 s for its end
    third.close()
    assert third._process.exitcode == 0
