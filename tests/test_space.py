"""The search space: what is enumerated, what the rules reject, what a limit keeps."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from tl_megamoe.explorer.cost import predict
from tl_megamoe.explorer.space import (
    NAMED_SPACES,
    best_by_model,
    enumerate_candidates,
    load_space,
)
from tl_megamoe.frozen import MATH_MODES, frozen_paths, read_frozen
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.rules import RULES
from tl_megamoe.schedule import Schedule, default_schedule

FLASH = PRESETS["deepseek-v4-flash"].one_rank()
TINY = Problem(name="tiny", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=1)


def space_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "space.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_screen_is_small(name: str) -> None:
    found = enumerate_candidates(PRESETS[name].one_rank(), 512, load_space("screen"))
    assert 45 <= len(found.schedules) <= 60  # 48 experts have more wave sizes than 32
    assert len({s.kernel_key() for s in found.schedules}) <= 31


def test_screen_holds_what_is_frozen() -> None:
    files = [read_frozen(path) for path in frozen_paths()]
    one = [(f.problem_of(e), e.schedule) for f in files for e in f.entries if e.rank_mode == "one"]
    assert {problem.name for problem, _ in one} >= set(PRESETS)
    screen = load_space("screen")
    missing = [
        (problem.name, schedule.name)
        for problem, schedule in one
        if schedule not in enumerate_candidates(problem, 512, screen).schedules
    ]
    assert missing == []


@pytest.mark.parametrize("space", ["screen", "full"])
def test_a_field_that_no_candidate_varies_does_not_exist(space: str) -> None:
    found = enumerate_candidates(FLASH, 512, load_space(space))
    own = set(found.schedules) - set(found.pinned.values())
    values = {f.name: {getattr(s, f.name) for s in own} for f in fields(Schedule)}
    assert [name for name, found_values in values.items() if len(found_values) < 2] == []


@pytest.mark.parametrize("space", NAMED_SPACES)
@pytest.mark.parametrize("problem", [FLASH, TINY], ids=lambda p: p.name)
def test_candidates_are_valid_unique_and_accounted_for(problem: Problem, space: str) -> None:
    found = enumerate_candidates(problem, 64, load_space(space))
    assert len(set(found.schedules)) == len(found.schedules)
    assert len({s.name for s in found.schedules}) == len(found.schedules)
    assert not any(s.violations(problem) for s in found.schedules)
    # What the space holds beside the pinned ones is what the rules left.
    own = found.num_points - found.num_rejected
    assert own <= len(found.schedules) <= own + len(found.pinned)
    assert sum(found.rejections.values()) >= found.num_rejected
    assert set(found.rejections) <= set(RULES)
    assert set(found.sole) == set(found.examples) == set(found.rejections)
    assert sum(found.sole.values()) <= found.num_rejected
    assert all(found.sole[rule] <= count for rule, count in found.rejections.items())
    for schedule in found.schedules:
        if schedule.order == "lag":
            assert schedule.experts_per_wave == problem.num_local_experts


def test_pinned_candidates() -> None:
    frozen = Schedule(experts_per_wave=4, rows_in_flight=7)
    found = enumerate_candidates(FLASH, 512, load_space("screen"), frozen=frozen)
    assert found.pinned["default"] == default_schedule(FLASH, 512)
    assert found.pinned["frozen"] == frozen
    classic = found.pinned["classic"]
    assert (32 * classic.dispatch_warps, 32 * classic.load_warps) == (64, 64)
    assert (classic.load_registers, classic.math_registers) == (48, 224)
    assert set(found.pinned.values()) <= set(found.schedules)


def test_the_default_is_that_of_the_recipe() -> None:
    for recipe, mode in ((Recipe(), "pingpong"), (Recipe(intermediate_group=64), "cooperative")):
        found = enumerate_candidates(FLASH, 16, load_space("demo"), recipe)
        assert found.pinned["default"] == default_schedule(FLASH, 16, recipe=recipe)
        assert found.pinned["default"].math_mode == mode


def test_a_frozen_schedule_that_became_invalid_is_no_candidate() -> None:
    frozen = Schedule(experts_per_wave=5)
    found = enumerate_candidates(FLASH, 512, load_space("screen"), frozen=frozen)
    assert "frozen" not in found.pinned
    assert frozen not in found.schedules


@pytest.mark.parametrize("limit", [1, 2, 6, 10_000, None])
def test_limit_keeps_the_best_and_the_pinned(limit: int | None) -> None:
    found = enumerate_candidates(FLASH, 512, load_space("screen"))
    chosen = best_by_model(found, FLASH, 512, limit)
    times = [predict(FLASH, s, 512).total_us for s in chosen]
    assert times == sorted(times)
    assert set(found.pinned.values()) <= set(chosen)
    if limit is None or limit > len(found.schedules):
        assert set(chosen) == set(found.schedules)
    else:
        assert len(chosen) == max(limit, len(found.pinned))
        others = set(found.schedules) - set(chosen)
        free = [s for s in chosen if s not in found.pinned.values()]
        worst = max((predict(FLASH, s, 512).total_us for s in free), default=0.0)
        assert all(predict(FLASH, s, 512).total_us >= worst for s in others)


def test_limit_must_be_positive() -> None:
    found = enumerate_candidates(FLASH, 512, load_space("screen"))
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        best_by_model(found, FLASH, 512, 0)


@pytest.mark.parametrize("space", NAMED_SPACES)
def test_every_space_has_all_math_modes(space: str) -> None:
    found = enumerate_candidates(FLASH, 512, load_space(space))
    small = space == "demo"
    assert {s.math_mode for s in found.schedules} == set(MATH_MODES) - (
        {"swapped"} if small else set()
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_virtual_ranks_share_the_multiprocessors(ranks: int) -> None:
    problem = Problem(
        name="v", hidden=1024, intermediate=1024, num_experts=48, num_topk=2, num_ranks=ranks
    )
    frozen = Schedule(experts_per_wave=1, num_sms=132, stages=3, prefetch=4)  # of a rank alone
    found = enumerate_candidates(problem, 512, load_space("screen"), None, frozen, gpu_ranks=ranks)
    grids = {s.num_sms for s in found.schedules if s.cluster_size == 1}
    assert grids == {132 // ranks, 128 // ranks}
    assert found.pinned["default"].num_sms == 132 // ranks
    assert found.pinned["frozen"] == replace(frozen, num_sms=132 // ranks)
    assert not any(s.violations(problem) for s in found.schedules)
    # Nothing is divided twice: the points are those of one rank with a smaller grid.
    alone = enumerate_candidates(problem, 512, load_space("screen"), None, frozen)
    small = {s.on_sms(s.num_sms // ranks) for s in alone.schedules}
    assert set(found.schedules) == small


def test_rejections_count_points_by_rule(tmp_path: Path) -> None:
    text = "[product]\nexperts_per_wave = [1, 5, 7]\nstages = [2, 4, 99]\n"
    found = enumerate_candidates(FLASH, 512, load_space(space_file(tmp_path, text)))
    assert found.num_points == 9
    assert found.num_rejected == 7
    assert found.rejections == {
        "wave_divides_experts": 6,
        "stages_k_blocks": 3,
        "shared_memory": 3,
    }
    # 99 stages break two rules at once: without either of them they would still be rejected.
    assert found.sole == {"wave_divides_experts": 4, "stages_k_blocks": 0, "shared_memory": 0}
    assert found.examples["wave_divides_experts"].startswith("experts_per_wave=5 does not divide")
    assert found.examples["stages_k_blocks"].startswith("stages=99 exceeds the 16 K blocks")


@pytest.mark.parametrize(
    ("word", "waves"),
    [("divisors", {1, 2, 3, 6}), ("divisors>=2", {2, 3, 6}), ("divisors>=6", {6})],
)
def test_words_for_waves(tmp_path: Path, word: str, waves: set[int]) -> None:
    text = f'[product]\nexperts_per_wave = "{word}"\nprefetch = [2]\nstages = [2]\n'
    found = enumerate_candidates(TINY, 1, load_space(space_file(tmp_path, text)))
    assert found.num_points == len(waves)
    own = {s for s in found.schedules if s.prefetch == 2 and s.stages == 2}
    assert {s.experts_per_wave for s in own} == waves


def test_divisors_and_ties(tmp_path: Path) -> None:
    text = (
        '[[base]]\nstages = 2\nprefetch = 8\n[vary]\nexperts_per_wave = "divisors"\n'
        '"order, lag" = [["lag", 2], ["wave", 0]]\n'
    )
    found = enumerate_candidates(TINY, 1, load_space(space_file(tmp_path, text)))
    # prefetch 8 is over tiny's 2 K blocks: violations alone decide, nothing is clipped.
    assert found.rejections == found.sole == {"prefetch_k_blocks": 5}
    text = text.replace("prefetch = 8", "prefetch = 2")
    found = enumerate_candidates(TINY, 1, load_space(space_file(tmp_path, text)))
    assert found.num_rejected == 0
    walks = {(s.order, s.lag, s.experts_per_wave) for s in found.schedules if s.prefetch == 2}
    assert walks >= {("wave", 0, d) for d in (1, 2, 3, 6)} | {("lag", 2, 6)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[product]\nblock_q = [1]\n", "unknown field block_q"),
        ("[product]\nblock_m = 64\n", "block_m=64 must be a list"),
        ("[product]\nblock_m = []\n", "must be a list"),
        ('[product]\nblock_m = ["64"]\n', "block_m='64' must be int, found str"),
        ('[product]\n"order, lag" = [["lag", 2, 3]]\n', "must hold 2 values"),
        ("[[base]]\nlag = true\n", "lag=True must be int, found bool"),
        ("base = 3\n", r"write base points as \[\[base\]\]"),
        ("[vary]\nlag = [1]\n", r"holds neither \[product\] nor \[\[base\]\]"),
        ('[[base]]\nmath_mode = "pong"\n', "math_mode='pong' must be one of cooperative, pingpong"),
        ('[product]\n"order, lag" = [["wav", 0]]\n', "order='wav' must be one of wave, lag"),
        ("[product]\nmath_mode = [64]\n", "math_mode=64 must be str, found int"),
        ("[other]\n", "unknown other"),
        ("vary = 3\n[[base]]\n", r"write vary as a \[vary\] table"),
        ("extends = 3\n", "extends=3 must be one name"),
        ('[product]\nlag = [0]\n"order, lag" = [["lag", 1]]\n', "two ranges of lag"),
        ('[product]\nexperts_per_wave = "halves"\n', "'halves' must be a list of values, \"div"),
        ("nonsense", "space file"),
    ],
)
def test_bad_space_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_space(space_file(tmp_path, text))


def test_unknown_space() -> None:
    with pytest.raises(ValueError, match="'wide' is neither one of screen, full"):
        load_space("wide")
    with pytest.raises(ValueError, match="space file nowhere.toml"):
        load_space("nowhere.toml")


# ---- a space that extends another


def test_extending_replaces_ranges_that_share_a_field(tmp_path: Path) -> None:
    parent = load_space("screen")
    text = 'extends = "screen"\n[vary]\nstages = [3, 6]\nblock_m = [64, 128]\n'
    found = load_space(space_file(tmp_path, text))
    assert found.bases == parent.bases
    kept = [r for r in parent.vary if not {"stages", "block_m"} & set(r[0])]
    assert list(found.vary) == [*kept, (("stages",), ((3,), (6,))), (("block_m",), ((64,), (128,)))]
    narrow = 'extends = "screen"\n[[base]]\nblock_m = 64\n'
    assert load_space(space_file(tmp_path, narrow)).bases == ({"block_m": 64},)
    assert load_space(space_file(tmp_path, narrow)).vary == parent.vary


def test_narrowing_a_product_keeps_some_of_its_candidates(tmp_path: Path) -> None:
    wide = enumerate_candidates(FLASH, 512, load_space("full"))
    text = (
        'extends = "full"\n[product]\nstages = [4]\nprefetch = [8]\n'
        "dispatch_warps = [2]\nload_warps = [2]\nnum_sms = [132]\nrows_in_flight = [3]\n"
    )
    narrow = enumerate_candidates(FLASH, 512, load_space(space_file(tmp_path, text)))
    assert set(narrow.schedules) < set(wide.schedules)
    assert {s.stages for s in narrow.schedules} == {4}
    assert len({s.experts_per_wave for s in narrow.schedules}) == 6


def test_files_extend_each_other_from_their_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "spaces"
    folder.mkdir()
    (folder / "a.toml").write_text("[product]\nstages = [2, 3]\nlag = [0]\n")
    (folder / "b.toml").write_text('extends = "a.toml"\n[product]\nstages = [4]\n')
    (folder / "c.toml").write_text('extends = "b.toml"\n[[base]]\nblock_m = 64\n')
    found = load_space("spaces/c.toml")
    assert found.name == "spaces/c.toml"
    assert found.product == ((("lag",), ((0,),)), (("stages",), ((4,),)))
    assert found.bases == ({"block_m": 64},)


def test_circles_and_unknown_parents_are_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('extends = "b.toml"\n')
    b.write_text('extends = "a.toml"\n')
    with pytest.raises(ValueError, match=r"extends in a circle: a.toml -> b.toml -> a.toml"):
        load_space(str(a))
    a.write_text('extends = "a.toml"\n')
    with pytest.raises(ValueError, match=r"extends in a circle: a.toml -> a.toml"):
        load_space(str(a))
    a.write_text('extends = "wide"\n')
    with pytest.raises(ValueError, match=r"a.toml, extends: space 'wide' is neither one of"):
        load_space(str(a))
    a.write_text('extends = "none.toml"\n')
    with pytest.raises(ValueError, match=r"a.toml, extends: space file .*none.toml"):
        load_space(str(a))
