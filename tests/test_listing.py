"""`tl-megamoe list`: candidates, names, the space and its rules in words."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from tl_megamoe.explorer import listing
from tl_megamoe.explorer.space import enumerate_candidates, load_space
from tl_megamoe.problem import PRESETS
from tl_megamoe.rules import RULES

NAME = "deepseek-v4-flash"
FLASH = PRESETS[NAME].one_rank()
SPACE = """
[product]
experts_per_wave = [1, 5, 32]
"order, lag" = [["wave", 0], ["lag", 4]]
stages = [4, 5]
"""


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(run=run)
        return verb

    listing.add_parser(add)
    args = parser.parse_args(["list", "--problem", NAME, *flags])
    assert args.run(args) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def space(tmp_path: Path) -> str:
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return str(path)


def test_candidates_come_by_predicted_time(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, "--tokens", "64")
    found = enumerate_candidates(FLASH, 64, load_space("screen"))
    kernels = len({s.kernel_key() for s in found.schedules})
    assert lines[0] == (
        f"{NAME}, 64 tokens, space screen: {len(found.schedules)} candidates in {kernels} kernels"
    )
    rows = [line.split() for line in lines[lines.index("candidates by predicted time, us:") + 1 :]]
    assert [float(row[0]) for row in rows] == sorted(float(row[0]) for row in rows)
    assert {row[1] for row in rows} == {s.name for s in found.schedules}
    assert [row[1] for row in rows if "default" in row[2:]] == [found.pinned["default"].name]


@pytest.mark.parametrize("limit", [3, 10])
def test_names_are_all_that_names_prints(capsys: pytest.CaptureFixture[str], limit: int) -> None:
    lines = listed(capsys, "--names", "--limit", str(limit))
    assert len(lines) == limit
    assert set(lines) <= {
        s.name for s in enumerate_candidates(FLASH, 512, load_space("screen")).schedules
    }


def test_every_rule_is_explained_with_what_it_removes(
    capsys: pytest.CaptureFixture[str], space: str
) -> None:
    lines = listed(capsys, "--explain", "--space", space)
    found = enumerate_candidates(FLASH, 512, load_space(space))
    start = next(n for n, line in enumerate(lines) if line.startswith("rules: "))
    assert lines[start] == (
        f"rules: {found.num_rejected} of {found.num_points} points break at least one"
    )
    pattern = re.compile(r"  (\w+) +(\d+) +(\d+)  (.+)")
    table = {m[1]: m for line in lines[start:] if (m := pattern.fullmatch(line))}
    assert set(table) == set(RULES)
    for rule, match in table.items():
        assert int(match[2]) == found.rejections.get(rule, 0)
        assert int(match[3]) == found.sole.get(rule, 0)
        assert match[4] == RULES[rule]
    # Waves of 5 with either depth; 5 stages with any of four walks; both at once are one point.
    counts = {rule: (int(m[2]), int(m[3])) for rule, m in table.items() if m[2] != "0"}
    assert counts == {"shared_memory": (4, 3), "wave_divides_experts": (2, 1)}
    removing = [int(m[2]) for m in table.values()]
    assert removing == sorted(removing, reverse=True)
    text = " ".join(" ".join(lines[start:]).split())
    assert "as: experts_per_wave=5 does not divide num_local_experts=32" in text
    assert "as: stages=5 with block_m=128 and block_n=256 takes" in text


def test_the_space_is_shown_as_data(capsys: pytest.CaptureFixture[str], space: str) -> None:
    lines = [" ".join(line.split()) for line in listed(capsys, "--explain", "--space", space)]
    assert "experts_per_wave 3: 1 5 32" in lines
    assert "order, lag 2: wave/0 lag/4" in lines
    lines = [" ".join(line.split()) for line in listed(capsys, "--explain")]
    assert "experts_per_wave 3: 8 16 32" in lines
    assert "* math_mode pingpong, block_m 64, stages 4, evict_first 1" in lines
    assert any(line.startswith("classic ") for line in lines)


def test_virtual_ranks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, "--ranks", "4", "--rank-mode", "virtual", "--space", "demo")
    assert lines[0].startswith(f"{NAME}, 4 virtual ranks, 512 tokens, space demo: ")
    assert all("-sm33-" in line for line in lines if "-n256.256-" in line)
