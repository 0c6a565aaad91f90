"""The results page: what it holds, that it is whole, and that nothing in a table is markup."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_rows import (
    DEVICE,
    FAST,
    SLOW,
    TOKENS,
    confirm_rows,
    frame_of,
    result_row,
    run,
    synthetic_rows,
    write_table,
)

from tl_megamoe.explorer import figures
from tl_megamoe.explorer.document import Figure, Table, Words, escape_markdown, to_html, to_markdown
from tl_megamoe.explorer.page import write_page
from tl_megamoe.explorer.section_blocks import _lines
from tl_megamoe.explorer.sections import sections_of, sensitivity_of, traces_of
from tl_megamoe.problem import PRESETS
from tl_megamoe.schedule import Schedule, default_schedule

FLASH = "deepseek-v4-flash"
PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Cells of tables, sources of pictures and anchors; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")
        if tag == "img":
            self.sources.append(values["src"] or "")
            assert values["alt"]
        if "id" in values:
            self.ids.append(values["id"] or "")
        if tag == "a":
            self.links.append(values["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def frozen_file(root: Path, problem: str, entries: list[dict[str, object]]) -> None:
    preset = PRESETS[problem]
    sizes = ("hidden", "intermediate", "num_experts", "num_topk")
    data = {
        "schema": 1,
        "problem": {"name": problem, **{name: getattr(preset, name) for name in sizes}},
        "device": DEVICE,
        "entries": [{"num_ranks": 8, "rank_mode": "one", **entry} for entry in entries],
    }
    path = root / DEVICE / f"{problem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device with two problems, a frozen file of one, and its page."""
    root = tmp_path_factory.mktemp("page")
    write_table(root / "results", synthetic_rows())
    other = [row for row in synthetic_rows("mimo-v2.5", 1.2, 1) if row["num_tokens"] <= 256]
    write_table(root / "results", other, "mimo-v2.5")
    (root / "results" / DEVICE / "summary.csv").write_text("not,a,table\n")
    best = Schedule(experts_per_wave=32, block_m=64)
    cells = [{"num_tokens": 16, "median_us": 201.25, "ratio_to_floor": 1.2345}]
    entries = [
        {
            "max_tokens": 32,
            "schedule": best.to_dict(),
            "recipe": "exact-128",
            "routing": "uniform",
            "cells": cells,
        },
        {
            "max_tokens": 8192,
            "schedule": FAST.to_dict(),
            "recipe": "pow2-64",
            "num_tokens": 64,
            "median_us": 77.75,
            "ratio_to_floor": 0.4321,
        },
    ]
    frozen_file(root / "schedules", FLASH, entries)
    write_page(root / "results" / DEVICE, root / "schedules")
    return root / "results" / DEVICE


def test_the_page_stands_alone(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert len(page.sources) == 2 * 4 + 1
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in page.sources)
    assert not re.search(r"(src|href)=.?(https?:|//)|<script|<link|@import|url\(", text)
    assert {link[1:] for link in page.links} == set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    # Built from the tables alone: again, it is the same to the byte.
    write_page(folder, folder.parent.parent / "schedules")
    assert (folder / "report.html").read_text() == text
    assert not list(folder.glob("report.html.*"))


def test_words_of_a_table_are_no_markup(folder: Path) -> None:
    reason = "<no> answer | in `180` s & x"
    page = Page((folder / "report.html").read_text())
    assert reason in page.cells
    text = (folder / "report.md").read_text()
    assert "&lt;no&gt; answer \\| in \\`180\\` s &amp; x" in text
    assert "<no>" not in text


def test_the_markdown_links_its_figures(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(links) == 2 * 4 + 1
    assert f"figures/{FLASH}-time-8one-exact-128-uniform.png" in links
    assert all((folder / link).read_bytes().startswith(PNG) for link in links)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == set(re.findall(r'<a id="([^"]+)">', text))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        bars = [len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()]
        assert len(set(bars)) == 1, block


def row_of(text: str, caption: str, first: str) -> list[str]:
    """Cells of the row of a Markdown table after a caption, by its first cell."""
    part = text[text.index(caption) :]
    line = next(line for line in part.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_best_against_floor_baselines_and_frozen(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    text = text[text.index(f"## {FLASH}\n") :]
    frame = frame_of(synthetic_rows())
    (section,) = sections_of(FLASH, frame, None)
    best = section.best[16]
    cells = row_of(text, "The best schedule of each token count", "16")
    assert cells[1] == "confirmed"
    assert cells[2:7] == [
        f"{best.median_us:.1f}",
        "164.6",
        f"{best.ratio_to_floor:.3f}",
        f"{best.default_us:.1f}",
        f"{best.ratio_to_default:.3f}",
    ]
    assert cells[7:10] == ["0.980 (triton)", "1.234", "the same"]
    assert cells[10] == f"`{best.candidate}`"
    # An entry of another recipe serves the count, but its time is not of these rows.
    assert row_of(text, "The best schedule of each", "64")[8:10] == ["-", "another"]
    assert row_of(text, "The best schedule of each", "8192")[7] == "0.943 (deepgemm)"
    detail = row_of(text, "How far to trust", "16")
    assert detail[2] == f"{100 * best.spread:.2f}"
    assert detail[3:5] == ["9 / 3", "0 of 45"]
    ours = row_of(text, "Bench: our schedule", "16")
    assert ours[1:4] == ["deepgemm", "1.2", "1"]
    assert ours[7] == "0.943"
    assert ours[8] == f"{frame[frame['stage'] == 'bench'].iloc[0]['ratio_to_floor']:.3f}"
    assert ours[11] == "the schedule frozen now"
    assert row_of(text, "Bench: our schedule", "64")[11] == "another schedule than is frozen"


def test_baselines_are_markers_of_another_run() -> None:
    (section,) = sections_of(FLASH, frame_of(synthetic_rows()), None)
    for relative in (False, True):
        lines = {line.label: line for line in _lines(section, "#000000", relative=relative)}
        assert lines["triton (bench)"].style == lines["deepgemm (bench)"].style == "none"
        assert lines["triton (bench)"].marker != lines["deepgemm (bench)"].marker
        assert lines["best"].style == "-"


def test_unsteady_rows_and_the_spread_of_the_default(tmp_path: Path) -> None:
    default = default_schedule(PRESETS[FLASH].one_rank(), 16)
    rows = [*confirm_rows(16, default, 200.0, 1.0), *confirm_rows(16, FAST, 220.0, 1.1)]
    for row in rows[:4]:
        row["notes"] = "yardstick_drift_blocks=2"
    early = confirm_rows(16, FAST, 220.0, 1.1, run="early", notes="yardstick_drift_blocks=1")
    write_table(tmp_path, [*early, *rows])
    (_, path) = write_page(tmp_path / DEVICE, tmp_path, draw=False)
    detail = row_of(path.read_text(), "How far to trust", "16")
    assert detail[2] == "-"
    assert detail[3:5] == ["9 / 3", "4 of 18"]


def test_where_statuses_fell(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    text = text[text.index(f"## {FLASH}\n") :]
    spilled = row_of(text, "Where each status fell", "spilled")
    assert spilled[1:-1] == ["3"] * len(TOKENS) + ["21"]
    assert spilled[-1].startswith("24 bytes of register spills (21 x)")
    timeout = row_of(text, "Where each status fell", "timeout")
    assert timeout[1:-1] == ["1", *["0"] * (len(TOKENS) - 1), "1"]


def test_sensitivity_finds_the_field_that_matters() -> None:
    values = sensitivity_of(frame_of(synthetic_rows()))
    assert set(values) == {"block_m", "stages", "rows_in_flight", "num_sms"}
    rows = values["block_m"]
    assert max(rows["64"][16]) < min(rows["128"][16])
    assert min(rows["64"][8192]) > max(rows["128"][8192])
    assert sum(map(len, (rows["64"][512], rows["128"][512]))) == 35  # no failure, no duplicate


def test_traces_follow_each_run() -> None:
    old = [result_row(16, FAST, 200.0, run="", kernel="old", sm_clock_mhz=1800.0) for _ in range(5)]
    (first, second) = traces_of(frame_of([*old, *synthetic_rows()]))
    assert first.title == "kernel old, card 5be1a2c3"
    assert first.minutes is None  # written in bulk: one stamp
    assert list(first.sm_clock_mhz) == [1800.0] * 5
    assert second.minutes is not None
    assert second.minutes[0] == 0.0
    assert list(second.minutes) == sorted(second.minutes)
    assert second.sm_clock_mhz[0] < 1800  # the one near the end of the trial


def test_without_matplotlib_the_page_has_tables_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'tl_megamoe\[plot\]'"):
        figures.check_available()
    write_table(tmp_path, synthetic_rows()[:100])
    written = write_page(tmp_path / DEVICE, tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md"]
    assert len(caplog.messages) == 1
    assert "has no figures: matplotlib is not installed" in caplog.messages[0]
    assert "<img" not in written[0].read_text()
    assert "Where each status fell" in written[0].read_text()


def test_a_page_with_figures_is_not_replaced_by_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, synthetic_rows()[:100])
    write_page(tmp_path / DEVICE, tmp_path)
    before = (tmp_path / DEVICE / "report.html").read_text()
    assert "<img" in before
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ("--out", tmp_path, "--schedules", tmp_path, "--write")
    with pytest.raises(ValueError, match=r"would lose them: .*pip install .*--no-figures"):
        run(*command)
    assert (tmp_path / DEVICE / "report.html").read_text() == before
    assert run(*command, "--no-figures") == 0
    assert "<img" not in (tmp_path / DEVICE / "report.html").read_text()


def test_rows_of_the_model_and_of_failures_alone(tmp_path: Path) -> None:
    model = [
        result_row(16, s, None, source="model", predicted_us=us, registers=168, smem_bytes=9)
        for s, us in ((FAST, 190.5), (SLOW, 200.0))
    ]
    failed = result_row(64, FAST, None, status="oom", reason="no room", phase="linear1")
    write_table(tmp_path, [*model, failed])
    write_page(tmp_path / DEVICE, tmp_path)
    text = (tmp_path / DEVICE / "report.md").read_text()
    assert row_of(text, "Nothing was timed", "16") == ["16", "190.5", "168", "9", f"`{FAST.name}`"]
    assert "phase linear1 alone" in text
    assert "No candidate was timed successfully here." in text
    assert "no room" in text


def test_a_bad_table_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="no table with rows"):
        write_page(tmp_path / DEVICE)
    write_table(tmp_path, [result_row(16, FAST, 200.0)])
    (tmp_path / DEVICE / "other.csv").write_text("a,b\n1,2\n")
    write_page(tmp_path / DEVICE, tmp_path)
    assert "left out: " in caplog.text
    assert "other.csv" in caplog.text


# ---- document


def test_escapes_of_both_kinds() -> None:
    hostile = "</td><script>alert(1)</script> _x_ [a](http://b) `c` | $d$ & \\ *e*"
    table = Table(("n", "m"), ((hostile, hostile),), hostile.replace("`", ""), frozenset({"m"}))
    page = Page(to_html(hostile, [table, Words("take `a < b` & go")]))
    assert page.cells == [hostile, hostile]
    text = to_markdown(hostile, [table, Words("take `a < b` & go")], "figures")
    assert "take `a < b` &amp; go" in text
    assert escape_markdown("a_b _c_") == "a_b \\_c\\_"
    for line in text.splitlines():
        assert "<script>" not in re.sub(r"`[^`]*`", "", line)
        assert not re.search(r"(?<!\\)\]\(http", re.sub(r"`[^`]*`", "", line))


def test_numbers_stand_to_the_right() -> None:
    table = Table(("a", "b"), (("1.5", "x"), ("-", "2"), ("3 %", "4")), "t")
    assert "|---:|---|" in to_markdown("t", [table], "f")
    assert '<td class="num">1.5</td><td>x</td>' in to_html("t", [table])


# ---- figures


@pytest.mark.parametrize("places", [[0.5], [0.1, 0.1, 0.1], [0.0, 0.9, 0.85, 0.02, 0.88]])
def test_labels_are_spread_out_and_keep_their_order(places: list[float]) -> None:
    found = figures.spread_out(places, 0.1)
    pairs = sorted(zip(places, found, strict=True))
    gaps = [b[1] - a[1] for a, b in zip(pairs, pairs[1:], strict=False)]
    assert all(gap >= 0.1 - 1e-9 for gap in gaps)
    assert sum(found) == pytest.approx(sum(places))


def test_colours_of_problems_are_stable() -> None:
    assert figures.colour_of("mimo-v2.5") == figures.PROBLEM_COLOURS["mimo-v2.5"]
    names = ["mimo-v2.5", "a", "b"]
    assert figures.colour_of("a", names) != figures.colour_of("b", names)
    assert figures.colour_of("a", names) not in figures.PROBLEM_COLOURS.values()


def test_one_token_count_and_no_readings_can_be_drawn() -> None:
    line = figures.Line("best", {16: 200.0}, "#000000", bands={16: (201.0, 202.0)})
    assert figures.lines_figure("t", "s", [line], log_y=True).startswith(PNG)
    nan = float("nan")
    trace = figures.RunTrace("run", None, [16, 16], [nan, nan], [nan, nan], [nan, nan])
    assert figures.drift_figure("t", "s", [trace]).startswith(PNG)
    assert Figure("x", figures.sensitivity_figure("t", "s", {"f": {"1": {16: [1.0]}}}), "", "")
