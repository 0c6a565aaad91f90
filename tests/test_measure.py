"""What the search does about wrong results and lost processes, on scripted GPU processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tl_megamoe.explorer import measure as module
from tl_megamoe.explorer import real_ranks
from tl_megamoe.explorer.child import ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.measure import GpuUnusable, RemoteBench
from tl_megamoe.explorer.messages import CellInfo, CheckResult, WorkerConfig
from tl_megamoe.explorer.protocol import SCREEN_RULES, CandidateFailed
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

TINY = Problem(name="t", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
CONFIG = WorkerConfig(problem=TINY, capacity=16, recipe=Recipe())
WRONG = CheckResult("incorrect", "rel_error=2e-01", "relative error 2e-01 exceeds 6e-03")
DEFAULT = Schedule()
LOST = CheckResult("launch_error", "", "illegal address", context_lost=True)


class Scripted:
    """A GPU process: answers by method and first argument, in turn, else as a sound one does."""

    def __init__(self, script: dict[tuple[str, str], list[Any]]):
        self.script = script
        self.calls: list[tuple[Any, ...]] = []
        self.dead = False

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        assert not self.dead
        self.calls.append((method, *payload))
        answers = self.script.get((method, str(payload[0]) if payload else ""))
        if answers:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if method in ("check", "recheck"):
            return CheckResult("ok")
        return {"cell": CellInfo(4, 32), "describe": {"card": "0badcafe"}}.get(method, 1400.0)

    def kill(self) -> None:
        self.dead = True

    def did(self, method: str) -> list[Any]:
        return [call[1] for call in self.calls if call[0] == method]


def begin(
    script: dict[tuple[str, str], list[Any]], control: Schedule | None = DEFAULT
) -> tuple[RemoteBench, list[Scripted]]:
    started: list[Scripted] = []

    def spawn(config: WorkerConfig) -> Scripted:
        assert config is CONFIG
        started.append(Scripted(script))
        return started[-1]

    bench = RemoteBench(CONFIG, timeout_s=1.0, control=control, spawn=spawn)
    assert bench.start() == {"card": "0badcafe"}
    bench.cell(16, "uniform")
    return bench, started


@pytest.mark.parametrize("status", ["incorrect", "nondeterministic"])
@pytest.mark.parametrize("method", ["check", "recheck"])
def test_the_control_runs_after_a_wrong_result(method: str, status: str) -> None:
    bench, started = begin({(method, "bad"): [CheckResult(status, "", "off")]})
    assert bench.check("good", Schedule()).status == "ok"
    found = bench.check("bad", Schedule()) if method == "check" else None
    if found is None:
        bench.check("bad", Schedule())
        found = bench.recheck("bad")
    assert (found.status, found.reason) == (status, "off")
    assert "control" not in started[0].did("check")  # only when something else is to be measured
    bench.yardstick()
    bench.yardstick()
    assert started[0].did("check").count("control") == 1
    assert started[0].did("drop") == ["control"]
    assert len(started) == 1
    assert bench.recheck("good").status == "ok"
    assert started[0].did("check").count("good") == 1  # the process knows it still


@pytest.mark.parametrize(
    "control", [WRONG, LOST, ChildDied("exit code -9"), ChildError("RuntimeError", "broken")]
)
def test_a_process_that_fails_the_control_is_replaced(control: Any) -> None:
    bench, started = begin({("check", "bad"): [WRONG], ("check", "control"): [control]})
    bench.check("good", Schedule())
    assert bench.check("bad", Schedule()) == WRONG
    assert bench.recheck("good").status == "ok"
    assert [process.dead for process in started] == [True, False]
    assert started[1].did("check") == ["control", "good"]
    assert started[1].did("recheck") == ["good"]


@pytest.mark.parametrize("control", [WRONG, ChildDied("exit code -9")])
def test_a_control_that_fails_in_a_new_process_ends_the_search(control: Any) -> None:
    bench, started = begin({("check", "bad"): [WRONG], ("check", "control"): [control] * 2})
    assert bench.check("bad", Schedule()) == WRONG  # its row comes first
    with pytest.raises(GpuUnusable, match="relative error|exit code -9"):
        bench.check("next", Schedule())
    assert [process.dead for process in started] == [True, True]


def test_without_a_control_the_process_is_replaced() -> None:
    bench, started = begin({("check", "bad"): [WRONG]}, control=None)
    bench.check("bad", Schedule())
    assert bench.check("next", Schedule()).status == "ok"
    assert [process.dead for process in started] == [True, False]
    assert started[1].did("check") == ["next"]


def test_a_new_process_begins_the_same_cell() -> None:
    bench, started = begin({("check", "bad"): [LOST]})
    bench.cell(16, "zipf:1.2", 7, SCREEN_RULES)
    assert bench.check("bad", Schedule()) == LOST
    bench.check("good", Schedule())
    assert started[0].calls[-2] == ("cell", 16, "zipf:1.2", 7, SCREEN_RULES)
    assert started[1].calls[1] == ("cell", 16, "zipf:1.2", 7, SCREEN_RULES)
    bench.cell(32, "uniform")
    assert started[1].calls[-1] == ("cell", 32, "uniform", None, None)


def test_a_suspect_process_begins_the_next_cell_with_the_control() -> None:
    bench, started = begin({("check", "bad"): [WRONG], ("check", "control"): [WRONG]})
    bench.check("bad", Schedule())
    assert bench.cell(32, "uniform", 3) == CellInfo(4, 32)
    assert [process.dead for process in started] == [True, False]
    assert started[1].calls[1] == ("cell", 32, "uniform", 3, None)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("OutOfMemoryError", "oom"),
        ("MegaMoeTimeout", "timeout"),
        ("AcceleratorError", "launch_error"),
    ],
)
def test_what_a_worker_raises_while_it_times(kind: str, status: str) -> None:
    bench, started = begin({("block", "a"): [ChildError(kind, "rank 1 waits")]})
    bench.check("a", Schedule())
    with pytest.raises(CandidateFailed, match="rank 1 waits") as caught:
        bench.block("a")
    assert caught.value.status == status
    assert started[0].dead


@pytest.mark.parametrize(
    "begin_it", [lambda b: (b.close(), b.start()), lambda b: b.cell(16, "file:x")]
)
def test_a_broken_rule_is_told_as_it_is(begin_it: Callable[[RemoteBench], Any]) -> None:
    script: dict[tuple[str, str], list[Any]] = {}
    bench, _ = begin(script)
    error = ChildError("ValueError", "routing='file:x': there is no such file")
    script[("describe", "")] = script[("cell", "16")] = [error]
    with pytest.raises(ValueError, match="^routing='file:x': there is no such file$"):
        begin_it(bench)


def test_each_rank_with_a_gpu_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_ranks, "spawn_real_ranks", lambda config: ("ranks", config))
    monkeypatch.setattr(module, "Child", lambda factory, args: ("one", *args))
    pair = replace(CONFIG, problem=replace(TINY, num_ranks=2), rank_mode="real")
    assert module.spawn_worker(pair) == ("ranks", pair)
    virtual = replace(pair, rank_mode="virtual")
    assert module.spawn_worker(virtual) == ("one", virtual)


def test_a_yardstick_that_fails_is_no_candidate_s_fault() -> None:
    bench, started = begin({("yardstick", ""): [ChildError("OutOfMemoryError", "no room")]})
    assert bench.yardstick() > 0  # a new process reads it
    assert [process.dead for process in started] == [True, False]
    bench, started = begin({("yardstick", ""): [ChildTimeout("slow"), ChildTimeout("slow")]})
    with pytest.raises(GpuUnusable, match="the yardstick fails twice"):
        bench.yardstick()


def test_facts_are_those_of_the_process_that_runs_now() -> None:
    bench, _ = begin({("check", "bad"): [LOST]})
    before = bench.facts()
    assert before == bench.start()
    bench.check("bad", Schedule())
    bench.check("good", Schedule())
    assert set(bench.facts()) == set(before)
