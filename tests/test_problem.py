"""Problem sizes: presets, files, one-rank views, and what each broken rule says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tl_megamoe import PRESETS, Problem, load_problem
from tl_megamoe.problem import divisors_of


def test_flags_name_the_problem() -> None:
    flash = PRESETS["deepseek-v4-flash"]
    assert flash.flags() == flash.one_rank().flags() == "--problem deepseek-v4-flash"
    four = load_problem("deepseek-v4-flash", num_ranks=4).one_rank()
    assert four.flags() == "--problem deepseek-v4-flash --num-ranks 4"
    own = Problem(name="own", hidden=5120, intermediate=1536, num_experts=160, num_topk=8)
    assert own.one_rank().flags() == (
        "--hidden 5120 --intermediate 1536 --num-experts 160 --num-topk 8 --num-ranks 8"
    )


@pytest.mark.parametrize("name", ["../../escape", "two words", "", "a/b", ".hidden", 5])
def test_a_name_is_a_file_name(name: object) -> None:
    with pytest.raises(ValueError, match="it names files"):
        Problem(name=name, hidden=128, intermediate=128, num_experts=8, num_topk=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek-v4-flash", (4096, 2048, 256, 6, 8)),
        ("deepseek-v4-pro", (7168, 3072, 384, 6, 8)),
        ("mimo-v2.5", (4096, 2048, 256, 8, 8)),
        ("mimo-v2.5-pro", (6144, 2048, 384, 8, 8)),
    ],
)
def test_presets(name: str, sizes: tuple[int, ...]) -> None:
    p = PRESETS[name]
    assert (p.hidden, p.intermediate, p.num_experts, p.num_topk, p.num_ranks) == sizes
    assert load_problem(name) is not None
    assert load_problem(name) == p


def test_one_rank_keeps_what_the_rank_receives() -> None:
    p = PRESETS["deepseek-v4-pro"]
    view = p.one_rank()
    assert (view.num_experts, view.num_ranks, view.num_local_experts) == (48, 1, 48)
    assert (view.rank_mode, view.table_num_ranks) == ("one", 8)
    assert (view.hidden, view.intermediate, view.num_topk, view.name) == (7168, 3072, 6, p.name)
    assert view.one_rank() is view
    assert p.rank_mode == "real"


def test_key_ignores_names() -> None:
    a = Problem(name="a", hidden=128, intermediate=128, num_experts=8, num_topk=2, num_ranks=1)
    b = Problem(name="b", hidden=128, intermediate=128, num_experts=64, num_topk=2)
    assert a.key() == b.one_rank().key()
    assert a.key() != b.key()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden": 2880}, ["hidden=2880", "multiple of 128", "2944", "2816"]),
        ({"intermediate": 100}, ["intermediate=100", "128"]),
        ({"num_experts": 0}, ["num_experts=0", "positive"]),
        ({"num_topk": True}, ["num_topk=True"]),
        ({"num_ranks": 7}, ["num_ranks=7", "num_experts=256", "Divisors: 1, 2, 4, 8"]),
    ],
)
def test_broken_rules(change: dict[str, int], parts: list[str]) -> None:
    sizes = {"hidden": 4096, "intermediate": 2048, "num_experts": 256, "num_topk": 6}
    with pytest.raises(ValueError, match="problem 'x'") as caught:
        Problem(name="x", **{**sizes, **change})
    for part in parts:
        assert part in str(caught.value)


def test_overrides_show_in_the_name() -> None:
    assert load_problem("mimo-v2.5", num_ranks=4).name == "mimo-v2.5"
    changed = load_problem("mimo-v2.5", num_topk=4, hidden=2048)
    assert changed.name == "mimo-v2.5-hidden2048-numtopk4"
    assert (changed.num_topk, changed.hidden) == (4, 2048)


@pytest.mark.parametrize("table", ["", "[problem]\n"])
def test_toml(tmp_path: Path, table: str) -> None:
    path = tmp_path / "small.toml"
    path.write_text(table + "hidden=256\nintermediate=128\nnum_experts=12\nnum_topk=3\n")
    p = load_problem(path, num_ranks=3)
    assert (p.name, p.hidden, p.num_local_experts) == ("small", 256, 4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hidden=256", "missing field intermediate, num_experts, num_topk"),
        ("hidden=256\nintermediate=128\nnum_experts=2\nnum_topk=1\nwidth=3", "unknown field width"),
        ("hidden=", "problem file"),
        ("problem=3", "must be a table"),
    ],
)
def test_bad_toml(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=part):
        load_problem(path)


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ValueError, match="deepseek-v4-flash, deepseek-v4-pro"):
        load_problem("deepseek")


def test_divisors_of_large_numbers() -> None:
    for n in (1, 2, 12, 36, 97, 384, 1024):
        assert divisors_of(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert len(divisors_of(10**12)) == 13 * 13
    with pytest.raises(
        ValueError, match="num_ranks=8 does not divide num_experts=1000000000000001"
    ):
        Problem(
            name="absurd",
            hidden=128,
            intermediate=128,
            num_experts=10**15 + 1,
            num_topk=1,
            num_ranks=8,
        )
