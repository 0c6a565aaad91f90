"""The command line: data on stdout, messages on stderr, exit codes, no tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_frozen import BASE, DEVICE, FAST, VIEW, flash_row
from test_search import InlineFarm

from tl_megamoe.explorer import cli, farm
from tl_megamoe.explorer.table import append_rows, read_table, table_path
from tl_megamoe.frozen import read_frozen

FLASH = ["--problem", "deepseek-v4-flash"]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_gpu", lambda: None)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        flash_row(16, FAST, 210.0, measured_at="2026-01-01"),
        flash_row(16, BASE, 220.0),
        flash_row(512, BASE, 280.0),
        flash_row(512, FAST, 1.0, status="timeout", median_us=None, reason="it hung"),
    ]
    append_rows(table_path(tmp_path / "results", DEVICE, VIEW.name), rows)
    return tmp_path / "results"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *FLASH]) == 0
    text = capsys.readouterr().out
    assert "51 candidates in 20 kernels" in text
    assert "5 of 56 points break a rule" in text
    assert "stages               rejects 3" in text
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
        (["list"], "no --problem given"),
        (["list", "--hidden", "512"], "no --intermediate, --num-experts, --num-topk"),
        (["list", *FLASH, "--hidden", "100"], "hidden=100 of problem"),
        (["list", *FLASH, "--num-ranks", "7"], "num_ranks=7 does not divide"),
        (["list", *FLASH, "--space", "wide"], "space 'wide' is neither one of"),
        (["search", *FLASH, "--tokens", "16", "--capacity", "8"], "capacity=8 is below the 16"),
        (["search", *FLASH, "--tokens", "16", "--routing", "odd"], "routing='odd' must be one of"),
        (["why", *FLASH, "--tokens", "16"], "no SM90 GPU here: name a device"),
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


@pytest.mark.parametrize(
    "argv", [[], ["dance"], ["search", *FLASH, "--tokens", "0"], ["search", *FLASH]]
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert "usage: tl-megamoe" in capsys.readouterr().err


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("doctor", "list", "search", "report", "freeze", "why"):
        assert command in text
        assert cli.main([command, "--help"]) == 0
    assert cli.main(["--version"]) == 0


def test_report(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", *FLASH, "--out", str(results)]) == 0
    text = capsys.readouterr().out
    assert text.index(FAST.name) < text.index(BASE.name)
    assert "2 candidates: 2 ok; floor 116.0 us" in text
    assert "1 ok, 1 timeout" in text
    assert "it hung" in text
    assert "Best of each cell" in text
    assert "1.810 of the floor" in text
    assert cli.main(["report", *FLASH, "--out", str(results), "--tokens", "512"]) == 0
    assert "16 tokens" not in capsys.readouterr().out
    assert cli.main(["report", *FLASH, "--out", str(results), "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("schema,problem,num_tokens")
    assert cli.main(["report", *FLASH, "--out", str(results), "--device", "other"]) == 2


def test_freeze_then_why(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "schedules"
    where = ["--device", DEVICE, "--schedules", str(root)]
    assert cli.main(["why", *FLASH, "--tokens", "16", *where]) == 0
    text = capsys.readouterr().out
    assert "origin    default: no frozen schedule" in text
    assert cli.main(["freeze", *FLASH, "--out", str(results), *where]) == 0
    assert "2 entries" in capsys.readouterr().out
    assert len(read_frozen(root / DEVICE / "deepseek-v4-flash.json").entries) == 2
    assert cli.main(["why", *FLASH, "--tokens", "90", "--capacity", "8192", *where]) == 0
    text = capsys.readouterr().out
    assert f"schedule  {FAST.name}" in text
    assert "origin    frozen: frozen in" in text
    assert "median_us          210.0" in text
    assert cli.main(["why", *FLASH, "--tokens", "91", *where]) == 0
    assert f"schedule  {BASE.name}" in capsys.readouterr().out


def test_search_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(farm, "Farm", lambda **options: InlineFarm(tmp_path / "reports"))
    argv = ["search", *FLASH, "--tokens", "16,512", "--limit", "4", "--out", str(tmp_path / "r")]
    assert cli.main([*argv, "--compile-only"]) == 0
    assert capsys.readouterr().out.strip().endswith("ok")
    assert not (tmp_path / "r").exists()
    assert cli.main([*argv, "--commit", "c0ffee"]) == 0
    out, err = capsys.readouterr()
    assert "source=model" in err
    assert "8 rows written (8 ok), 0 were there" in err
    assert "source=model" in out
    frame = read_table(tmp_path / "r" / "sm90-model" / "deepseek-v4-flash.csv")
    assert sorted(frame["num_tokens"]) == [16] * 4 + [512] * 4
    assert set(frame["commit"]) == {"c0ffee"}
    assert cli.main(argv) == 0
    assert "0 rows written (none), 8 were there" in capsys.readouterr().err


def test_interrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(**options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(farm, "Farm", stop)
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
    assert cli.main(["doctor", "--schedules", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "tilelang", "kernel cache", "frozen for nvidia-h200"):
        assert word in text
    monkeypatch.setattr(doctor, "check_nvcc", lambda: (False, "nvcc not found"))
    assert cli.main(["doctor", "--schedules", str(tmp_path)]) == 1


def test_doctor_compiles_for_sm90() -> None:
    from tl_megamoe.explorer.doctor import check_nvcc

    compiles, text = check_nvcc()
    assert compiles, text


def test_a_closed_pipe_is_no_error() -> None:
    command = (
        f"{sys.executable} -m tl_megamoe.explorer.cli list --problem deepseek-v4-flash --space full"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} --names | head -n 1"], capture_output=True, text=True
    )
    assert done.stdout.startswith("m")
    assert done.stderr == ""
