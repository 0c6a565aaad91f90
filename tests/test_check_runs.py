"""`tl-megamoe check` around its checks: processes and limits, the table, the command line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from check_layers import ALL_CHECKS, ONE, make, schedule_of

from tl_megamoe.explorer import check, checker, cli
from tl_megamoe.explorer.checker import Case, CheckConfig, Row
from tl_megamoe.explorer.checks import PHASE_CHECKS
from tl_megamoe.explorer.child import SETUP_TIMEOUT_S, ChildDied, ChildError, ChildTimeout
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.schedule import Schedule

# ---- processes and limits

CONFIG = CheckConfig(problem=ONE, rank_mode="one", capacity=64)
SCHEDULE = schedule_of("combine", ONE)


def cases_of(**phases: int) -> dict[str, list[Case]]:
    return {
        phase: [Case(phase, phase, SCHEDULE, (n,)) for n in range(count)]
        for phase, count in phases.items()
    }


def good(case: Case) -> Row:
    return Row((case.check, "", str(case.tokens[0]), "", "1 one", "0", "0", "ok"))


class FakeProcess:
    """A child whose answers are scripted by (phase, tokens)."""

    started = 0

    def __init__(self, script: dict[tuple[str, int], Any], log: list[str]) -> None:
        self.script, self.log = script, log
        log.append("start")

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        if method == "ready":
            assert timeout_s == SETUP_TIMEOUT_S
            return True
        assert timeout_s == 7.0
        case: Case = payload[0]
        self.log.append(f"{case.phase}{case.tokens[0]}")
        answer = self.script.get((case.phase, case.tokens[0]), good(case))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.log.append("close")

    def kill(self) -> None:
        self.log.append("kill")


def run(script: dict[tuple[str, int], Any], **phases: int) -> tuple[list[Row], list[str]]:
    log: list[str] = []
    rows = checker.run_in_children(
        CONFIG, cases_of(**phases), 7.0, spawn=lambda config: FakeProcess(script, log)
    )
    return list(rows), log


def test_each_phase_has_a_process_of_its_own() -> None:
    rows, log = run({}, dispatch=2, combine=1)
    assert [row.status for row in rows] == ["ok"] * 3
    assert log == ["start", "dispatch0", "dispatch1", "close", "start", "combine0", "close"]


def test_a_lost_process_costs_its_check() -> None:
    lost = checker.blank_row(CONFIG, cases_of(combine=1)["combine"][0], "timeout", "x" * 2000)
    script = {
        ("dispatch", 0): ChildTimeout("no answer to 'run' in 7 s"),
        ("dispatch", 1): ChildDied("process ended"),
        ("linear1", 0): ChildError("ValueError", "no"),
        ("combine", 0): replace(lost, context_lost=True),
    }
    rows, log = run(script, dispatch=3, linear1=1, combine=2)
    assert [row.status for row in rows] == ["timeout", "error", "ok", "error", "timeout", "ok"]
    assert rows[0].reason == "no answer to 'run' in 7 s"
    assert rows[0].cells[:5] == ("dispatch", "pingpong n256.256", "0", "64", "1 one")
    assert len(rows[4].reason) == 1000
    assert log.count("start") == 6
    assert log.count("kill") == 4


def test_a_phase_that_loses_every_process_is_given_up() -> None:
    script = {("fused", n): ChildDied("process ended") for n in range(9)}
    rows, log = run(script, fused=9, combine=1)
    assert [row.status for row in rows] == ["error"] * 3 + ["skipped"] * 6 + ["ok"]
    assert rows[3].reason == "3 processes were lost before it"
    assert log.count("start") == 4
    assert len(check.failed(rows)) == 3


class Clumsy:
    """A checker that a real child process holds."""

    def __init__(self, config: CheckConfig) -> None:
        self.config = config

    def ready(self) -> bool:
        return True

    def run(self, case: Case) -> Row:
        if case.tokens[0] == 1:
            time.sleep(60)
        if case.tokens[0] == 2:
            raise ValueError("no such thing")
        return good(case)


def test_real_children_and_a_real_limit() -> None:
    from tl_megamoe.explorer.child import Child

    rows = list(
        checker.run_in_children(
            CONFIG, cases_of(fused=4), 1.5, spawn=lambda config: Child(Clumsy, (config,))
        )
    )
    assert [row.status for row in rows] == ["ok", "timeout", "error", "ok"]
    assert rows[2].reason == "no such thing"


def test_a_checker_turns_failures_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_megamoe.buffer import MegaMoeTimeout
    from tl_megamoe.explorer.ranks import RankFailed

    checks = PHASE_CHECKS["combine"]
    served = checker.Checker.__new__(checker.Checker)
    served.config, served.layer, served._filled = CONFIG, make(ONE), None
    served.layer.ranks.first.workspace.fill_(7)  # as a broken check before might leave it
    case = Case("combine", "combine", SCHEDULE, (9,))
    assert served.run(case).cells == (
        "combine", "pingpong n256.256", "9", "64", "1 one", "bitwise", "bitwise", "ok",
    )  # fmt: skip
    for error, status, text in (
        (MegaMoeTimeout("rank 1 has not\narrived"), "timeout", "rank 1 has not arrived"),
        (RankFailed("MegaMoeTimeout", "rank 1: stuck"), "timeout", "rank 1: stuck"),
        (RankFailed("ValueError", "rank 1: no"), "error", "rank 1: no"),
        (RuntimeError("CUDA error"), "error", "RuntimeError: CUDA error"),
    ):

        def fails(layer: Layer, schedule: Schedule, error: Exception = error) -> Any:
            raise error

        monkeypatch.setitem(checks, "combine", fails)
        row = served.run(case)
        assert (row.status, row.reason, row.context_lost) == (status, text, True)


class InPlace:
    """A checker of a torchrun process."""

    def __init__(self, bad: int, slow: int = -1) -> None:
        self.bad, self.slow = bad, slow

    def run(self, case: Case) -> Row:
        if case.tokens[0] == self.slow:
            time.sleep(0.5)
        if case.tokens[0] == self.bad:
            return checker.blank_row(CONFIG, case, "error", "broke", context_lost=True)
        return good(case)


def test_ranks_stop_after_a_failed_launch() -> None:
    given_up: list[Row] = []
    rows = list(
        checker.run_in_place(
            CONFIG, cases_of(fused=4), 9.0, make=lambda c: InPlace(1), give_up=given_up.append
        )
    )
    assert [row.status for row in rows] == ["ok", "error", "skipped", "skipped"]
    assert not given_up


def test_a_rank_that_hangs_ends_the_job() -> None:
    given_up: list[Row] = []
    rows = checker.run_in_place(
        CONFIG, cases_of(fused=3), 0.1, make=lambda c: InPlace(9, slow=1), give_up=given_up.append
    )
    assert len(list(rows)) == 3
    assert [row.status for row in given_up] == ["timeout"]
    assert given_up[0].cells[2] == "1"
    assert given_up[0].reason == "took over 0.1 s; the job was ended"


# ---- table and command line


def test_table() -> None:
    case = Case("fused", "fused", SCHEDULE, (8,))
    rows = [good(case), checker.blank_row(CONFIG, case, "timeout", "linear1: stuck")]
    lines = check.render(rows).splitlines()
    assert lines[0].split("  ")[0] == "check"
    assert [line.index("1 one") for line in lines[1:3]] == [lines[0].index("ranks")] * 2
    assert lines[1].endswith("ok")
    assert lines[3:] == [
        "timeout: fused pingpong n256.256 8 tokens: linear1: stuck",
        "1 ok, 1 timeout",
    ]


def config_of(*flags: str) -> CheckConfig:
    args = cli.make_parser().parse_args(["check", "--problem", "deepseek-v4-flash", *flags])
    return check._config(args)


def test_ranks_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    one = config_of()
    assert (one.rank_mode, one.problem.num_experts, one.capacity) == ("one", 32, 768)
    four = config_of("--ranks", "4", "--recipe", "pow2-64", "--tokens", "3,0")
    assert (four.rank_mode, four.problem.num_ranks, four.problem.num_experts) == ("virtual", 4, 256)
    # 384 tokens of four ranks, top-6: 9216 rows, as many as the ring has.
    assert (str(four.recipe), four.capacity) == ("pow2-64", 512)
    assert config_of("--ranks", "4").capacity == 768
    assert config_of("--ranks", "4", "--capacity", "200").capacity == 200
    monkeypatch.setenv("WORLD_SIZE", "2")
    real = config_of()
    assert (real.rank_mode, real.problem.num_ranks) == ("real", 2)


@pytest.mark.parametrize(
    ("size", "flags", "message"),
    [
        ("1", ["--ranks", "2", "--rank-mode", "real"], "this job has 1. Start it with: torchrun"),
        ("1", ["--rank-mode", "real"], "torchrun --nproc_per_node=N"),
        ("1", ["--rank-mode", "virtual"], "needs the number of ranks"),
        ("1", ["--ranks", "3"], "num_ranks=3 does not divide"),
        ("1", ["--ranks", "2", "--rank-mode", "one"], "one rank runs alone"),
        ("1", ["--capacity", "8"], "--capacity 8 is below the 192 of --tokens"),
        ("4", ["--ranks", "2"], "--ranks 2: a process a rank, and this job has 4"),
        ("4", ["--rank-mode", "virtual"], "--rank-mode virtual under torchrun"),
        ("1", [], "no SM90 GPU here: check runs kernels"),
    ],
)
def test_errors(
    size: str,
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setattr(check, "find_gpu", lambda: None)
    assert cli.main(["check", "--problem", "deepseek-v4-flash", *flags]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
    assert err.count("\n") == 1


@pytest.mark.parametrize(("bad", "code"), [(None, 0), ("fail", 1), ("timeout", 1), ("skipped", 0)])
def test_exit_codes(
    bad: str | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: dict[str, Any] = {}

    def rows(config: CheckConfig, cases: dict[str, list[Case]], timeout_s: float) -> list[Row]:
        seen.update(config=config, cases=cases, timeout_s=timeout_s)
        case = cases["fused"][0]
        return [good(case), checker.blank_row(config, case, bad or "ok", "because")]

    monkeypatch.setattr(check, "find_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(check, "_build", lambda specs, jobs: len(specs) == 6)
    monkeypatch.setattr(check, "run_in_children", rows)
    flags = ["--problem", "mimo-v2.5", "--phase", "fused", "--timeout", "9", "--ranks", "4"]
    assert cli.main(["check", *flags]) == code
    out, err = capsys.readouterr()
    assert out.startswith("check ")
    assert "fused " in err
    assert seen["timeout_s"] == 9.0
    sms = {(c.schedule.cluster_size, c.schedule.num_sms) for c in seen["cases"]["fused"]}
    assert sms == {(1, 33), (2, 32)}  # of 132, a quarter each; clusters are whole


@pytest.mark.parametrize(("rank", "bad", "code"), [(0, "ok", 0), (0, "fail", 1), (1, "ok", 0)])
def test_a_process_of_a_job(
    rank: int,
    bad: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process of rank 0 prints, all of them exit alike."""
    import torch.distributed as dist

    from tl_megamoe.explorer import ranks

    calls: list[str] = []
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(check, "find_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(check, "_build", lambda specs, jobs: calls.append("build") or True)
    monkeypatch.setattr(ranks, "join_job", lambda: calls.append("join"))
    monkeypatch.setattr(ranks, "exchange", lambda value: [value, value])
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("leave"))

    def rows(config: CheckConfig, cases: Any, timeout_s: float, *, give_up: Any) -> list[Row]:
        assert (config.rank_mode, config.problem.num_ranks, timeout_s) == ("real", 2, 120.0)
        return [checker.blank_row(config, cases["fused"][0], bad, "")]

    monkeypatch.setattr(check, "run_in_place", rows)
    assert cli.main(["check", "--problem", "mimo-v2.5", "--phase", "fused"]) == code
    out, err = capsys.readouterr()
    assert bool(out) == bool(err) == (rank == 0)
    assert calls == ["join"] + ["build"] * (rank == 0) + ["leave"] * (code == 0)


def test_compile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_megamoe.explorer import farm

    built: list[KernelSpec] = []

    class FakeFarm:
        def __init__(self, *, jobs: int | None) -> None:
            assert jobs == 2

        def run(self, specs: list[KernelSpec], on_done: Callable[..., None]) -> None:
            for spec in specs:
                built.append(spec)
                report = None if spec.phase == "combine" else object()
                on_done(spec, farm.BuildResult("ok", report, ""))  # type: ignore[arg-type]

    monkeypatch.setattr(farm, "Farm", FakeFarm)
    command = ["check", "--problem", "mimo-v2.5", "--compile-only", "--jobs", "2"]
    assert cli.main([*command, "--phase", "linear1", "--math-mode", "pingpong"]) == 0
    assert [(spec.phase, spec.debug) for spec in built] == [("linear1", True), ("linear1", False)]
    assert cli.main([*command, "--phase", "combine"]) == 1


def test_names_of_checks() -> None:
    for phase, name in ALL_CHECKS:
        assert name.startswith(phase)
