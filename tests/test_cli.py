"""The command line: data on stdout, messages on stderr, exit codes, no tracebacks."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_rows import BASE, DEVICE, VIEW, confirm_rows
from fake_rows import FLASH as FLASH_LAYER
from fake_search import InlineFarm
from test_frozen import FAST

from tl_megamoe.explorer import args as args_module
from tl_megamoe.explorer import cli, cluster, doctor, farm
from tl_megamoe.explorer.space import default_of
from tl_megamoe.explorer.table import append_rows, read_table, table_path
from tl_megamoe.frozen import read_frozen

FLASH = ["--problem", "deepseek-v4-flash"]
VIRTUAL = ["--ranks", "4", "--rank-mode", "virtual"]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    monkeypatch.setattr(cluster, "find_gpu", lambda: None)


def use_inline_farm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (farm, cluster):
        monkeypatch.setattr(module, "Farm", lambda **options: InlineFarm(tmp_path / "reports"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        *confirm_rows(16, {FAST: 210.0, BASE: 220.0}),
        *confirm_rows(512, {BASE: 280.0}),
        *confirm_rows(512, {FAST: 1.0}, status="timeout", reason="it hung")[:1],
    ]
    append_rows(table_path(tmp_path / "results", DEVICE, VIEW.name), rows)
    return tmp_path / "results"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *FLASH]) == 0
    text = capsys.readouterr().out
    assert "50 candidates in 30 kernels" in text
    assert "9 of 59 points break a rule" in text
    assert "  pp-m64-n256.256-" in text
    assert "  default" in text
    assert "  classic" in text
    assert cli.main(["list", *FLASH, "--names", "--limit", "4"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == 4
    assert all(name in text for name in names)


def test_list_of_sizes_and_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "5120", "--intermediate", "1536", "--num-experts", "160"]
    assert cli.main(["list", *sizes, "--num-topk", "8"]) == 0
    assert capsys.readouterr().out.startswith("h5120-i1536-e160-k8, 512 tokens")
    path = tmp_path / "mine.toml"
    path.write_text("hidden = 512\nintermediate = 512\nnum_experts = 16\nnum_topk = 2\n")
    assert cli.main(["list", "--problem", str(path), "--num-ranks", "4"]) == 0
    assert capsys.readouterr().out.startswith("mine, 512 tokens")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list", "--problem", "nope"], "problem 'nope' is neither a preset"),
        (["list", "--problem", "mimo-v25"], "nor a .toml file; did you mean mimo-v2.5?"),
        (["list", "--problem", "nope.toml"], "--problem nope.toml: there is no file nope.toml"),
        (["list", *FLASH, "--space", "no.toml"], "space file no.toml: No such file or directory"),
        (["list"], "no --problem given"),
        (["list", "--hidden", "512"], "no --intermediate, --num-experts, --num-topk"),
        (["list", *FLASH, "--hidden", "100"], "hidden=100 of problem"),
        (["list", *FLASH, "--num-ranks", "7"], "num_ranks=7 does not divide"),
        (["list", *FLASH, "--space", "wide"], "space 'wide' is neither one of"),
        (["search", *FLASH, "--tokens", "16", "--capacity", "8"], "capacity=8 is below the 16"),
        (["search", *FLASH, "--tokens", "16", "--routing", "odd"], "routing='odd' must be one of"),
        (["search", *FLASH, "--tokens", "16", "--routing", "zipf:-1"], "must be positive and fin"),
        (
            ["search", *FLASH, "--tokens", "16", "--cache", "nope.tar.xz"],
            "--cache nope.tar.xz: there is no file nope.tar.xz",
        ),
        (["why", *FLASH, "--tokens", "16"], "no SM90 GPU here: name a device"),
        (
            ["freeze", *FLASH],
            "model rows, which are never frozen: run tl-megamoe search on an SM90",
        ),
        (["list", *FLASH, "--ranks", "4"], "--ranks 4 with --rank-mode one: one rank runs alone"),
        (["list", *FLASH, "--rank-mode", "virtual"], "--rank-mode virtual needs the number of"),
        (
            ["list", *FLASH, "--rank-mode", "virtual", "--ranks", "4", "--num-ranks", "8"],
            "--num-ranks 8 and --ranks 4",
        ),
        (["list", *FLASH, "--rank-mode", "real", "--ranks", "32"], "--ranks 32 exceeds 16"),
        (["list", *FLASH, "--rank-mode", "real", "--ranks", "7"], "num_ranks=7 does not divide"),
        (
            ["search", *FLASH, "--tokens", "16", "--rank-mode", "real", "--ranks", "4"],
            "--rank-mode real needs",
        ),
        (
            ["report", *FLASH, *VIRTUAL, "--out", "nowhere"],
            "with 4 ranks (virtual) in nowhere/*/deepseek-v4-flash.csv. Make some with: tl-megamoe "
            "search --problem deepseek-v4-flash --num-ranks 4 --ranks 4 --rank-mode virtual",
        ),
        (["report", *FLASH, "--out", "nowhere"], "no rows of problem 'deepseek-v4-flash'"),
        (["freeze", *FLASH, "--device", DEVICE, "--out", "nowhere"], "no results at nowhere"),
    ],
)
def test_user_errors_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("tl-megamoe: ")
    assert err.count("\n") == 1
    assert "Errno" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dance"], "there is no command 'dance' (doctor, list, build, search, "),
        (["serach"], "t4); did you mean search?"),
        (["search", *FLASH, "--tokens", "0"], "argument --tokens: '0' must be a positive integer"),
        (["search", *FLASH], "the following arguments are required: --tokens"),
        (
            ["search", *FLASH, "--tokens", "8", "--confirm", "-1"],
            "argument --confirm: '-1' must be 0 or a positive integer",
        ),
        (["list", *FLASH, "--token", "8", "--fast", "3"], "unrecognized arguments: --fast 3"),
        (
            ["list", *FLASH, "--ranks", "4", "--rank-mode", "imaginary"],
            "argument --rank-mode: invalid choice: 'imaginary'",
        ),
        (["list", *FLASH, "--recipe", "pow3-64"], "did you mean pow2-64?"),
        (["list", *FLASH, "--names", "--explain"], "--explain: not allowed with argument --names"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    command = "tl-megamoe" if len(argv) < 2 else f"tl-megamoe {argv[0]}"
    assert err.startswith(f"{command}: ")
    assert message in err
    assert err.endswith(f"; see {command} --help\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "x.csv"), "there is no file x.csv"),
        (PermissionError(13, "Permission denied", "x.csv"), "x.csv: Permission denied"),
        (OSError(28, "x.csv: No space left: 2 rows are not recorded"), "x.csv: No space left: 2"),
        (OSError("a socket\nis closed"), "a socket is closed"),
        (ValueError("x.toml: [Errno 13] Permission denied: 'x.toml'"), "x.toml: Permission denied"),
    ],
)
def test_system_errors_are_said_without_numbers(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run_doctor", fail)
    assert cli.main(["doctor"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"tl-megamoe: {text}")
    assert err.count("\n") == 1


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    commands = (
        "doctor list build search report freeze why bench host trace check model export merge t4"
    )
    for command in commands.split():
        assert command in text
        assert cli.main([command, "--help"]) == 0
    assert cli.main(["--version"]) == 0


def test_report(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", *FLASH, "--out", str(results)]) == 0
    text = capsys.readouterr().out
    assert text.index(FAST.name) < text.index(BASE.name)
    assert "confirm: 3 candidates, 9 rounds over 3 seeds in run first" in text
    assert f"timeout: {FAST.name}: it hung" in text
    assert "Best of each cell" in text
    assert cli.main(["report", *FLASH, "--out", str(results), "--tokens", "512"]) == 0
    assert "16 tokens" not in capsys.readouterr().out
    assert cli.main(["report", *FLASH, "--out", str(results), "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 27 + 9 + 1
    assert lines[0].startswith("schema,problem,num_tokens")
    assert cli.main(["report", *FLASH, "--out", str(results), "--device", "other"]) == 2


def test_freeze_then_why(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "schedules"
    where = ["--device", DEVICE, "--schedules", str(root)]
    assert cli.main(["why", *FLASH, "--tokens", "16", *where]) == 0
    text = capsys.readouterr().out
    assert "origin    default: no frozen schedule" in text
    assert f"nothing is frozen for {DEVICE!r}; there is for no device" in text
    assert cli.main(["freeze", *FLASH, "--out", str(results), *where]) == 0
    assert "2 entries" in capsys.readouterr().out
    assert len(read_frozen(root / DEVICE / "deepseek-v4-flash.json").entries) == 2
    assert cli.main(["why", *FLASH, "--tokens", "90", "--device", "h200", *where[2:]]) == 0
    assert f"nothing is frozen for 'h200'; there is for {DEVICE}" in capsys.readouterr().out
    assert cli.main(["why", *FLASH, "--tokens", "90", "--capacity", "8192", *where]) == 0
    text = capsys.readouterr().out
    assert f"schedule  {FAST.name}" in text
    assert "origin    frozen: frozen in" in text
    assert "measured  16 tokens, 203.0 us" in text
    assert f"faster than {BASE.name}" in text
    assert cli.main(["why", *FLASH, "--tokens", "91", *where]) == 0
    assert f"schedule  {BASE.name}" in capsys.readouterr().out


def test_why_of_many_ranks_says_where_the_order_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--device", "other", "--schedules", str(tmp_path), "--capacity", "8192"]
    ranks = ["--ranks", "8", "--rank-mode", "real"]
    assert cli.main(["why", *FLASH, *ranks, "--tokens", "8192", *where]) == 0
    text = capsys.readouterr().out
    assert (
        "walk      waves of 32 experts up to the 200 pool blocks of the ring (capacity 8192); a "
        "launch with more wraps it and walks in lag 50, whatever the schedule says. Uniform "
        "routing of 8192 tokens makes about 400: lag 50\n"
    ) in text
    assert cli.main(["why", *FLASH, *ranks, "--tokens", "1024", *where]) == 0
    assert "1024 tokens makes about 64: waves of 32 experts\n" in capsys.readouterr().out
    assert cli.main(["why", *FLASH, "--tokens", "16", *where]) == 0
    text = capsys.readouterr().out
    assert "walk " not in text  # one rank has its whole pool
    assert "schedule  pp-" in text
    assert cli.main(["why", *FLASH, "--tokens", "16", *where, "--recipe", "exact-64"]) == 0
    assert "schedule  pp-" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "ranks", "mode", "viewed"),
    [
        ([], 1, "one", 8),
        (["--num-ranks", "4"], 1, "one", 4),
        (["--ranks", "1"], 1, "one", 8),
        (VIRTUAL, 4, "virtual", None),
        ([*VIRTUAL, "--num-ranks", "4"], 4, "virtual", None),
        (["--ranks", "1", "--rank-mode", "virtual"], 1, "virtual", None),
        (["--ranks", "8", "--rank-mode", "real"], 8, "real", None),
    ],
)
@pytest.mark.parametrize(
    "command",
    [["list"], ["search", "--tokens", "16"], ["report"], ["freeze"], ["why", "--tokens", "1"]],
)
def test_every_command_takes_ranks_alike(
    command: list[str], argv: list[str], ranks: int, mode: str, viewed: int | None
) -> None:
    args = cli.make_parser().parse_args([*command, *FLASH, *argv])
    problem, found = args_module.running_problem(args)
    assert (problem.num_ranks, found, problem.from_num_ranks) == (ranks, mode, viewed)
    assert problem.num_local_experts == 256 // (viewed or ranks)


def test_list_of_virtual_ranks_and_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *FLASH, *VIRTUAL, "--recipe", "pow2-64"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("deepseek-v4-flash, 4 virtual ranks, 512 tokens, space screen: ")
    assert "-sm33-" in text
    assert "-sm132-" not in text


def test_virtual_rows_are_reported_frozen_and_looked_up_apart(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = replace(BASE, num_sms=33, experts_per_wave=64)
    ranks = {"num_ranks": 4, "rank_mode": "virtual", "num_local_experts": 64}
    times = {default_of(replace(FLASH_LAYER, num_ranks=4), 16, gpu_ranks=4): 950.0, schedule: 900.0}
    other = {schedule: 850.0, replace(schedule, stages=3): 800.0}
    rows = [
        *confirm_rows(16, times, nvlink_gbs=12.5, **ranks),
        *confirm_rows(16, other, recipe="pow2-64", **ranks),
    ]
    rows = [row for row in rows if row["num_sms"] == 33]
    append_rows(table_path(results, DEVICE, VIEW.name), rows)
    out = ["--out", str(results)]
    assert cli.main(["report", *FLASH, *VIRTUAL, *out]) == 0
    text = capsys.readouterr().out
    assert "4 ranks (virtual), uniform routing, fused, exact-128, measured on" in text
    assert "fused, pow2-64, measured on" in text
    assert FAST.name not in text
    assert cli.main(["report", *FLASH, *VIRTUAL, *out, "--recipe", "pow2-64"]) == 0
    assert "exact-128" not in capsys.readouterr().out
    assert cli.main(["report", *FLASH, *out]) == 0
    assert "virtual" not in capsys.readouterr().out

    where = ["--device", DEVICE, "--schedules", str(tmp_path / "schedules")]
    assert cli.main(["freeze", *FLASH, *out, *where]) == 0
    assert cli.main(["freeze", *FLASH, *VIRTUAL, *out, *where]) == 0
    assert "1 entries" in capsys.readouterr().out
    entries = read_frozen(tmp_path / "schedules" / DEVICE / "deepseek-v4-flash.json").entries
    assert [(e.num_ranks, e.rank_mode) for e in entries] == [
        (4, "virtual"),
        (8, "one"),
        (8, "one"),
    ]
    assert entries[0].schedule == schedule
    assert cli.main(["why", *FLASH, *VIRTUAL, "--tokens", "16", *where]) == 0
    text = capsys.readouterr().out
    assert f"schedule  {schedule.name}" in text
    assert "the GPU's SMs // 4" in text
    assert cli.main(["freeze", *FLASH, *VIRTUAL, *out, *where, "--recipe", "pow2-64"]) == 0
    assert cli.main(["why", *FLASH, *VIRTUAL, "--tokens", "16", *where]) == 0
    text = capsys.readouterr().out
    assert f"schedule  {replace(schedule, stages=3).name}" in text
    assert "recipe             pow2-64" in text
    other = ["--ranks", "2", "--rank-mode", "virtual"]
    assert cli.main(["freeze", *FLASH, *other, *out, *where]) == 2
    assert "with 2 ranks (virtual)" in capsys.readouterr().err


def test_virtual_search_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_inline_farm(monkeypatch, tmp_path)
    out = ["--out", str(tmp_path / "r"), "--space", "demo", "--recipe", "exact-64"]
    assert cli.main(["search", *FLASH, *VIRTUAL, "--tokens", "512", *out]) == 0
    assert "7 rows written (7 ok)" in capsys.readouterr().err
    frame = read_table(tmp_path / "r" / "sm90-model" / "deepseek-v4-flash.csv")
    assert set(frame["rank_mode"]) == {"virtual"}
    assert set(frame["num_ranks"]) == {4}
    assert set(frame["num_sms"]) == {33}
    assert set(frame["recipe"]) == {"exact-64"}
    assert set(frame["math_mode"]) == {"cooperative", "pingpong"}


def test_search_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_inline_farm(monkeypatch, tmp_path)
    argv = ["search", *FLASH, "--tokens", "16,512", "--limit", "4", "--out", str(tmp_path / "r")]
    assert cli.main([*argv, "--compile-only"]) == 0
    assert capsys.readouterr().out.strip().endswith("ok")
    assert not (tmp_path / "r").exists()
    assert cli.main([*argv, "--commit", "c0ffee"]) == 0
    out, err = capsys.readouterr()
    assert "source=model" in err
    assert "8 rows written (8 ok), 0 candidates were there" in err
    assert "source=model" in out
    frame = read_table(tmp_path / "r" / "sm90-model" / "deepseek-v4-flash.csv")
    assert sorted(frame["num_tokens"]) == [16] * 4 + [512] * 4
    assert set(frame["commit"]) == {"c0ffee"}
    assert cli.main(argv) == 0
    assert "0 rows written (none), 8 candidates were there" in capsys.readouterr().err


def test_interrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(**options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "Farm", stop)
    argv = ["search", *FLASH, "--tokens", "16", "--out", str(tmp_path)]
    assert cli.main(argv) == 130
    assert "written rows and compiled kernels are kept" in capsys.readouterr().err


def test_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tl_megamoe.explorer import doctor

    (tmp_path / DEVICE).mkdir()
    (tmp_path / DEVICE / "layer.json").write_text("{}")
    monkeypatch.setattr(doctor, "check_nvcc", lambda: (True, "nvcc compiles for sm_90a"))
    monkeypatch.setattr(doctor, "gpu_lines", list)
    assert cli.main(["doctor", "--schedules", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "tilelang", "kernel cache", "frozen for nvidia-h200"):
        assert word in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in text
    assert "0 SM90 GPUs here" in text
    monkeypatch.setattr(doctor, "check_nvcc", lambda: (False, "nvcc not found"))
    assert cli.main(["doctor", "--schedules", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "is not set: search and check set it to 32"),
        ("32", "up to 16 on an SM90 GPU: CUDA_DEVICE_MAX_CONNECTIONS=32"),
        ("1", "no: CUDA_DEVICE_MAX_CONNECTIONS=1, set it to 32"),
        ("many", "no: CUDA_DEVICE_MAX_CONNECTIONS=many"),
    ],
)
def test_doctor_on_virtual_ranks(value: str | None, text: str) -> None:
    from tl_megamoe.explorer.doctor import virtual_ranks

    assert text in virtual_ranks({"CUDA_DEVICE_MAX_CONNECTIONS": value} if value else {})


def test_doctor_counts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_megamoe.explorer import doctor

    lines = [("gpu 0", "H200, 132 SMs, SM90, kernels run here")] * 2
    lines.append(("gpu 2", "A100, 108 SMs, not SM90: kernels do not run here"))
    monkeypatch.setattr(doctor, "gpu_lines", lambda: lines)
    assert doctor.real_ranks(doctor.count_gpus()) == "up to 2, on 2 SM90 GPUs of this machine"
    monkeypatch.setattr(doctor, "gpu_lines", lambda: lines[2:])
    assert doctor.real_ranks(doctor.count_gpus()) == "0 SM90 GPUs here, at least 2 needed"


def test_doctor_compiles_for_sm90() -> None:
    from tl_megamoe.explorer.doctor import check_nvcc

    compiles, text = check_nvcc()
    assert compiles, text
    assert re.search(r"nvcc \d+\.\d+\.\d+ compiles for sm_90a", text), text


def test_doctor_says_what_to_install_where_headers_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tl_megamoe.explorer import doctor

    monkeypatch.setattr(doctor, "PROBE", '#error "compiler and headers are incompatible"\n')
    compiles, text = doctor.check_nvcc()
    assert not compiles
    assert "headers are incompatible" in text
    assert "pip install 'cuda-toolkit[crt,cudart,nvcc,nvvm]<13.5'" in text


def test_a_closed_pipe_is_no_error() -> None:
    command = (
        f"{sys.executable} -m tl_megamoe.explorer.cli list --problem deepseek-v4-flash --space full"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} --names | head -n 1"], capture_output=True, text=True
    )
    assert done.stdout.startswith("m")
    assert done.stderr == ""


def test_why_knows_the_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["why", "--problem", "deepseek-v4-flash", "--tokens", "8192"]
    command += ["--device", "nvidia-h200"]
    monkeypatch.setenv("TL_MEGAMOE_KERNEL", "pingpong")
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("schedule  pp-m64-")
    monkeypatch.setenv("TL_MEGAMOE_KERNEL", "fastest")
    assert cli.main(command) == 2
    assert "TL_MEGAMOE_KERNEL='fastest' must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["search", "check"])
def test_a_time_limit_is_positive(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--problem", "mimo-v2.5", "--tokens", "8", "--timeout", "-1"]
    assert cli.main([command, *flags]) == 2
    assert "'-1' must be a positive number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compile-only", "--executor", "ray"], "leave --executor ray away"),
        (["--compile-only", "--strategy", "optuna"], "Compile the whole space with"),
        (["--strategy", "optuna"], "proposes from measured times"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_inline_farm(monkeypatch, tmp_path)
    argv = ["search", *FLASH, "--tokens", "16", "--out", str(tmp_path / "r"), *flags]
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r" / "sm90-model").exists()
