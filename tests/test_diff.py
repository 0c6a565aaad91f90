"""Two runs side by side: what changed, what exceeds the noise, and what does not compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_rows import FAST, SLOW, confirm_rows, frame_of, result_row, run, write_table

from tl_megamoe.explorer.diff import compare, read_side, render_diff
from tl_megamoe.schedule import Schedule

THIRD = Schedule(experts_per_wave=32, stages=2)


def of(*rows: dict[str, Any]) -> Any:
    return frame_of(rows)


def test_change_of_time_and_of_the_ratio_to_the_floor() -> None:
    """The card was slower in B: time went up, the ratio to the floor went down."""
    old = of(result_row(512, FAST, 200.0, floor_us=100.0))
    new = of(result_row(512, FAST, 220.0, floor_us=125.0))
    (cell,) = compare(old, new).cells
    assert cell.best is not None
    assert cell.best.time == pytest.approx(0.10)
    assert cell.best.ratio == pytest.approx(1.76 / 2.0 - 1)
    assert cell.best.noise == pytest.approx(2**0.5 * 0.015)
    assert cell.best.verdict == "unclear"
    text = render_diff(compare(old, new))
    assert "+10.0 %" in text
    assert "-12.0 %" in text
    assert text.splitlines()[-1].split("%")[-1].split()[0] == "unclear"
    better = compare(old, of(result_row(512, FAST, 190.0, floor_us=110.0)))
    assert render_diff(better).splitlines()[-1].split("%")[-1].split()[0] == "faster"


@pytest.mark.parametrize(
    ("us", "verdict"), [(200.0, "unchanged"), (203.0, "unchanged"), (210.0, "slower")]
)
def test_noise_of_screened_rows_is_half_of_p10_to_p90(us: float, verdict: str) -> None:
    old, new = of(result_row(16, FAST, 200.0)), of(result_row(16, FAST, us))
    assert verdict in render_diff(compare(old, new)).splitlines()[-1]


def test_confirmed_candidates_have_the_noise_of_their_spread() -> None:
    old = frame_of(confirm_rows(16, FAST, 200.0, 0.95))
    new = frame_of(confirm_rows(16, FAST, 208.0, 0.95))
    (cell,) = compare(old, new).cells
    (change,) = cell.candidates
    assert change.old.stage == change.new.stage == "confirm"
    # Three times -1, 0 and +1 %: deviations with a median of 1 %, over nine rounds.
    assert change.noise == pytest.approx(2**0.5 * 2 * 1.2533 * 1.4826 / 9**0.5 / 100, rel=1e-3)
    assert change.verdict == "slower"


@pytest.mark.parametrize(
    ("us", "floor", "verdict"),
    [
        (200.0, 110.0, "unclear"),  # the yardstick alone
        (220.0, 110.0, "unclear"),  # the time alone: so the yardstick too
        (220.0, 125.0, "unclear"),
        (180.0, 100.0, "faster"),
        (220.0, 100.0, "slower"),
        (201.0, 100.0, "unchanged"),
    ],
)
def test_time_and_ratio_must_agree(us: float, floor: float, verdict: str) -> None:
    old = of(result_row(512, FAST, 200.0, floor_us=100.0))
    diff = compare(old, of(result_row(512, FAST, us, floor_us=floor)))
    (cell,) = diff.cells
    assert [change.verdict for change in (cell.best, *cell.candidates) if change] == [verdict] * 2
    text = render_diff(diff)
    assert f"512 tokens: 1 candidate ok in both: 1 {verdict}" in text
    assert "the yardsticks of the runs differ" in text


def test_a_screened_row_is_no_surer_than_a_round() -> None:
    """Its p10 to p90 is within a few milliseconds; rounds of the same cell lie further apart."""
    rounds = confirm_rows(16, THIRD, 250.0, 1.1)
    sides = [frame_of([result_row(16, FAST, us), *rounds]) for us in (200.0, 206.0)]
    (cell,) = compare(*sides).cells
    found = {change.old.candidate: change for change in cell.candidates}
    assert found[FAST.name].noise == pytest.approx(2**0.5 * 2 * 1.4826 / 100, rel=1e-3)
    assert found[FAST.name].verdict == "unchanged"
    assert found[THIRD.name].noise < found[FAST.name].noise


def test_candidates_by_size_of_change_and_those_of_one_side() -> None:
    old = of(
        result_row(16, FAST, 200.0),
        result_row(16, SLOW, 220.0),
        result_row(16, THIRD, 230.0),
        result_row(16, Schedule(), 240.0),
    )
    new = of(
        result_row(16, FAST, 201.0),
        result_row(16, SLOW, 198.0),
        result_row(16, THIRD, None, status="timeout", reason="it hung"),
        result_row(16, Schedule(stages=5), 240.0),
        result_row(64, FAST, 200.0),
    )
    diff = compare(old, new)
    (cell,) = diff.cells
    assert [c.old.candidate for c in cell.candidates] == [SLOW.name, FAST.name]
    assert cell.statuses == {THIRD.name: ("ok", "timeout")}
    assert cell.only_old == [Schedule().name]
    assert cell.only_new == [Schedule(stages=5).name]
    assert cell.best is not None
    assert (cell.best.old.candidate, cell.best.new.candidate) == (FAST.name, SLOW.name)
    text = render_diff(diff)
    assert f"{FAST.name} -> {SLOW.name}" in text
    assert f"ok -> timeout: {THIRD.name}" in text
    assert "2 candidates ok in both: 1 faster, 1 unchanged" in text
    assert text.splitlines()[-1].startswith("only in B: deepseek-v4-flash, 8 ranks (one)")


@pytest.mark.parametrize("column", ["card", "kernel", "commit"])
def test_other_cards_and_kernels_are_said(column: str) -> None:
    old = of(result_row(16, FAST, 200.0))
    new = of(result_row(16, FAST, 200.0, **{column: "other"}))
    text = render_diff(compare(old, new))
    assert f"{column}s differ: A {old[column][0]}; B other" in text
    assert "compare only together with / floor" in text
    assert "compare only together with / floor" not in render_diff(compare(old, old))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "nvidia-h100"}, "A is of nvidia-h200 and B of nvidia-h100"),
        ({"problem": "mimo-v2.5"}, "A has deepseek-v4-flash and B has mimo-v2.5"),
        ({"hidden": 2048}, "'deepseek-v4-flash' is another one"),
    ],
)
def test_what_does_not_compare(fields: dict[str, Any], message: str) -> None:
    old, new = of(result_row(16, FAST, 200.0)), of(result_row(16, FAST, 200.0, **fields))
    with pytest.raises(ValueError, match=message):
        compare(old, new)


def test_settings_stay_apart() -> None:
    old = of(result_row(16, FAST, 200.0), result_row(16, FAST, 300.0, routing="hot1"))
    new = of(result_row(16, FAST, 200.0), result_row(16, FAST, 400.0, recipe="pow2-64"))
    diff = compare(old, new)
    assert len(diff.cells) == len(diff.cells_only_old) == len(diff.cells_only_new) == 1
    assert "hot1" in diff.cells_only_old[0]
    assert "pow2-64" in diff.cells_only_new[0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_table(tmp_path / "a", [result_row(t, FAST, 200.0) for t in (16, 64)])
    b = write_table(tmp_path / "b", [result_row(t, FAST, 230.0) for t in (16, 64)])
    assert run("--diff", a, b, "--tokens", "64") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"A: {a}\nB: {b}\ndevice nvidia-h200\n")
    assert "64 tokens: 1 candidate ok in both: 1 slower" in text
    assert "16 tokens" not in text
    with pytest.raises(ValueError, match="no row of .* is left"):
        run("--diff", a, b, "--tokens", "512")
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(ValueError, match="the table has no rows"):
        read_side(empty)
