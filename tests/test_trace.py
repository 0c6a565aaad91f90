"""Traces of launches that were made up: events, Chrome trace, tables, and that defects are seen."""

from __future__ import annotations

import ctypes
import gzip
import json
import shutil
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_stamps import MHZ, NS, PULLS, Stamp, lanes_of, stamp_launch, tasks_of
from gpu_cases import SMALL, fit, variants

from tl_megamoe.device import trace as stamps
from tl_megamoe.explorer.trace import (
    EVENTS,
    Trace,
    chrome_trace,
    expected_tiles,
    read_trace,
    roles_of,
    write_chrome_trace,
    wrong_tiles,
)
from tl_megamoe.explorer.trace_summary import render_summary, summarise, summary_rows
from tl_megamoe.schedule import Schedule

RECEIVED = (130, 0, 64, 65, 0, 1, 300, 7)
VARIANTS = {name: s for name, s in variants(SMALL).items() if s.block_m >= 64}
each_variant = pytest.mark.parametrize("name", VARIANTS)


def traced(schedule: Schedule, received: tuple[int, ...] = RECEIVED, **options: Any) -> Trace:
    words = stamp_launch(SMALL, schedule, received, **options)
    return read_trace(words, SMALL, schedule, sum(received) // SMALL.num_topk, received)


# ---- the device text


class DeviceNotes:
    """NOTE_CUDA compiled for the host."""

    def __init__(self, folder: Path):
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "a C++ compiler is a requirement of tilelang too"
        head = (
            '#define TLMM_DEV extern "C"\n'
            "struct alignas(16) uint4 { unsigned x, y, z, w; };\n"
            "static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) "
            "{ return {x, y, z, w}; }\n"
        )
        text = folder / "note.cpp"
        text.write_text(head + stamps.NOTE_CUDA, encoding="utf-8")
        library = folder / "note.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
        self.note = ctypes.CDLL(str(library)).tlmm_note

    def lane(self, found: list[Stamp], start: int, sm: int) -> np.ndarray[Any, Any]:
        """What a lane's stamps leave."""
        last = np.zeros(8, np.uint32)  # the lane beside it must stay as it is
        out = np.zeros((stamps.LANE_EVENTS + 2, stamps.EVENT_WORDS), np.uint32)
        now, clock = start, 2**32 - 100

        def note(*stamp: int) -> None:
            pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (last, out)]
            words = [ctypes.c_uint32(w % 2**32) for w in (now, clock, sm)]
            self.note(*pointers, *words, *stamp)

        note(stamps.BEGIN, 0, 0, 0)
        for stamp in found:
            now, clock = now + NS[stamp[0]], clock + NS[stamp[0]] * MHZ // 1000
            note(*stamp)
        assert not last[4:].any()
        assert not out[-1].any()
        return out[:-1]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> DeviceNotes:
    return DeviceNotes(tmp_path_factory.mktemp("note"))


@pytest.mark.parametrize("name", ["wide128", "pingpong"])
def test_the_device_writes_what_is_read(name: str, device: DeviceNotes) -> None:
    schedule = VARIANTS[name]
    words = stamp_launch(SMALL, schedule, RECEIVED, start=7_000)
    tasks = tasks_of(SMALL, schedule, RECEIVED)
    for block in (0, 3, schedule.num_sms - 1):
        for lane, found in enumerate(lanes_of(schedule, tasks[block :: schedule.num_sms])):
            assert np.array_equal(device.lane(found, 7_000, block + 10), words[block, lane])


def test_the_device_counts_what_does_not_fit(device: DeviceNotes) -> None:
    most = (1 << 19) - 1
    found = [(stamps.RESET, 1, most, 255)] * (stamps.LANE_EVENTS + 5)
    lane = device.lane(found, 0, 131)
    assert lane[0].tolist() == [stamps.LANE_EVENTS + 5, 131, 0, 0]
    assert int(lane[-1, 3]) == stamps.RESET << 28 | 1 << 27 | most << 8 | 255
    assert int(lane[-1, 0]) == (stamps.LANE_EVENTS - 1) * NS[stamps.RESET]


def test_kinds_are_named_and_fit_their_bits() -> None:
    kinds = {v for k, v in vars(stamps).items() if k in STAMP_NAMES}
    assert kinds == set(EVENTS) == set(NS)
    assert max(kinds) < 16
    assert len(set(EVENTS.values())) == len(EVENTS)


STAMP_NAMES = (
    "ROUTE COUNTS START PULL ARRIVAL LOAD TURN STAGE MULTIPLY FINISH_TURN FINISH COMBINE_WAIT "
    "COMBINE RESET"
).split()


# ---- events


@each_variant
def test_every_tile_is_traced_once(name: str) -> None:
    schedule = VARIANTS[name]
    found = traced(schedule)
    wrong = wrong_tiles(found)
    loads = {"load A", "load B"} if schedule.load_warps == 2 else {"load"}
    assert set(wrong) == loads | ({"math"} if schedule.pingpong else {"math 0", "math 1"})
    assert set(wrong.values()) == {0}
    assert len(expected_tiles(found)) == len(tasks_of(SMALL, schedule, RECEIVED))
    assert set(found.events["role"]) == set(roles_of(schedule)) - {"idle"}


def test_lost_doubled_and_foreign_tiles_are_seen() -> None:
    schedule = VARIANTS["pingpong"]
    words = stamp_launch(SMALL, schedule, RECEIVED)
    math = words[0, 4]
    place = next(i for i in range(1, 20) if int(math[i, 3]) >> 28 == stamps.MULTIPLY)
    code = int(math[place, 3])

    def wrong(new: int) -> int:
        math[place, 3] = new
        found = read_trace(words, SMALL, schedule, 283, RECEIVED)
        counts = wrong_tiles(found)
        assert {role for role, count in counts.items() if count} <= {"math"}
        return counts["math"]

    assert wrong(code) == 0
    assert wrong(stamps.STAGE << 28 | code & (1 << 28) - 1) == 1  # lost
    assert wrong(code ^ 1) == 2  # another one instead, which is then there twice
    assert wrong(code | 999 << 8) == 2  # a pool block that does not exist


def test_times_begin_at_the_first_stamp_whatever_the_clock() -> None:
    schedule = fit(SMALL, num_sms=7)
    before = traced(schedule, start=2**32 - 1500, late=100)
    later = traced(schedule, start=12345, late=100)
    assert before.events.equals(later.events)
    assert before.events["begin_ns"].min() == 0
    first = before.events.groupby("block")["begin_ns"].min()
    assert first.tolist() == [100 * block for block in range(7)]
    assert before.events.groupby("block")["sm"].first().tolist() == list(range(10, 17))
    # A block that began before the one that is read first.
    early = read_trace(
        stamp_launch(SMALL, schedule, RECEIVED, start=100, late=-90), SMALL, schedule, 4, RECEIVED
    )
    assert early.events["begin_ns"].min() == 0
    assert early.events.loc[early.events["block"] == 0, "begin_ns"].min() == 540


@each_variant
def test_a_lane_is_always_in_some_event(name: str) -> None:
    events = traced(VARIANTS[name]).events
    for _, lane in events.groupby(["block", "lane"]):
        assert lane["begin_ns"].tolist()[1:] == lane["end_ns"].tolist()[:-1]
    assert (events["clocks"] == (events["end_ns"] - events["begin_ns"]) * MHZ // 1000).all()


def test_experts_and_phases() -> None:
    events = traced(fit(SMALL, num_sms=7)).events
    tiles = events[events["event"] == "K loop"].drop_duplicates("pool_block")
    # 128 rows a block: 2, 0, 1, 1, 0, 1, 3, 1
    assert dict(zip(tiles["pool_block"], tiles["expert"], strict=True)) == dict(
        enumerate((0, 0, 2, 3, 5, 6, 6, 6, 7))
    )
    nothing = events[events["phase"].isin(("dispatch", "combine"))]
    assert (nothing["tile"] == -1).all()
    assert (nothing.loc[nothing["event"] != "pull", ["pool_block", "expert"]] == -1).all().all()
    assert set(nothing.loc[nothing["event"] == "pull", "pool_block"]) == set(range(PULLS))


def test_events_that_did_not_fit_are_counted() -> None:
    schedule = fit(SMALL, num_sms=3)
    whole, cut = traced(schedule), traced(schedule, events=12)
    assert whole.num_lost == 0
    assert cut.num_lost == len(whole.events) - len(cut.events) > 0
    assert cut.events.groupby(["block", "lane"]).size().max() == 12


# ---- Chrome trace


@each_variant
def test_spans_nest(name: str) -> None:
    found = traced(VARIANTS[name], late=10)
    value = json.loads(json.dumps(chrome_trace(found), allow_nan=False))
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in value["traceEvents"]:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert len(threads) == len(found.events.drop_duplicates(["block", "lane"]))
    names = set(EVENTS.values())
    leaves = 0
    for spans in threads.values():
        open_until = -1.0
        parent: dict[str, Any] = {}
        inside = clocks = 0
        for span in spans:
            begin, end = round(span["ts"] * 1000), round((span["ts"] + span["dur"]) * 1000)
            if span["name"] in names:
                leaves += 1
                if begin < open_until:
                    assert end <= open_until
                    inside += end - begin
                    clocks += span["args"]["clocks"]
                    if "tile" in parent["args"]:
                        assert parent["args"] == {**span["args"], "clocks": parent["clocks"]}
                continue
            assert begin >= open_until
            if parent:
                assert inside == round(parent["dur"] * 1000)
                assert clocks == parent["clocks"]
            parent = {**span, "clocks": span["args"]["clocks"]}
            open_until, inside, clocks = end, 0, 0
    assert leaves == len(found.events)


def test_spans_say_what_they_are() -> None:
    value = chrome_trace(traced(fit(SMALL, num_sms=7)), {"shipped_us": 12.5})
    assert value["otherData"]["shipped_us"] == 12.5
    assert value["otherData"]["schedule"] == fit(SMALL, num_sms=7).name
    of_block = [e for e in value["traceEvents"] if e["pid"] == 2]
    meta = {(e["name"], e["tid"]): e["args"] for e in of_block if e["ph"] == "M"}
    assert meta["process_name", 0] == {"name": "block 2 (SM 12)"}
    assert meta["thread_name", 2] == {"name": "load A"}
    spans = [e for e in of_block if e["ph"] == "X" and e["tid"] == 4]
    tile = next(e for e in spans if e["name"].startswith("linear1 "))
    kinds = (stamps.STAGE, stamps.MULTIPLY, stamps.FINISH)
    assert tile["name"] == "linear1 0.1"  # position 2 of two pool blocks with two tiles each
    assert (tile["ts"], tile["dur"]) == (1.2, sum(NS[k] for k in kinds) / 1000)
    assert tile["args"] == {
        "block": 2,
        "phase": "linear1",
        "clocks": sum(NS[k] for k in kinds) * MHZ // 1000,
        "pool_block": 0,
        "tile": 1,
        "expert": 0,
    }
    assert [e["name"] for e in spans[3:6]] == ["wait for stage", "K loop", "finish"]
    pulls = [e for e in of_block if e["tid"] == 0 and e["ph"] == "X" and "pull" in e["name"]]
    assert [e["name"] for e in pulls] == ["pull rows", *["pull"] * PULLS]
    assert pulls[0]["dur"] == PULLS * NS[stamps.PULL] / 1000


def test_a_trace_is_written(tmp_path: Path) -> None:
    value = chrome_trace(traced(fit(SMALL, num_sms=2)))
    for name in ("t.json", "t.json.gz"):
        write_chrome_trace(tmp_path / name, value)
    plain = (tmp_path / "t.json").read_text()
    assert json.loads(plain) == value
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode() == plain


# ---- tables


@pytest.mark.parametrize("name", ["wide128", "rows", "pingpong"])
def test_tables(name: str) -> None:
    schedule = replace(VARIANTS[name], num_sms=7)
    found = traced(schedule, late=11)
    summary = summarise(found)
    events, launch = found.events, summary.launch
    span = events["end_ns"].max()
    assert launch["span_us"] == span / 1000
    assert launch["sm_clock_mhz"] == pytest.approx(MHZ, rel=1e-4)
    assert (launch["num_blocks"], launch["num_lost"]) == (7, 0)
    turn = NS[stamps.TURN] if schedule.pingpong else 0
    before = NS[stamps.ROUTE] + NS[stamps.START] + turn + NS[stamps.STAGE]
    assert launch["first_tile_us"] == before / 1000
    ends = [events.loc[events["block"] == b, "end_ns"].max() for b in range(7)]
    assert launch["tail_us"] == (max(ends) - min(ends)) / 1000
    loops = summary.k_loops
    assert loops["tile_ns"].tolist() == [NS[stamps.MULTIPLY]] * 2
    assert loops["tile_clocks"].tolist() == [NS[stamps.MULTIPLY] * MHZ // 1000] * 2
    passes = 2 if name == "rows" else 1
    assert loops["k_block_ns"].tolist() == [1600 / (4 * passes), 1600 / 2]
    tasks = tasks_of(SMALL, schedule, RECEIVED)
    assert loops["tiles"].tolist() == [sum(t.phase == n for t in tasks) for n in (1, 2)]
    assert summary.roles.sum(axis=1).tolist() == pytest.approx([1.0] * len(summary.roles))
    k_loops = len(tasks) / (2 if schedule.pingpong else 1) * NS[stamps.MULTIPLY] / (7 * span)
    assert summary.roles.loc[["math 0", "math 1"], "K loop"].mean() == pytest.approx(k_loops)
    assert summary.roles.loc["dispatch 0", "move"] == pytest.approx(
        (NS[stamps.ROUTE] + NS[stamps.COUNTS] + PULLS * NS[stamps.PULL]) / span
    )
    stage = summary.events.loc[("linear2", "math 1", "wait for stage")]
    assert stage["p90_ns"] == stage["max_ns"] == stage["mean_ns"] == NS[stamps.STAGE]
    assert summary.events["count"].sum() == len(events)
    shares = summary.events["share"].sum() + summary.roles["done"].sum()
    assert shares == pytest.approx(len(summary.roles))


def test_phases_last_from_first_to_last_work() -> None:
    found = traced(fit(SMALL, num_sms=7))
    phases = summarise(found).phases
    begin = (NS[stamps.ROUTE] + NS[stamps.START] + NS[stamps.STAGE]) / 1000
    assert phases["first_us"].tolist()[:2] == [0.0, begin]
    sums = found.events[found.events["event"] == "combine"]
    last = sums["end_ns"].max() / 1000
    assert phases.loc["combine"].tolist() == pytest.approx(
        [sums["begin_ns"].min() / 1000, last, last - sums["begin_ns"].min() / 1000]
    )


def test_tables_of_a_launch_without_tokens() -> None:
    """Nothing is routed: no pull, no tile."""
    found = traced(fit(SMALL, num_sms=3), (0,) * 8)
    summary = summarise(found)
    assert summary.k_loops["tiles"].tolist() == [0, 0]
    assert np.isnan(summary.launch["first_tile_us"])
    text = render_summary(summary)
    assert text.splitlines()[1] == f"first tile starts     {'-':>9} us"
    assert "linear1  0      -        -" in text
    assert set(wrong_tiles(found).values()) == {0}


def test_a_launch_without_stamps_is_refused() -> None:
    words = np.zeros((3, stamps.NUM_LANES, 5, 4), np.uint32)
    with pytest.raises(ValueError, match="stamped no event: was it the profiling build"):
        summarise(read_trace(words, SMALL, fit(SMALL), 4, RECEIVED))


def test_text_and_rows() -> None:
    summary = summarise(traced(fit(SMALL, num_sms=7), events=20))
    text = render_summary(summary)
    assert f"SM clock              {1500.0:9.1f} MHz" in text
    assert f"{summary.launch['num_lost']:.0f} events are lost" in text
    heads = [line for line in text.splitlines() if line.startswith(("phase ", "role:", "K loop "))]
    assert len(heads) == 4
    assert "wait for stage" in text
    rows = summary_rows(summary).set_index(["table", "subject", "measure"])["value"]
    assert rows["launch", "", "span_us"] == summary.launch["span_us"]
    assert rows["events", "linear1/math 0/K loop", "mean_ns"] == NS[stamps.MULTIPLY]
    assert rows["roles", "load A", "wait"] == summary.roles.loc["load A", "wait"]
    assert rows.index.is_unique
    assert isinstance(rows, pd.Series)
