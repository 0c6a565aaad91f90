"""The ranked text report: stages, ranking, and the command around it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_rows import (
    DEVICE,
    FAST,
    FLASH,
    RUN,
    SLOW,
    TOKENS,
    confirm_rows,
    frame_of,
    result_row,
    run,
    synthetic_rows,
    write_table,
)

from tl_megamoe.explorer import report
from tl_megamoe.explorer.ranking import benched, best_of, ranked_cells, screened
from tl_megamoe.explorer.table import append_rows, read_table, table_path
from tl_megamoe.problem import PRESETS
from tl_megamoe.schedule import Schedule, default_schedule

# ---- ranking


def test_screened_rows_are_ranked_by_the_time_over_the_default() -> None:
    """The faster row ran in a slower batch: its time alone would put it second."""
    rows = [
        result_row(16, FAST, 210.0, ratio_to_baseline=0.95, baseline_us=221.0),
        result_row(16, SLOW, 205.0, ratio_to_baseline=0.99, baseline_us=207.0),
    ]
    ((_, ranked),) = ranked_cells(frame_of(rows))
    assert list(ranked["candidate"]) == [FAST.name, SLOW.name]
    assert "ranked by / default" in report.render(frame_of(rows))
    del rows[0]["ratio_to_baseline"]
    ((_, ranked),) = ranked_cells(frame_of(rows))
    assert list(ranked["candidate"]) == [SLOW.name, FAST.name]
    assert "ranked by median us" in report.render(frame_of(rows))


def test_observations_of_a_screened_candidate_are_joined_by_their_median() -> None:
    rows = [
        result_row(16, FAST, us, observation=i, ratio_to_baseline=us / 200)
        for i, us in enumerate((190.0, 230.0, 200.0))
    ]
    old = result_row(16, FAST, 100.0, kernel="older", ratio_to_baseline=0.5)
    found = screened(frame_of([old, *rows]))
    assert len(found) == 1
    assert found.iloc[0]["median_us"] == 200.0
    assert found.iloc[0]["ratio_to_baseline"] == 1.0
    failed = result_row(16, FAST, None, status="timeout", reason="it hung", observation=3)
    found = screened(frame_of([*rows, failed]))
    assert list(found["status"]) == ["timeout"]
    assert found["median_us"].isna().all()


def test_a_confirmed_candidate_stands_above_every_screened_one() -> None:
    rows = [
        result_row(16, SLOW, 190.0, ratio_to_baseline=0.9),
        result_row(16, FAST, 195.0, ratio_to_baseline=0.93),
        *confirm_rows(16, FAST, 200.0, 0.95),
    ]
    best = best_of(frame_of(rows))
    assert best is not None
    assert (best.stage, best.candidate, best.num_rounds, best.num_seeds) == (
        "confirm",
        FAST.name,
        9,
        3,
    )
    assert best.ratio_to_default == pytest.approx(0.95)
    assert best.noise == pytest.approx(2 * 1.2533 * best.spread / 9**0.5 / 0.95)
    text = report.render(frame_of(rows))
    assert text.index("confirm: 1 candidate, 9 rounds over 3 seeds") < text.index("screen: 2")
    # One observation less: it is not confirmed, and the screen decides.
    best = best_of(frame_of(rows[:-1]))
    assert best is not None
    assert (best.stage, best.candidate) == ("screen", SLOW.name)
    assert best.noise == pytest.approx(0.015)
    assert "none of this kernel with 3 observations of 3 seeds" in report.render(
        frame_of(rows[:-1])
    )
    # A kernel that was screened later makes the confirmation a thing of the past.
    newer = result_row(16, SLOW, 191.0, ratio_to_baseline=0.91, kernel="newer")
    best = best_of(frame_of([*rows, newer]))
    assert best is not None
    assert (best.stage, best.kernel) == ("screen", "newer")


def test_the_text_of_a_whole_search_names_its_stages() -> None:
    text = report.render(frame_of(synthetic_rows()), top=3)
    assert text.count("confirm: 5 candidates, 9 rounds over 3 seeds in run " + RUN) == len(TOKENS)
    assert text.count("screen: 40 candidates: ") == len(TOKENS)
    assert re.search(r"^  timeout: m64\S+: <no> answer", text, re.MULTILINE)
    assert "and 2 more: 24 bytes of register spills" in text
    assert "  duplicate: " not in text
    assert re.search(r"deepgemm 1\.2 +1 .* 0\.9434 +m64", text)
    best = text[text.index("Best of each cell") :].splitlines()
    assert best[1 + len(TOKENS)] == ""
    assert all(line.endswith("(confirmed)") for line in best[1 : 1 + len(TOKENS)])
    assert text.startswith("Ratios are medians of the ratios of each round")
    assert best[-1].startswith("Names of schedules: pp- pingpong")


def test_problems_and_ranks_have_tables_of_their_own() -> None:
    rows = [
        result_row(16, FAST, 200.0),
        result_row(16, FAST, 300.0, problem="mimo-v2.5"),
        result_row(16, FAST, 900.0, num_ranks=4, rank_mode="virtual", nvlink_gbs=12.5),
    ]
    text = report.render(frame_of(rows))
    assert "deepseek-v4-flash, 16 tokens, 4 ranks (virtual)" in text
    assert "deepseek-v4-flash, 16 tokens, 8 ranks (one)" in text
    assert "mimo-v2.5, 16 tokens, 8 ranks (one)" in text
    assert text.count("NVLink GB/s") == 1


def test_two_seeds_of_a_screen_are_told_apart() -> None:
    rows = [result_row(16, FAST, 200.0 + seed, seed=seed) for seed in (0, 1)]
    text = report.render(frame_of(rows))
    assert "screen, seed 0: 1 candidate:" in text
    assert "screen, seed 1: 1 candidate:" in text


def test_a_baseline_that_failed_is_told() -> None:
    fields = {"stage": "bench", "baseline": "deepep", "notes": "baseline oom: 3 GiB asked"}
    text = report.render(frame_of([result_row(16, FAST, 200.0, **fields)]))
    assert "bench: no time of deepep: baseline oom: 3 GiB asked" in text
    later = result_row(
        16, FAST, 200.0, **fields, baseline_us=250.0, ratio_to_baseline=0.8, observation=1
    )
    text = report.render(frame_of([result_row(16, FAST, 200.0, **fields), later]))
    assert "no time of" not in text
    assert re.search(r"deepep +1 .* 0\.8 +m128", text)


def test_bench_rows_of_other_seeds_are_joined() -> None:
    """A ratio was taken within its run, so that medians of several runs mean something."""
    rows = [
        result_row(
            16,
            FAST,
            200.0 + seed,
            stage="bench",
            seed=seed,
            run=f"run{seed}",
            baseline="deepep",
            baseline_us=250.0,
            ratio_to_baseline=0.8 + seed / 100,
            power_w=400.0 + seed,
        )
        for seed in range(3)
    ]
    older = {**rows[0], "kernel": "older", "ratio_to_baseline": 0.1}
    (row,) = benched(frame_of([older, *rows])).to_dict("records")
    assert row["n"] == 3
    assert row["median_us"] == 201.0
    assert row["ratio_to_baseline"] == pytest.approx(0.81)
    assert row["power_w"] == 401.0
    assert row["p10_us"] == pytest.approx(201.0 * 0.99)


def frozen_file(schedules: Path, schedule: Schedule) -> None:
    """What is frozen for one rank of eight of FLASH, for all counts."""
    problem = {"hidden": 4096, "intermediate": 2048, "num_experts": 256, "num_topk": 6}
    entry = {"num_ranks": 8, "rank_mode": "one", "max_tokens": 8192}
    data = {
        "schema": 1,
        "problem": {"name": FLASH.name, **problem},
        "device": DEVICE,
        "entries": [{**entry, "schedule": schedule.to_dict()}],
    }
    path = schedules / DEVICE / f"{FLASH.name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))


def test_the_default_and_the_frozen_schedule_are_marked(tmp_path: Path) -> None:
    default = default_schedule(FLASH, 16)
    frozen_file(tmp_path, SLOW)
    bench = {"stage": "bench", "baseline": "x", "baseline_us": 250.0, "ratio_to_baseline": 0.8}
    rows = [
        result_row(16, default, 200.0),
        result_row(16, SLOW, 210.0),
        result_row(16, FAST, 220.0),
        result_row(16, FAST, 220.0, **bench),
        *confirm_rows(16, default, 200.0, 1.0),
    ]
    lines = report.render(frame_of(rows), schedules=tmp_path).splitlines()
    ends = [
        line.split()[2:3] == ["(default)"]
        for line in lines
        if line.startswith("1") and default.name in line
    ]
    assert len(ends) == 2
    assert all(ends)
    assert any(f"{SLOW.name} (frozen)" in line for line in lines)
    assert not any(f"{FAST.name} (" in line for line in lines)
    assert any(line.startswith("bench: another schedule than is frozen beside") for line in lines)
    # The default has no spread to itself.
    place = next(i for i, line in enumerate(lines) if line.startswith("confirm: "))
    names, cells = lines[place + 1].split(), lines[place + 2].split()
    assert names[-3:] == ["spread", "yardstick", "TFLOP/s"]
    assert (cells[1], cells[-2]) == (default.name, "-")
    # A layer of other sizes has another default, and nothing of this file.
    other = report.render(frame_of([result_row(16, SLOW, 210.0, hidden=2048)]), schedules=tmp_path)
    assert "(frozen)" not in other
    # Ranks that share the GPU have their part of its SMs.
    part = replace(default_schedule(PRESETS[FLASH.name], 16), num_sms=33)
    fields = {"source": "model", "predicted_us": 9.0, "num_local_experts": 64}
    shared = result_row(16, part, None, num_ranks=4, rank_mode="virtual", **fields)
    shared |= {"experts_per_wave": 64}
    shared["candidate"] = replace(part, experts_per_wave=64).name
    assert "-sm33-p0 (default)" in report.render(frame_of([shared]))


# ---- command


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        result_row(16, FAST, 200.0),
        result_row(512, FAST, 280.0),
        result_row(512, default_schedule(FLASH, 512), 281.0, recipe="pow2-64"),
    ]
    write_table(tmp_path / "results", rows)
    return tmp_path / "results"


def test_limits_of_the_text(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = ("--problem", FLASH.name, "--out", results)
    assert run(*problem) == 0
    text = capsys.readouterr().out
    assert "pow2-64" in text
    assert "16 tokens" in text
    assert run(*problem, "--recipe", "exact-128", "--tokens", "512", "--csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("schema,problem,num_tokens")


def test_the_rows_as_csv_are_those_of_the_file(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table_path(results, DEVICE, FLASH.name)
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[1].replace(",200,", ",200.000,") + "\n")
    lines = path.read_text().splitlines()
    assert ",1400," in lines[1]
    assert run("--problem", FLASH.name, "--out", results, "--tokens", "16", "--csv") == 0
    assert capsys.readouterr().out.splitlines() == [lines[0], lines[1], lines[4]]


def test_alone_it_lists_the_tables(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"num_ranks": 4, "rank_mode": "virtual", "num_local_experts": 64, "stage": "confirm"}
    append_rows(table_path(results, DEVICE, FLASH.name), [result_row(64, FAST, 1.0, **fields)])
    assert run("--out", results) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        [DEVICE, FLASH.name, "4", "(virtual)"],
        [DEVICE, FLASH.name, "8", "(one)"],
    ]
    assert re.search(r" 1 confirm +64 ", lines[1])
    assert re.search(r" 3 screen +16,512 ", lines[2])
    command = lines[1][lines[1].index("tl-megamoe report ") :].split()[2:]
    assert run(*command) == 0
    assert "64 tokens, 4 ranks (virtual)" in capsys.readouterr().out


def test_tables_of_the_model_have_no_page_unless_named(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"device": "sm90-model", "source": "model", "predicted_us": 190.0}
    path = table_path(results, "sm90-model", FLASH.name)
    append_rows(path, [result_row(16, FAST, None, **fields)])
    assert run("--out", results, "--write", "--no-figures") == 0
    assert "no page of sm90-model" in capsys.readouterr().err
    assert (results / DEVICE / "report.html").exists()
    assert not (path.parent / "report.html").exists()
    assert run("--out", results, "--write", "--no-figures", "--device", "sm90-model") == 0
    assert (path.parent / "report.html").exists()


def test_write_needs_no_problem(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = PRESETS["mimo-v2.5"]
    write_table(results, [result_row(16, FAST, 300.0, problem=other.name, num_topk=8)], other.name)
    assert run("--out", results, "--write") == 0
    out, err = capsys.readouterr()
    assert "mimo-v2.5, 16 tokens" in out
    assert "deepseek-v4-flash, 512 tokens" in out
    assert f"wrote {results / DEVICE / 'report.html'}" in err
    page = (results / DEVICE / "report.html").read_text()
    assert "mimo-v2.5" in page
    # A limit of the text is none of the page.
    assert run("--out", results, "--write", "--problem", FLASH.name, "--tokens", "16") == 0
    assert "mimo-v2.5" not in capsys.readouterr().out
    assert (results / DEVICE / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "777"], "no rows at 777 tokens in .*; there are rows at 16, 512\\. Name"),
        (["--problem", FLASH.name, "--tokens", "8,9"], "8 ranks \\(one\\) at 8, 9 tokens in"),
        (["--problem", "mimo-v2.5", "--tokens", "7"], "with: tl-megamoe search .* --tokens 7$"),
        (["--device", "other"], "no results table with rows"),
        (["--no-figures"], "--no-figures belongs to the page: add --write"),
        (["--write", "--rank-mode", "virtual", "--ranks", "4"], "without --problem"),
        (["--write", "--device", "other"], "no rows in .*other/\\*.csv"),
        (["--problem", "mimo-v2.5"], "no rows of problem 'mimo-v2.5' with 8 ranks"),
        (["--problem", FLASH.name, "--schedules", "x"], "add --write"),
        (["--diff", "a.csv", "b.csv", "--write"], "--write not with it"),
        (["--diff", "a.csv", "b.csv"], "a.csv: there is no such file"),
    ],
)
def test_bad_arguments(results: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("--out", results, *argv)


def test_read_back_is_what_was_made(results: Path) -> None:
    """`frame_of` stands for a file in these tests."""
    rows = synthetic_rows()[:60]
    path = write_table(results / "again", rows)
    read = read_table(path)
    pd.testing.assert_frame_equal(read, frame_of(rows), rtol=1e-5)
