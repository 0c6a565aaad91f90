"""Results of ranks with a GPU each lie in a folder of their own; their schedules do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_rows import DEVICE, FLASH, VIEW, confirm_rows
from fake_search import FakeGpu, InlineFarm
from report_rows import run as report
from search_runs import make_options
from table_rows import row
from test_merge import command as merge

from tl_megamoe.explorer.freeze import plan_freeze, write_freeze
from tl_megamoe.explorer.search import run_search
from tl_megamoe.explorer.table import (
    TableError,
    append_rows,
    folder_name,
    gpu_of,
    load,
    read_table,
    table_path,
)
from tl_megamoe.frozen import lookup, read_frozen
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import default_schedule

PAIR = f"{DEVICE}-x2"
WHOLE: Problem = replace(FLASH, num_ranks=2)
REAL = {"num_ranks": 2, "rank_mode": "real", "num_local_experts": WHOLE.num_local_experts}
FAST = replace(default_schedule(WHOLE, 512), stages=3)


def real_table(results: Path) -> Path:
    """A table of a confirmation over two ranks."""
    path = table_path(results, DEVICE, WHOLE.name, "real", 2)
    append_rows(path, confirm_rows(512, {FAST: 200.0}, problem=WHOLE, **REAL))
    return path


def test_a_folder_names_the_gpus_of_real_ranks() -> None:
    assert folder_name(DEVICE) == folder_name(DEVICE, "one", 8) == DEVICE
    assert folder_name(DEVICE, "virtual", 4) == DEVICE
    assert folder_name(DEVICE, "real", 2) == PAIR
    assert gpu_of(PAIR) == gpu_of(DEVICE) == DEVICE
    assert table_path(Path("r"), DEVICE, "p", "real", 16) == Path("r/nvidia-h200-x16/p.csv")


def test_a_search_writes_there_and_goes_on_there(tmp_path: Path) -> None:
    options = replace(make_options(tmp_path), problem=WHOLE, rank_mode="real")
    for written in (True, False):
        done = run_search(
            options,
            InlineFarm(tmp_path / "reports"),
            lambda config, control: FakeGpu(),
            "NVIDIA H200",
        )
        assert done.path == options.results / PAIR / f"{WHOLE.name}.csv"
        assert (done.written > 0) == written
    assert [path.name for path in options.results.iterdir()] == [PAIR]
    frame = read_table(done.path, PAIR)
    assert set(frame["device"]) == {DEVICE}
    assert set(frame["rank_mode"]) == {"real"}


def test_what_is_frozen_from_there_lies_with_its_gpu(tmp_path: Path) -> None:
    results, schedules = tmp_path / "results", tmp_path / "schedules"
    with pytest.raises(ValueError, match=f"no results at .*{PAIR}/deepseek-v4-flash.csv"):
        plan_freeze(WHOLE, DEVICE, results, schedules)
    real_table(results)
    write_freeze(plan_freeze(WHOLE, DEVICE, results, schedules))
    file = read_frozen(schedules / DEVICE / f"{WHOLE.name}.json")
    assert file.entries[0].evidence["table"] == f"results/{PAIR}/{WHOLE.name}.csv"
    found = lookup(WHOLE, DEVICE, 512, root=schedules, rank_mode="real")
    assert found is not None
    assert found.schedule == FAST
    assert "real" in (results / PAIR / "summary.csv").read_text()
    assert [path.name for path in results.iterdir()] == [PAIR]


def test_rows_are_read_from_both_folders(tmp_path: Path) -> None:
    real_table(tmp_path)
    append_rows(table_path(tmp_path, DEVICE, VIEW.name), [row(problem=VIEW.name)])
    frame = load(tmp_path, device=DEVICE)
    assert frame["rank_mode"].tolist().count("one") == 1
    assert set(load(tmp_path / PAIR)["rank_mode"]) == {"real"}


def test_rows_of_one_gpu_do_not_lie_with_those_of_two(tmp_path: Path) -> None:
    path = real_table(tmp_path)
    append_rows(path, [row(problem=WHOLE.name)])
    with pytest.raises(TableError, match=f"1 of 19 rows are of device '{DEVICE}', not of '{PAIR}'"):
        load(tmp_path)
    four = table_path(tmp_path, DEVICE, "p", "real", 4)
    append_rows(four, [row(**{**REAL, "num_ranks": 2})])
    with pytest.raises(TableError, match=f"are of device '{PAIR}', not of '{DEVICE}-x4'"):
        read_table(four, four.parent.name)


def test_rows_that_lay_with_their_gpu_are_still_read(tmp_path: Path) -> None:
    path = table_path(tmp_path, DEVICE, "p")
    append_rows(path, [row(), row(**REAL)])
    assert len(load(tmp_path)) == 2


def test_reports_are_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, schedules = tmp_path / "results", tmp_path / "schedules"
    real_table(results)
    write_freeze(plan_freeze(WHOLE, DEVICE, results, schedules))
    append_rows(table_path(results, DEVICE, VIEW.name), [row(problem=VIEW.name)])
    where = ("--out", results)

    assert report(*where, "--device", DEVICE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:4] for line in lines[1:3]] == [["8", "(one)"], ["2", "(real)"]]
    assert report(*where, "--device", PAIR) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:4] for line in lines[1:-1]] == [["2", "(real)"]]

    ranks = ("--problem", WHOLE.name, "--ranks", "2", "--rank-mode", "real")
    for device in (DEVICE, PAIR):
        assert report(*where, *ranks, "--device", device) == 0
        assert FAST.name in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"no rows .* in .*{DEVICE}-x4/{WHOLE.name}.csv"):
        report(*where, *ranks[:2], "--ranks", "4", *ranks[4:], "--device", DEVICE)

    pages = ("--write", "--no-figures", "--schedules", schedules)
    assert report(*where, *pages) == 0
    page = (results / PAIR / "report.md").read_text()
    assert page.startswith(f"# tl_megamoe results: {PAIR}")
    assert FAST.name in page
    assert "2 real ranks" not in (results / DEVICE / "report.md").read_text()


def test_a_merge_finds_the_folder(tmp_path: Path) -> None:
    a = real_table(tmp_path / "a")
    assert merge(str(a), "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / PAIR / f"{WHOLE.name}.csv").is_file()
    b = tmp_path / "b.csv"
    append_rows(b, [row(problem=WHOLE.name)])
    with pytest.raises(ValueError, match=f"rows of .*{PAIR} and .*{DEVICE}: those of ranks with"):
        merge(str(a), str(b), "--out", str(tmp_path / "other"))
