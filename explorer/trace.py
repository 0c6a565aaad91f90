"""What a launch of the profiling build stamped, as a table of events and as a Chrome trace.

The stamps are device/trace.py's. An event is what a lane did between two of them: all time of a
lane, from the block's first instruction to the lane's last stamp, is in some event.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tl_megamoe.device import trace as stamps
from tl_megamoe.device.walk import first_blocks
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule

from .files import write_bytes

PHASES = ("dispatch", "linear1", "linear2", "combine")
EVENTS = {
    stamps.ROUTE: "route",
    stamps.COUNTS: "exchange counts",
    stamps.START: "wait for counts",
    stamps.PULL: "pull",
    stamps.ARRIVAL: "wait for rows",
    stamps.LOAD: "load",
    stamps.TURN: "wait for turn",
    stamps.STAGE: "wait for stage",
    stamps.MULTIPLY: "K loop",
    stamps.FINISH_TURN: "wait to finish",
    stamps.FINISH: "finish",
    stamps.COMBINE_WAIT: "wait for all tiles",
    stamps.COMBINE: "combine",
    stamps.RESET: "reset",
}
"""Kind of a stamp -> name of the event that it ends."""
PULLS = "pull rows"
"""Name of what spans the pulls of a warp."""
COLUMNS = (
    *("block", "sm", "lane", "role", "event", "phase", "pool_block", "tile", "expert"),
    *("begin_ns", "end_ns", "clocks"),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one launch of one rank.

    Attributes:
        problem, schedule: what ran.
        num_tokens: of the launch.
        received: rows that each local expert received.
        events: a row an event, ordered by block, lane and time, with COLUMNS: `begin_ns` and
            `end_ns` since the launch's first stamp, `clocks` SM clocks from begin to end;
            `pool_block`, `tile` and `expert` are -1 where there is none.
        num_lost: events that did not fit their lanes.
    """

    problem: Problem
    schedule: Schedule
    num_tokens: int
    received: tuple[int, ...]
    events: pd.DataFrame
    num_lost: int


def roles_of(schedule: Schedule) -> tuple[str, ...]:
    """What each lane of a block is; `idle` where the schedule has no use for a warp, and for the
    scheduler of a cluster, which stamps no tiles."""
    loads = ("load A", "load B") if schedule.load_warps == 2 else ("load",)
    warps = [*(f"dispatch {w}" for w in range(schedule.dispatch_warps)), *loads]
    warps += ["idle"] * (stamps.NUM_LANES - 2 - len(warps))
    return (*warps, "math 0", "math 1")


def read_trace(
    words: np.ndarray[Any, Any],
    problem: Problem,
    schedule: Schedule,
    num_tokens: int,
    received: Sequence[int],
) -> Trace:
    """The events of a launch.

    Args:
        words: (blocks, lanes, 1 + events, 4) 32-bit integers, as the kernel wrote them; the last
            events may be cut off where no lane has so many.
        problem: of one rank.
        schedule: that ran.
        num_tokens: of the launch.
        received: rows that each local expert received.
    """
    words = words.view(np.uint32)
    counted = words[:, :, 0, 0].astype(np.int64)
    kept = np.minimum(counted, words.shape[2] - 1)
    block, lane, place = np.nonzero(np.arange(words.shape[2] - 1) < kept[:, :, None])
    begin, end, clocks, code = words[block, lane, place + 1].astype(np.int64).T
    origin = int(begin[0]) if len(begin) else 0
    begin, end = (_since(times, origin) for times in (begin, end))
    first = int(begin.min()) if len(begin) else 0
    kind, linear = code >> 28, np.where((code >> 27) & 1, 1, 2)
    pool_block, tile = (code >> 8) & (stamps.MAX_POOL_BLOCKS - 1), code & 255
    of_tile = (kind >= stamps.ARRIVAL) & (kind <= stamps.FINISH)
    of_block = of_tile | (kind == stamps.PULL)
    phase = np.where(of_tile, linear, np.where(kind > stamps.FINISH, 3, 0))
    starts = first_blocks(received, schedule.block_m)
    expert = np.searchsorted(starts[:-1], pool_block, side="right") - 1
    roles = np.array(roles_of(schedule), dtype=object)
    frame = pd.DataFrame(
        {
            "block": block,
            "sm": words[block, lane, 0, 1].astype(np.int64),
            "lane": lane,
            "role": roles[lane],
            "event": pd.Series(kind).map(EVENTS),
            "phase": np.array(PHASES, dtype=object)[phase],
            "pool_block": np.where(of_block, pool_block, -1),
            "tile": np.where(of_tile, tile, -1),
            "expert": np.where(of_block, expert, -1),
            "begin_ns": begin - first,
            "end_ns": end - first,
            "clocks": clocks,
        },
        columns=list(COLUMNS),
    )
    frame = frame[frame["role"] != "idle"].reset_index(drop=True)
    lost = int((counted - kept).sum())
    return Trace(problem, schedule, num_tokens, tuple(received), frame, lost)


def _since(times: np.ndarray[Any, Any], origin: int) -> np.ndarray[Any, Any]:
    """Nanoseconds from `origin`, which may lie on either side; both are low halves of a clock."""
    return (times - origin + (1 << 31)) % (1 << 32) - (1 << 31)


def expected_tiles(trace: Trace) -> pd.DataFrame:
    """Every tile of the launch's walk: `phase`, `pool_block`, `tile`."""
    schedule, problem = trace.schedule, trace.problem
    blocks = first_blocks(trace.received, schedule.block_m)[-1]
    tiles = (schedule.linear1_tiles(problem), schedule.linear2_tiles(problem))
    rows = [
        (phase, block, tile)
        for phase, count in zip(PHASES[1:3], tiles, strict=True)
        for block in range(blocks)
        for tile in range(count)
    ]
    return pd.DataFrame(rows, columns=["phase", "pool_block", "tile"])


def wrong_tiles(trace: Trace) -> dict[str, int]:
    """By role, the tiles of the walk that it did not do exactly once, or that are not in the walk.

    Cooperative warpgroups each do all of them; in pingpong mode the two count as one role `math`.
    """
    events, found = trace.events, {}
    columns = ["phase", "pool_block", "tile"]
    for role in dict.fromkeys(roles_of(trace.schedule)):
        name, event = role, "K loop"
        if role.startswith("load"):
            event = "load"
        elif role == "math 0" and trace.schedule.pingpong:
            name = "math"
        elif not role.startswith("math") or trace.schedule.pingpong:
            continue
        of_role = events["role"].str.startswith(name) & (events["event"] == event)
        every = pd.concat([events.loc[of_role, columns], expected_tiles(trace)])
        found[name] = int((every.groupby(columns).size() != 2).sum())
    return found


# ---- Chrome trace


def chrome_trace(trace: Trace, notes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The launch as a JSON value that Perfetto (ui.perfetto.dev) and chrome://tracing read.

    A block of the grid is a process, a role of it a thread. Events that belong together, those of a
    tile and the pulls of a warp, stand under one that spans them.

    Args:
        trace: of the launch.
        notes: shown with the trace.
    """
    return {
        "traceEvents": [*_names(trace), *_spans(trace)],
        "displayTimeUnit": "ns",
        "otherData": {
            "problem": trace.problem.name,
            "schedule": trace.schedule.name,
            "num_tokens": trace.num_tokens,
            **(notes or {}),
        },
    }


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    lanes = trace.events.drop_duplicates(["block", "lane"])
    for block, sm in lanes.drop_duplicates("block")[["block", "sm"]].itertuples(index=False):
        yield _name("process_name", block, name=f"block {block} (SM {sm})")
        yield _name("process_sort_index", block, sort_index=int(block))
    for block, lane, role in lanes[["block", "lane", "role"]].itertuples(index=False):
        yield _name("thread_name", block, lane, name=role)
        yield _name("thread_sort_index", block, lane, sort_index=int(lane))


def _name(kind: str, block: Any, lane: Any = 0, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": int(block), "tid": int(lane), "args": args}


def _spans(trace: Trace) -> Iterator[dict[str, Any]]:
    events = trace.events.assign(group=groups_of(trace.events))
    whole = events.groupby("group", sort=False).agg(
        begin=("begin_ns", "min"),
        end=("end_ns", "max"),
        clocks=("clocks", "sum"),
        size=("block", "size"),
    )
    spans: dict[int, Any] = dict(zip(whole.index, whole.itertuples(index=False), strict=True))
    rows: Iterator[Any] = events.itertuples(index=False)
    last = 0
    for row in rows:
        span = spans[row.group]
        if span.size > 1 and row.group != last:
            name = PULLS if row.event == "pull" else f"{row.phase} {row.pool_block}.{row.tile}"
            yield _span(row, name, span.begin, span.end, span.clocks)
        last = row.group
        yield _span(row, row.event, row.begin_ns, row.end_ns, row.clocks)


def groups_of(events: pd.DataFrame) -> pd.Series[int]:
    """A number for each event, the same for neighbours of a lane that belong together: those of one
    tile, and pulls."""
    pulls = events["event"] == "pull"
    keys = events[["block", "lane", "phase", "pool_block", "tile"]].copy()
    keys.loc[pulls, ["pool_block", "tile"]] = 0
    first = (keys["tile"] < 0) | (keys != keys.shift()).any(axis=1)
    return first.astype(int).cumsum()


def _span(row: Any, name: str, begin: int, end: int, clocks: int) -> dict[str, Any]:
    args: dict[str, Any] = {"block": int(row.block), "phase": row.phase, "clocks": int(clocks)}
    if row.tile >= 0:
        args |= {"pool_block": int(row.pool_block), "tile": int(row.tile)}
        args["expert"] = int(row.expert)
    elif row.pool_block >= 0 and name != PULLS:
        args |= {"pool_block": int(row.pool_block), "expert": int(row.expert)}
    return {
        "name": name,
        "cat": row.phase,
        "ph": "X",
        "ts": int(begin) / 1000,
        "dur": int(end - begin) / 1000,
        "pid": int(row.block),
        "tid": int(row.lane),
        "args": args,
    }


def write_chrome_trace(path: Path, value: dict[str, Any]) -> None:
    """Write a Chrome trace; compressed if the name ends in .gz, which Perfetto reads too.

    Raises:
        OSError: as `files.replaced_file`.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    write_bytes(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
