"""The fit of the cost model: what it reads, that it finds constants again, what it writes."""

from __future__ import annotations

import argparse
import builtins
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from table_rows import row

from tl_megamoe.explorer import model
from tl_megamoe.explorer.constants import BUILT_IN, Constants, constants_path, load_constants
from tl_megamoe.explorer.cost import predict
from tl_megamoe.explorer.space import enumerate_candidates, load_space
from tl_megamoe.explorer.table import append_rows, table_path
from tl_megamoe.problem import PRESETS, Problem

FLASH = PRESETS["deepseek-v4-flash"].one_rank()
TRUE = replace(BUILT_IN, promote_clocks=190.0, tail_us=19.0, hbm_tbs=4.2, combine_tbs=3.0)
DEVICE = "nvidia-h200"


def rows_of(
    problem: Problem,
    tokens: int,
    constants: Constants,
    *,
    card: float = 1.0,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Rows of the screen whose times are the model's own, on a card that is `card` times slower."""
    rows = []
    for number, schedule in enumerate(
        enumerate_candidates(problem, tokens, load_space("screen")).schedules
    ):
        us = predict(problem, schedule, tokens, constants=constants).total_us
        noise = 1 + 0.003 * math.sin(7 * number + tokens)
        rows.append(
            row(
                **{
                    "problem": problem.name,
                    "num_tokens": tokens,
                    "candidate": schedule.name,
                    "median_us": us * card * noise,
                    "hidden": problem.hidden,
                    "intermediate": problem.intermediate,
                    "num_local_experts": problem.num_local_experts,
                    "num_topk": problem.num_topk,
                    "capacity": 8192,
                    **schedule.to_dict(),
                    "device": DEVICE,
                    "commit": "1234567",
                    **changes,
                }
            )
        )
    return rows


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    path = table_path(folder, DEVICE, FLASH.name)
    for tokens, card in ((16, 1.0), (512, 1.04), (8192, 0.97)):
        append_rows(path, rows_of(FLASH, tokens, TRUE, card=card))
    others = rows_of(FLASH, 16, TRUE)
    append_rows(path, [{**others[0], "status": "timeout", "median_us": None}])
    append_rows(path, [{**others[1], "phase": "linear1"}])
    append_rows(path, [{**others[2], "source": "model"}])
    append_rows(path, [{**others[3], "routing": "zipf:1.2"}, {**others[4], "rank_mode": "virtual"}])
    return folder


def command(results: Path, root: Path, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(run=run)
        return verb

    model.add_parser(add)
    args = parser.parse_args(["model", "--results", str(results), "--schedules", str(root), *flags])
    return int(args.run(args))


def test_groups_hold_whole_layers_of_one_rank(results: Path) -> None:
    groups, left_out = model.read_groups(results, DEVICE)
    assert left_out == model.LeftOut(layers=2)
    assert [g.num_tokens for g in groups] == [16, 512, 8192]
    for group in groups:
        candidates = enumerate_candidates(FLASH, group.num_tokens, load_space("screen")).schedules
        assert {p.schedule for p in group.points} == set(candidates)
        assert group.num_rows == len(candidates)
        assert group.commits == ("1234567",)


def test_repeated_rows_of_a_candidate_are_one_point(tmp_path: Path) -> None:
    path = table_path(tmp_path, DEVICE, FLASH.name)
    row = rows_of(FLASH, 16, BUILT_IN)[0]
    append_rows(path, [{**row, "seed": s, "median_us": us} for s, us in enumerate((200, 210, 290))])
    append_rows(path, [{**row, "run": "other", "median_us": 400.0}])
    groups, _ = model.read_groups(tmp_path, DEVICE)
    times = [([round(math.exp(t)) for t in g.log_us], g.num_rows) for g in groups]
    assert times == [([210], 3), ([400], 1)]


def test_only_the_screen_of_the_kernel_measured_last_counts(tmp_path: Path) -> None:
    path = table_path(tmp_path, DEVICE, FLASH.name)
    times = {"old": "2026-01-01T00:00:00+00:00", "new": "2026-02-01T00:00:00+00:00"}
    rows = rows_of(FLASH, 16, BUILT_IN)[:6]
    for kernel, stage in (("new", "screen"), ("new", "confirm"), ("old", "screen")):
        same = {"kernel": kernel, "stage": stage, "measured_at": times[kernel]}
        append_rows(path, [{**row, **same} for row in rows])
    later = {"kernel": "newest", "stage": "bench", "measured_at": "2026-03-01T00:00:00+00:00"}
    append_rows(path, [{**rows[0], **later}])
    (group,), left_out = model.read_groups(tmp_path, DEVICE)
    assert (group.kernel, group.num_rows) == ("new", 6)
    assert left_out == model.LeftOut(stages=7, kernels=6)
    assert str(left_out) == "6 rows of earlier kernels, 7 rows of other stages"


def test_a_card_that_drifts_does_not_change_the_order(tmp_path: Path) -> None:
    """Rounds on a card that slows down, in which one candidate is measured late only."""
    fast, slow = rows_of(FLASH, 16, BUILT_IN)[:2]
    path = table_path(tmp_path, DEVICE, FLASH.name)
    for number, (card, timed) in enumerate(
        ((1.0, {"slow": 1.1}), (1.1, {"slow": 1.1}), (1.3, {"fast": 0.9, "slow": 1.1}))
    ):
        for name, ratio in timed.items():
            row = {"fast": fast, "slow": slow}[name]
            beside = {"baseline_us": 200 * card, "ratio_to_baseline": ratio}
            us = {"median_us": 200 * card * ratio, "observation": number}
            append_rows(path, [{**row, **beside, **us}])
    (group,), _ = model.read_groups(tmp_path, DEVICE)
    found = {
        point.schedule.name: math.exp(t)
        for point, t in zip(group.points, group.log_us, strict=True)
    }
    # 240 us is the median baseline of the rows; fast ran for 234 us, slow for a median of 242.
    assert found[fast["candidate"]] == pytest.approx(0.9 * 240, rel=1e-5)
    assert found[slow["candidate"]] == pytest.approx(1.1 * 240, rel=1e-5)


def test_a_mean_counts_cells_and_not_rows(results: Path) -> None:
    groups, _ = model.read_groups(results, DEVICE)
    cells = [model.score([group], BUILT_IN).correlation for group in groups]
    shorter = replace(groups[0], points=groups[0].points[:6], log_us=groups[0].log_us[:6])
    few = model.score([shorter], BUILT_IN).correlation
    assert model.score(groups, BUILT_IN).correlation == pytest.approx(sum(cells) / 3)
    # Two runs of one cell are one cell.
    both = (few + cells[0]) / 2
    found = model.score([shorter, *groups], BUILT_IN).correlation
    assert found == pytest.approx((both + cells[1] + cells[2]) / 3)


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no measured rows of a whole layer"):
        model.read_groups(tmp_path, DEVICE)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4, 5], [10, 20, 30, 40, 900], 1.0),
        ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], -1.0),
        ([1, 1 + 1e-13, 2, 3, 4], [2, 1, 3, 4, 5], 0.9747),
        ([1, 2, 3, 4], [1, 2, 3, 4], None),
        ([7, 7, 7, 7, 7], [1, 2, 3, 4, 5], None),
    ],
)
def test_spearman(a: list[float], b: list[float], expected: float | None) -> None:
    found = model.spearman(a, b)
    assert math.isnan(found) if expected is None else found == pytest.approx(expected, abs=1e-4)


def test_a_score_ranks_inside_groups_only(results: Path) -> None:
    groups, _ = model.read_groups(results, DEVICE)
    found = model.score(groups, TRUE)
    # Noise of 0.3 % turns candidates round that the model puts closer together or ties.
    assert found.correlation > 0.85
    assert found.error < 0.05
    slower = [replace(g, log_us=tuple(t + 1.0 for t in g.log_us)) for g in groups]
    assert model.score(slower, TRUE).correlation == pytest.approx(found.correlation)
    assert model.score(slower, TRUE).error > 0.5


def test_a_fit_finds_constants_again(results: Path) -> None:
    pytest.importorskip("scipy")
    groups, _ = model.read_groups(results, DEVICE)
    found = model.fit(groups)
    before, after = model.score(groups, BUILT_IN), model.score(groups, found)
    assert after.error < before.error
    assert after.correlation > before.correlation - 0.01
    # The promotion shows in how tiles compare, whatever the card's speed.
    assert abs(found.promote_clocks - TRUE.promote_clocks) < abs(130.0 - TRUE.promote_clocks) / 2
    for name, (low, high) in Constants.bounds().items():
        assert low <= getattr(found, name) <= high


def test_held_out_problems_are_not_fitted(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = model.read_groups(results, DEVICE)
    seen: list[set[tuple[str, int]]] = []

    def fake(chosen: model.Groups) -> Constants:
        seen.append({(g.problem, g.num_tokens) for g in chosen})
        return TRUE

    monkeypatch.setattr(model, "fit", fake)
    fitted = model.fit_and_judge(groups)
    assert fitted.held_out_by == "token count"
    assert [len(s) for s in seen] == [3, 2, 2, 2]
    assert fitted.held_out.correlation == pytest.approx(fitted.after.correlation)
    seen.clear()
    other = [replace(g, problem="other") for g in groups]
    assert model.fit_and_judge([*groups, *other]).held_out_by == "problem"
    assert [{p for p, _ in s} for s in seen[1:]] == [{"other"}, {FLASH.name}]
    with pytest.raises(ValueError, match="one token count"):
        model.fit_and_judge(groups[:1])


def test_the_command_fits_writes_and_shows(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(model, "fit", lambda groups: TRUE)
    assert command(results, tmp_path, "--fit") == 0
    assert not constants_path(DEVICE, tmp_path).exists()
    shown = capsys.readouterr().out
    assert "held out, each token count once" in shown
    assert "kernel abc; not in it: 2 rows of several ranks or other routings\n" in shown
    assert command(results, tmp_path, "--fit", "--write") == 0
    assert load_constants(DEVICE, tmp_path) == TRUE
    data = json.loads(constants_path(DEVICE, tmp_path).read_text())
    table = data["provenance"]["tables"][f"results/{DEVICE}/{FLASH.name}.csv"]
    assert table["kernels"] == ["abc"]
    assert table["commits"] == ["1234567"]
    assert table["rows"] == data["provenance"]["rows"]
    assert (
        data["provenance"]["median_error"]["after"] < data["provenance"]["median_error"]["before"]
    )
    capsys.readouterr()
    # The constants in use are as good: nothing is written a second time.
    assert command(results, tmp_path, "--fit", "--write") == 1
    assert "no worse than the fitted ones" in capsys.readouterr().err
    # A fit that ranks worse what it has not seen is no gain, whatever it does on its own rows.
    judged = model.fit_and_judge(model.read_groups(results, DEVICE)[0])
    worse = replace(judged, held_out=replace(judged.held_out, correlation=0.1))
    monkeypatch.setattr(model, "fit_and_judge", lambda groups, say: worse)
    assert command(results, tmp_path / "other", "--fit", "--write") == 1
    assert "has not seen it ranks at 0.100" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert command(results, tmp_path) == 0
    shown = capsys.readouterr().out
    assert f"constants: {constants_path(DEVICE, tmp_path)}" in shown
    lines = [line for line in shown.splitlines() if line.startswith((FLASH.name, "all"))]
    assert [line[20:27].strip() for line in lines] == ["16", "512", "8192", "mean", "mean"]
    assert [line.endswith("  (terms chosen on it)") for line in lines] == [False] * 3 + [
        True,
        False,
    ]
    cells = [float(line.split()[4]) for line in lines]
    assert cells[3] == pytest.approx(sum(cells[:3]) / 3, abs=2e-3)
    assert cells[4] == cells[3]


def test_constants_are_shown_without_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, tmp_path) == 0
    shown = capsys.readouterr()
    assert "constants: built in" in shown.out
    assert "no correlations: no measured rows" in shown.err
    assert all(name in shown.out for name in Constants.describe())


def test_wrong_arguments(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="add --fit"):
        command(results, tmp_path, "--write")
    importing = builtins.__import__

    def without_scipy(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "scipy":
            raise ImportError("No module named 'scipy'")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ValueError, match=r"a fit needs scipy .*pip install 'tl_megamoe\[model\]'"):
        command(results, tmp_path, "--fit")
