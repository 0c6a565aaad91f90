"""The fuzzer: what it draws, planted faults that it finds and makes simple, short runs of it."""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator
from typing import Any

import fuzz_checks
import fuzz_layer
import host_block
import pytest
import torch
from fuzz_cases import (
    MOST,
    WEIGHT_LAWS,
    Case,
    draw_case,
    draw_kernel,
    draw_launch,
)
from fuzz_layer import (
    InPlace,
    Runner,
    Worker,
    cpu_cases,
    draw_kernels,
    fuzz,
    launches_of,
    main,
)
from fuzz_shrink import shrink, simpler, smaller

from tl_megamoe import layout, reference, scaling, validity
from tl_megamoe.device.walk import Task
from tl_megamoe.explorer.child import ChildDied, ChildError, ChildTimeout
from tl_megamoe.frozen import MATH_MODES
from tl_megamoe.rules import Violations
from tl_megamoe.schedule import Schedule, ScheduleError

# ---- what is drawn


def drawn(check: str, seed: int, number: int) -> list[Case]:
    return [draw_case(random.Random(f"{seed}:{n}"), check) for n in range(number)]


@pytest.mark.parametrize("check", MOST)
def test_a_line_reads_back(check: str, seed: int) -> None:
    for case in drawn(check, seed, 40):
        assert "\n" not in case.line
        assert Case.parse(case.line) == case


def test_lines_that_are_no_case() -> None:
    line = Case(check="walk").line
    with pytest.raises(ValueError, match="exactly the fields"):
        Case.parse(line.replace('"mask"', '"masks"'))
    with pytest.raises(ValueError, match="check='walks' must be one of layer, schedule"):
        Case.parse(line.replace('"walk"', '"walks"'))
    with pytest.raises(ScheduleError, match="missing"):
        Case.parse(line.replace('"stages": 4, ', ""))
    with pytest.raises(ValueError, match="Expecting value"):
        Case.parse("not JSON")


def test_a_seed_gives_the_same_cases(seed: int) -> None:
    first, again = (list(itertools.islice(cpu_cases(seed), 150)) for _ in range(2))
    assert first == again
    assert first[50:] != list(itertools.islice(cpu_cases(seed + 1), 50, 150))
    assert {case.check for case in first} == set(MOST) - {"layer", "lowers"}
    kernels = draw_kernels(seed, 4)
    assert kernels == draw_kernels(seed, 4)
    assert len({case.spec.key() for case in kernels}) == 4


def test_layers_cover_the_space_and_are_valid(seed: int) -> None:
    cases = [draw_launch(r, draw_kernel(r, "layer")) for r in map(random.Random, range(400))]
    for case in cases:
        assert case.is_valid
        assert not case.schedule.violations(case.problem, case.numeric)
        assert case.schedule.num_sms * case.num_ranks <= 132
        assert all(0 <= n <= case.capacity for n in case.tokens)
    assert {case.num_ranks for case in cases} == set(range(1, 9))
    assert {case.weights for case in cases} == set(WEIGHT_LAWS)
    assert {case.recipe for case in cases} == {"exact-128", "exact-64", "pow2-128", "pow2-64"}
    assert {case.schedule.math_mode for case in cases} == set(MATH_MODES)
    for name in ("block_m", "linear1_block_n", "linear2_block_n", "order"):
        assert len({getattr(case.schedule, name) for case in cases}) == 2, name
    assert {0, 1} <= {n for case in cases for n in case.tokens}
    assert any(n == case.capacity > 1000 for case in cases for n in case.tokens)
    assert max(case.hidden for case in cases) > 4096 > 512 > min(case.hidden for case in cases)


def test_launches_of_a_kernel_share_it(seed: int) -> None:
    kernels = draw_kernels(seed, 2)
    cases = list(itertools.islice(launches_of(kernels, seed), 60))
    turns = [kernels.index(k) for k in kernels for _ in range(20)] + [0] * 20
    for case, turn in zip(cases, turns, strict=True):
        assert case.spec.key() == kernels[turn].spec.key()
    assert len({case.seed for case in cases}) == 60
    assert len({case.schedule for case in cases}) > 10


def test_schedules_are_drawn_valid_and_not(seed: int) -> None:
    found = [c.schedule.violations(c.problem, c.numeric) for c in drawn("schedule", seed, 300)]
    assert 60 < sum(not f for f in found) < 240
    assert len({v.rule for f in found for v in f}) >= 10


# ---- shrinking


def test_smaller_numbers() -> None:
    assert smaller(1) == []
    assert smaller(2) == [1]
    assert smaller(10, 0) == [0, 5, 8, 9]
    assert smaller(512, 128, 128) == [128, 384]
    assert smaller(384, 128, 128) == [128, 256]


def test_simpler_cases_are_valid_and_other_cases(seed: int) -> None:
    for number in range(20):
        rng = random.Random(f"{seed}:{number}")
        case = draw_launch(rng, draw_kernel(rng, "layer"))
        others = list(simpler(case))
        assert case not in others
        for other in others:
            assert other.is_valid
            other.spec.schedule.check(other.problem, other.numeric)


def test_shrinking_keeps_what_fails_and_drops_the_rest(seed: int) -> None:
    """A fault of 37 tokens on the second rank with masked routes and a hidden size over 512."""

    def fails(case: Case) -> str:
        many = case.num_ranks > 1 and case.tokens[1] >= 37
        return "planted" if many and case.mask > 0 and case.hidden > 512 else ""

    rng = random.Random(seed)
    case = next(
        c for c in iter(lambda: draw_launch(rng, draw_kernel(rng, "layer")), None) if fails(c)
    )
    simplest, reason = shrink(case, "first", fails, tries=5000)
    assert fails(simplest) == "planted" == reason or simplest == case
    assert (simplest.num_ranks, simplest.tokens, simplest.hidden) == (2, (0, 37), 640)
    assert (simplest.num_experts, simplest.num_topk, simplest.intermediate) == (2, 1, 128)
    assert (simplest.capacity, simplest.mask, simplest.seed) == (37, case.mask, 0)
    assert (simplest.clamp, simplest.weights, simplest.routing) == (None, "softmax", "uniform")
    assert (simplest.schedule.num_sms, simplest.schedule.order) == (1, "wave")
    assert shrink(case, "first", fails, tries=0) == (case, "first")
    assert shrink(case, "first", lambda _: "", tries=5000) == (case, "first")


# ---- faults that are planted are found


def in_place() -> Runner:
    return Runner(lambda: InPlace(Worker()))


def lose_a_slot(rows: Any, pool: Any, num_tokens: int) -> torch.Tensor:
    """A combine that forgets the last slot of two."""
    return combine(rows * (pool.slot != 1)[:, None], pool, num_tokens)


combine = reference.combine


def test_a_wrong_reference_is_found_and_shrunk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "combine", lose_a_slot)
    said: list[str] = []
    monkeypatch.setattr(fuzz_layer, "MAX_SHRUNK", 2)
    cases = drawn("reference", seed, 40)
    summary = fuzz(cases, in_place(), seconds=600, say=said.append, shrink_seconds=600)
    assert summary.num_cases == 40  # a failure does not end the run
    assert len(summary.failures) > 2
    for case, reason in summary.failures[:2]:
        assert "is off by" in reason
        assert (case.num_topk, case.hidden, case.intermediate) == (2, 128, 128)
        assert (sum(case.tokens), case.mask, case.clamp) == (1, 0.0, None)
        assert (case.num_ranks, case.num_experts, case.x_scale) == (1, 1, 1.0)
    # What is printed is what fails, and it does not without the fault.
    assert said[1].startswith("  SHRUNK: ")
    printed = said[1].splitlines()[1]
    words = shlex.split(printed)
    assert words[:3] == ["python", "tests/fuzz_layer.py", "--reproduce"]
    case = Case.parse(words[3])
    assert case == summary.failures[0][0]
    assert in_place().fails(case)
    monkeypatch.undo()
    assert in_place().fails(case) == ""


def no_sigmoid(gate: torch.Tensor, up: torch.Tensor, clamp: float | None = None) -> torch.Tensor:
    return gate * up


def no_clamp(gate: torch.Tensor, up: torch.Tensor, clamp: float | None = None) -> torch.Tensor:
    return swiglu(gate, up)


swiglu = reference.swiglu


def skips_a_tile(*arguments: Any) -> Iterator[Task]:
    return itertools.islice(walk, 1, None) if (walk := real_walk(*arguments)) else walk


real_walk = fuzz_checks.walk


@pytest.mark.parametrize(
    ("check", "where", "name", "fault"),
    [
        ("reference", reference, "swiglu", no_sigmoid),
        ("reference", reference, "swiglu", no_clamp),
        ("reference", reference, "e4m3_scale", lambda amax, recipe: amax / 440),
        ("scaling", scaling, "to_e4m3", lambda x: (x * 0.93).to(scaling.E4M3)),
        ("scaling", scaling, "MIN_AMAX", 1e-3),
        ("schedule", validity, "problem_violations", lambda s, problem: Violations()),
        ("schedule", Schedule, "kernel_key", lambda self: self),
        ("layout", layout, "ALIGNMENT", 512),
        ("layout", layout, "GUARD_BYTES", 512),
        ("layout", layout, "num_pool_rows", lambda p, c: 128 * (p.num_ranks * c * p.num_topk)),
        ("walk", fuzz_checks, "walk", skips_a_tile),
        ("walk", fuzz_checks, "walk_order", lambda blocks, ring, lag, step: (lag, step)),
        ("launches", host_block, "walk_order", lambda blocks, ring, lag, step: (lag, step)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_faults_are_found(
    check: str, where: Any, name: str, fault: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, cases = in_place(), drawn(check, seed, 200)
    layout.make_layout.cache_clear()
    assert not any(runner.fails(case) for case in cases[:20])
    monkeypatch.setattr(where, name, fault)
    layout.make_layout.cache_clear()
    try:
        assert any(runner.fails(case) for case in cases)
    finally:
        layout.make_layout.cache_clear()


# ---- processes


class Dying:
    """A process that answers with what it is given, in turn."""

    def __init__(self, log: list[str], answers: Iterator[Any]) -> None:
        self.log, self.answers = log, answers
        log.append("spawn")

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        assert timeout_s in (fuzz_layer.BUILD_TIMEOUT_S, fuzz_layer.CASE_TIMEOUT_S)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None: ...

    def kill(self) -> None:
        self.log.append("kill")


def test_a_process_that_dies_is_a_failure_and_is_replaced() -> None:
    log: list[str] = []
    ok: tuple[str, list[str]] = ("", [])
    answers = iter(
        [None, ok, None, ChildTimeout("no answer"), None, ChildDied("exit code -9"), None, ok]
    )
    runner = Runner(lambda: Dying(log, answers))
    walk, layer = Case(check="walk"), Case(check="layer")
    assert [runner.fails(walk) for _ in range(4)] == [
        "",
        "ChildTimeout: no answer",
        "ChildDied: exit code -9",
        "",
    ]
    assert log == ["spawn", "kill", "spawn", "kill", "spawn"]
    runner.end()
    lost = ChildError("MegaMoeTimeout", "rank 0 waits")  # takes the CUDA context with it
    answers = iter([None, ("wrong", []), None, ("", ["wraps"]), None, lost, None, ok])
    log.clear()
    assert [runner.fails(layer) for _ in range(2)] == ["wrong", ""]
    assert runner.notes == ["wraps"]
    assert [runner.fails(layer) for _ in range(2)] == ["MegaMoeTimeout: rank 0 waits", ""]
    assert log == ["spawn", "kill", "spawn"]


# ---- command line and short runs


def test_a_short_run_without_a_gpu(seed: int) -> None:
    said: list[str] = []
    summary = fuzz(cpu_cases(seed, 0), Runner(), seconds=10, max_cases=100, say=said.append)
    assert not summary.failures, said
    assert summary.num_cases > 50
    assert {"schedule", "layout", "walk", "scaling"} <= set(summary.kinds["cases"])


def test_command_line(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz_layer, "Runner", in_place)
    monkeypatch.setattr(fuzz_layer, "num_sm90_sms", lambda: 0)
    assert main(["--cpu", "--cases", "30", "--seed", str(seed)]) == 0
    out = capsys.readouterr().out
    assert f"seed {seed}: 30 cases; 0 GPU launches; 0 kernels; cases: " in out
    assert "; 0 failures in " in out
    line = drawn("reference", seed, 1)[0].line
    assert main(["--reproduce", line]) == 0
    assert capsys.readouterr().out == "ok reference\n"
    assert main(["--reproduce", Case(check="layer").line]) == 2
    assert "needs an SM90 GPU" in capsys.readouterr().err
    monkeypatch.setattr(layout, "ALIGNMENT", 512)
    layout.make_layout.cache_clear()
    assert main(["--cases", "30", "--seed", str(seed), "--shrink-seconds", "1"]) == 1
    assert "FAILED layout: " in capsys.readouterr().out
    assert main(["--reproduce", drawn("layout", seed, 1)[0].line]) == 1
    layout.make_layout.cache_clear()
    with pytest.raises(SystemExit):
        main(["--kernels", "0"])
    assert "must be positive" in capsys.readouterr().err
