"""The profiling build on the GPU: stamps are whole and in order, its result is the shipped one."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from fake_stamps import lanes_of, tasks_of
from gpu_cases import SMALL, SMALL_CAPACITY, TRACED, trace_schedules

from tl_megamoe.device import trace as stamps
from tl_megamoe.device.walk import Task, expert_of, first_blocks
from tl_megamoe.explorer.cli import main
from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.explorer.trace import EVENTS, Trace, read_trace, roles_of, wrong_tiles
from tl_megamoe.explorer.trace_summary import summarise
from tl_megamoe.explorer.trace_worker import Stamped, TraceWorker
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import default_schedule

pytestmark = pytest.mark.sm90

TOKENS, FEW_TOKENS = 300, 200
"""Whose routes the blocks count together, and alone; of pingpong1 only the shipped kernel does."""
SAME_NS = 2000
"""What %globaltimer may be off between two SMs, or from one reading to the next."""


@lru_cache(maxsize=2)
def worker(tokens: int) -> TraceWorker:
    made = TraceWorker(WorkerConfig(problem=SMALL, capacity=SMALL_CAPACITY, recipe=Recipe()))
    made.cell(tokens, "zipf:1.2")
    return made


CASES = [
    *((name, TOKENS) for name in TRACED),
    *((name, FEW_TOKENS) for name in ("default", "pingpong1", "swapped")),
]


@lru_cache(maxsize=len(CASES))
def traced(name: str, tokens: int) -> tuple[Stamped, Trace]:
    schedule = trace_schedules()[name]
    stamped = worker(tokens).trace(schedule)
    return stamped, read_trace(stamped.words, SMALL, schedule, tokens, stamped.received)


each_schedule = pytest.mark.parametrize(("name", "tokens"), CASES)


@each_schedule
def test_the_result_is_the_shipped_kernels(name: str, tokens: int) -> None:
    stamped, _ = traced(name, tokens)
    assert stamped.same
    assert 0 < stamped.shipped_us < 10 * stamped.profiling_us


@each_schedule
def test_every_lane_does_what_the_walk_says(name: str, tokens: int) -> None:
    """Kind, pool block and tile of every stamp: the block's own first task, then what it claimed,
    in the order of the walk."""
    stamped, found = traced(name, tokens)
    schedule, events = found.schedule, found.events
    assert found.num_lost == 0
    assert sum(stamped.received) == tokens * SMALL.num_topk
    tasks = tasks_of(SMALL, schedule, stamped.received)
    roles = roles_of(schedule)
    lanes = dict(list(events.groupby(["block", "lane"])))
    pulled: set[int] = set()
    for block in range(schedule.num_sms):
        loads = lanes[block, roles.index("load" if schedule.load_warps == 1 else "load B")]
        mine = [
            Task(int(phase[-1]), pool_block, tile)
            for event, phase, pool_block, tile in loads[
                ["event", "phase", "pool_block", "tile"]
            ].itertuples(index=False, name=None)
            if event == "load"
        ]
        places = [tasks.index(task) for task in mine]
        assert places[:1] == [block][: len(tasks) - block]
        assert places == sorted(set(places))
        for lane, expected in enumerate(lanes_of(schedule, mine)):
            if roles[lane] == "idle":
                continue
            rows = lanes[block, lane]
            done = list(
                rows[["event", "phase", "pool_block", "tile"]].itertuples(index=False, name=None)
            )
            if roles[lane].startswith("dispatch"):
                pulls = [event for event in done if event[0] == "pull"]
                names = [EVENTS[kind] for kind, *_ in expected if kind != stamps.PULL]
                known = names.index("wait for counts") + 1
                names[known:known] = ["pull"] * len(pulls)
                assert [event for event, *_ in done] == names
                blocks = [event[2] for event in pulls]
                assert blocks == sorted(blocks)  # in pool order
                pulled.update(blocks)
                continue
            assert done == [
                (EVENTS[kind], f"linear{linear}", pool_block, tile)
                if linear
                else (EVENTS[kind], "dispatch" if kind <= stamps.START else "combine", -1, -1)
                for kind, linear, pool_block, tile in expected
            ]
    assert set(wrong_tiles(found).values()) == {0}
    starts = first_blocks(stamped.received, schedule.block_m)
    assert pulled <= set(range(starts[-1]))
    tiles = events[events["tile"] >= 0]
    assert tiles["expert"].tolist() == [expert_of(starts, b) for b in tiles["pool_block"]]


@each_schedule
def test_times_are_in_order(name: str, tokens: int) -> None:
    stamped, found = traced(name, tokens)
    events = found.events
    ns = events["end_ns"] - events["begin_ns"]
    assert (ns >= 0).all()
    assert (events["clocks"] > 0).all()
    for _, lane in events.groupby(["block", "lane"]):
        assert lane["begin_ns"].tolist()[1:] == lane["end_ns"].tolist()[:-1]
    summary = summarise(found)
    assert 300 < summary.launch["sm_clock_mhz"] < 2500
    assert 0.3 * stamped.profiling_us < summary.launch["span_us"] < 3 * stamped.profiling_us
    assert summary.roles["done"].between(-1e-9, 1).all()
    assert events["sm"].nunique() == found.schedule.num_sms  # a block an SM
    # Nothing before what it waits for.
    k_loops = events[events["event"] == "K loop"]
    ends = k_loops[k_loops["phase"] == "linear1"].groupby("pool_block")["end_ns"].max()
    later = k_loops[k_loops["phase"] == "linear2"].groupby("pool_block")["end_ns"].min()
    assert (later + SAME_NS > ends).all()
    counts = events[events["event"] == "wait for counts"]["end_ns"].max()
    assert events[events["event"] == "exchange counts"]["begin_ns"].max() < counts
    combine = events[events["event"] == "combine"]["begin_ns"].min()
    assert combine + SAME_NS > k_loops["end_ns"].max()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "t.json", tmp_path / "s.csv"
    sizes = "--hidden 512 --intermediate 256 --num-experts 8 --num-topk 3 --num-ranks 1".split()
    argv = ["trace", *sizes, "--tokens", str(TOKENS), "--capacity", str(SMALL_CAPACITY)]
    argv += ["--schedule", "default", "--out", str(out), "--summary", str(table)]
    assert main(argv) == 0, capsys.readouterr().err
    assert "profiling build" in capsys.readouterr().out
    assert table.read_text().startswith("table,subject,measure,value\n")
    spans: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(out.read_text())["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    assert len({block for block, _ in spans}) == default_schedule(SMALL, TOKENS).num_sms
    for found in spans.values():
        within: list[float] = []  # ends of the spans around, innermost last
        for span in sorted(found, key=lambda s: (s["ts"], -s["dur"])):
            end = span["ts"] + span["dur"]
            while within and within[-1] <= span["ts"] + 1e-6:
                within.pop()
            assert not within or end <= within[-1] + 1e-6
            within.append(end)
