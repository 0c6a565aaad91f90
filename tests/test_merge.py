"""Tables of several machines as one: nothing lost, nothing twice, nothing mixed unsaid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from table_rows import as_schema, row

from tl_megamoe.explorer.merge import add_parser, join_tables, merge
from tl_megamoe.explorer.table import (
    COLUMNS,
    RESUME_KEY,
    TableError,
    append_rows,
    finished_keys,
    read_table,
)

PUBLISHED = Path(__file__).resolve().parents[1] / "results/nvidia-h200/deepseek-v4-flash.csv"


def at(second: int, **fields: Any) -> dict[str, Any]:
    return row(measured_at=f"2026-11-29T15:00:{second:02}+00:00", **fields)


def table(path: Path, *rows: dict[str, Any]) -> Path:
    append_rows(path, list(rows))
    return path


def command(*words: str) -> int:
    """Run the verb as cli.py does."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)

    def add(name: str, run: Any, text: str) -> Any:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(command=run)
        return sub

    add_parser(add)
    args = parser.parse_args(["merge", *words])
    return int(args.command(args))


def assert_unique(path: Path) -> None:
    assert len(finished_keys(path)) == len(read_table(path))


def test_rows_of_all_files_by_time(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", at(1), at(4, num_tokens=32), at(4, num_tokens=33))
    b = table(tmp_path / "b.csv", at(3, num_tokens=64), at(4, num_tokens=65))
    frame = merge([a, b])
    assert frame["num_tokens"].tolist() == [16, 64, 32, 33, 65]
    assert str(frame["registers"].dtype) == "Int64"
    assert merge([b, a])["num_tokens"].tolist() == [16, 64, 65, 32, 33]


def test_times_of_other_zones_are_compared_as_times(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", row(measured_at="2026-11-29T15:00:00+00:00"))
    b = table(tmp_path / "b.csv", row(num_tokens=64, measured_at="2026-11-29T15:30:00+01:00"))
    assert merge([a, b])["num_tokens"].tolist() == [64, 16]
    table(b, row(num_tokens=65, measured_at="noon"))
    with pytest.raises(TableError, match="b.csv: measured_at 'noon' is not an ISO 8601 time"):
        merge([a, b])


def test_equal_rows_are_kept_once(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", at(1), at(2, num_tokens=32))
    b = table(tmp_path / "b.csv", at(1), at(3, num_tokens=64))
    merged = join_tables([a, b])
    assert merged.frame["num_tokens"].tolist() == [16, 32, 64]
    assert (merged.equal, merged.renumbered) == (1, 0)
    assert merged.read == {a: 2, b: 2}
    again = join_tables([a, a, b])  # one file named twice is one file
    assert again.read == {a: 2, b: 2}


def test_the_same_work_on_two_machines_is_kept_twice(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", at(5, card="aaaa"), at(6, card="aaaa", observation=1))
    b = table(tmp_path / "b.csv", at(1, card="bbbb", median_us=210), at(2, num_tokens=64))
    merged = join_tables([a, b])
    assert merged.renumbered == 1
    frame = merged.frame
    found = frame[frame["num_tokens"] == 16][["card", "observation"]].values.tolist()
    # The earliest keeps its number, the number that is taken becomes the next free one.
    assert found == [["bbbb", 0], ["aaaa", 2], ["aaaa", 1]]
    assert not frame.duplicated(list(RESUME_KEY)).any()
    assert merged.count("card") == {"aaaa": 2, "bbbb": 1, "": 1}


def test_a_merged_table_joins_its_sources_again_without_doubles(tmp_path: Path) -> None:
    failed = {"status": "timeout", "median_us": None}
    a = table(tmp_path / "a.csv", at(1), at(2, observation=1, **failed), at(2, **failed, seed=1))
    b = table(tmp_path / "b.csv", at(3, median_us=210), at(4, median_us=211))  # searched --again
    out = tmp_path / "all.csv"
    assert command(str(a), str(b), "--out", str(out)) == 0
    assert read_table(out)["observation"].tolist() == [0, 1, 0, 2, 3]
    for order in ((out, a, b), (b, out, a), (b, a, out)):
        merged = join_tables(order)
        assert len(merged.lines) == 5, order
        assert not merged.frame.duplicated(list(RESUME_KEY)).any()
    table(b, at(9, num_tokens=64))  # the search goes on: its new row comes along
    assert command(str(out), str(b), "--out", str(out)) == 0
    assert len(read_table(out)) == 6


def test_failures_that_look_alike_stay_apart(tmp_path: Path) -> None:
    failed = {"status": "oom", "median_us": None, "stage": "confirm"}
    a = table(tmp_path / "a.csv", *(at(1, observation=n, **failed) for n in range(3)))
    b = table(tmp_path / "b.csv", *(at(1, observation=n, **failed) for n in range(2)))
    assert merge([a])["observation"].tolist() == [0, 1, 2]
    assert merge([b, a])["observation"].tolist() == [0, 1, 2]


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"device": "nvidia-h100"}, "2 values of device: nvidia-h200 in .*a.csv; nvidia-h100 in .*b"),
    ({"problem": "q"}, r"2 values of problem: p \(hidden=4096.* in .*a.csv; q \(hidden"),
    ({"hidden": 2048}, "hidden=4096.* in .*a.csv; p .hidden=2048.*Problems never mix"),
    ({"num_topk": 8}, "num_topk=8"),
    ({"num_local_experts": 16}, "num_experts=256. in .*num_experts=128. in"),
]


@pytest.mark.parametrize(("fields", "message"), DIFFERENT)
def test_devices_and_problems_never_mix(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    a, b = table(tmp_path / "a.csv", at(1)), table(tmp_path / "b.csv", at(2, **fields))
    with pytest.raises(ValueError, match=message):
        join_tables([a, b], ["recipes", "kernels"])


def test_views_and_virtual_ranks_of_one_layer_are_one_problem(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", at(1))
    virtual = {"num_ranks": 4, "rank_mode": "virtual", "num_local_experts": 64}
    b = table(tmp_path / "b.csv", at(2, **virtual))
    assert merge([a, b])["num_ranks"].tolist() == [8, 4]


@pytest.mark.parametrize(
    ("word", "fields", "message"),
    [
        ("recipes", {"recipe": "pow2-64"}, "recipe differs: .*a.csv has exact-128; .*b.csv has"),
        ("kernels", {"kernel": "def"}, "kernel differs: .*a.csv has abc; .*b.csv has def.*add --a"),
    ],
)
def test_other_recipes_and_kernels_are_said_to_be_mixed(
    tmp_path: Path, word: str, fields: dict[str, Any], message: str
) -> None:
    a, b = table(tmp_path / "a.csv", at(1)), table(tmp_path / "b.csv", at(2, **fields))
    with pytest.raises(ValueError, match=message):
        join_tables([a, b])
    with pytest.raises(ValueError, match=message):
        join_tables([a, b], {"recipes", "kernels"} - {word})
    assert len(merge([a, b], [word])) == 2
    # Files that hold the same ones mix nothing that was not mixed before.
    table(a, at(3, **fields))
    table(b, at(4))
    assert len(merge([a, b])) == 4


def test_values_stay_as_they_were_written_whatever_the_schema(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", at(1, notes="rel_error=1e-3"))
    a.write_text(as_schema(a.read_text(), 2).replace("205.5", "205.50001234"))
    b = table(tmp_path / "b.csv", at(2, num_tokens=64))
    before = a.read_bytes()
    out = tmp_path / "out.csv"
    assert command(str(a), str(b), "--out", str(out)) == 0
    assert a.read_bytes() == before
    assert ",205.50001234," in out.read_text()
    assert read_table(out)["notes"].tolist() == ["rel_error=1e-3", ""]
    assert out.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_the_published_table_survives(tmp_path: Path) -> None:
    published = read_table(PUBLISHED)
    merged = join_tables([PUBLISHED, PUBLISHED])
    assert (merged.equal, len(merged.lines)) == (0, len(published))
    assert sorted(merged.frame["candidate"]) == sorted(published["candidate"])
    assert not merged.frame.duplicated(list(RESUME_KEY)).any()
    assert merged.frame["measured_at"].is_monotonic_increasing


def test_the_command_reports_and_places_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = table(tmp_path / "a.csv", at(1, card="aaaa"), at(2, num_tokens=32, card="aaaa"))
    oom = {"status": "oom", "median_us": None, "card": "bbbb"}
    b = table(tmp_path / "b.csv", at(2, num_tokens=32, card="aaaa"), at(3, **oom))
    assert command(str(a), str(b), "--out", str(tmp_path / "results")) == 0
    out = tmp_path / "results" / "nvidia-h200" / "p.csv"
    assert len(read_table(out, "nvidia-h200")) == 3
    assert_unique(out)
    said = capsys.readouterr()
    assert said.out == f"{out}: 3 rows\n"
    assert said.err.splitlines() == [
        f"{a}: 2 rows",
        f"{b}: 2 rows",
        "1 equal rows kept once; 1 rows of work that was done more than once got another "
        "observation number",
        "by card: 2 aaaa, 1 bbbb",
        "by status: 2 ok, 1 oom",
    ]


def test_rows_of_an_existing_file_are_not_lost(tmp_path: Path) -> None:
    a, b = table(tmp_path / "a.csv", at(1)), table(tmp_path / "b.csv", at(2, num_tokens=64))
    out = table(tmp_path / "out.csv", at(3, num_tokens=128), at(1))
    before = out.read_bytes()
    words = [str(a), str(b), "--out", str(out)]
    with pytest.raises(ValueError, match="out.csv holds 1 rows that are in none of the inputs"):
        command(*words)
    assert out.read_bytes() == before
    assert command(str(out), *words) == 0  # an input: its rows stay
    assert read_table(out)["num_tokens"].tolist() == [16, 64, 128]
    assert command(*words, "--force") == 0
    assert read_table(out)["num_tokens"].tolist() == [16, 64]
    assert command(*words) == 0  # nothing would be lost
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "b.csv", "out.csv"]


def test_files_that_are_no_tables_are_named(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", at(1))
    with pytest.raises(ValueError, match="none.csv: no such table"):
        join_tables([a, tmp_path / "none.csv"])
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match="x.csv: its header"):
        join_tables([a, tmp_path / "x.csv"])
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(ValueError, match="no rows in .*e.csv"):
        command(str(tmp_path / "e.csv"), "--out", str(tmp_path / "results"))
    assert not (tmp_path / "results").exists()
    with pytest.raises(SystemExit):
        command(str(a), "--out", str(tmp_path / "o.csv"), "--allow", "devices")
