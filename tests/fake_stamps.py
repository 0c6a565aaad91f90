"""A launch of the profiling build on the host: the stamps of every lane, with times that are known.

Each block walks its tasks as the kernel does, and each role stamps what its kind stamps; what a
stamp took is `NS[kind]`. Roles do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tl_megamoe.device import trace as stamps
from tl_megamoe.device.walk import Task, first_blocks, pair_task, walk, walk_order
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule

NS = {
    stamps.ROUTE: 1000,
    stamps.COUNTS: 300,
    stamps.START: 200,
    stamps.PULL: 400,
    stamps.ARRIVAL: 100,
    stamps.LOAD: 900,
    stamps.TURN: 50,
    stamps.STAGE: 250,
    stamps.MULTIPLY: 1600,
    stamps.FINISH_TURN: 30,
    stamps.FINISH: 500,
    stamps.COMBINE_WAIT: 700,
    stamps.COMBINE: 800,
    stamps.RESET: 20,
}
MHZ = 1500
PULLS = 3
Stamp = tuple[int, int, int, int]
"""kind, linear (1, 2; 0 for none), pool block, tile."""


def tasks_of(problem: Problem, schedule: Schedule, received: Sequence[int]) -> list[Task]:
    """The walk of a launch of one rank."""
    starts = first_blocks(received, schedule.block_m)
    step = schedule.lag if schedule.order == "lag" else schedule.experts_per_wave
    lag_order, step = walk_order(
        starts[-1], len(starts) - 1, 2**31 - 1, schedule.order == "lag", step
    )
    tiles = schedule.linear1_tiles(problem), schedule.linear2_tiles(problem)
    tasks = list(walk(starts, lag_order, step, *tiles))
    if schedule.cluster_size == 2 and not lag_order:
        return [pair_task(task, starts, received, *tiles)[0] for task in tasks]
    return tasks


def lanes_of(schedule: Schedule, mine: Sequence[Task]) -> list[list[Stamp]]:
    """The stamps of the lanes of a block that ran the tasks `mine`."""

    def alone(*kinds: int) -> list[Stamp]:
        return [(kind, 0, 0, 0) for kind in kinds]

    def tiles(of: Sequence[Task], kinds: Sequence[int]) -> list[Stamp]:
        return [(kind, t.phase, t.block, t.tile) for t in of for kind in kinds]

    pulls = [(stamps.PULL, 0, n, 0) for n in range(PULLS)]
    counts = [
        alone(stamps.ROUTE, *([stamps.COUNTS] if warp == 0 else []), stamps.START)
        for warp in range(schedule.dispatch_warps)
    ]
    start, reset = alone(stamps.ROUTE, stamps.START), alone(stamps.COMBINE_WAIT, stamps.RESET)
    lanes = [[*known, *pulls, *reset] for known in counts]
    lanes.append([*start, *tiles(mine, (stamps.ARRIVAL, stamps.LOAD)), *reset])
    if schedule.load_warps == 2:
        lanes.append([*start, *tiles(mine, (stamps.LOAD,)), *reset])
    lanes += [[*start, *reset]] * (stamps.NUM_LANES - 2 - len(lanes))
    work: tuple[int, ...] = (stamps.STAGE, stamps.MULTIPLY, stamps.FINISH)
    if schedule.pingpong:
        work = (stamps.TURN, *work[:2], stamps.FINISH_TURN, stamps.FINISH)
    end = alone(stamps.COMBINE_WAIT, stamps.COMBINE)
    for wg in (0, 1):
        turns = mine[wg::2] if schedule.pingpong else mine
        lanes.append([*start, *tiles(turns, work), *end])
    return lanes


def stamp_launch(
    problem: Problem,
    schedule: Schedule,
    received: Sequence[int],
    *,
    start: int = 2**32 - 1500,
    late: int = 0,
    events: int = stamps.LANE_EVENTS,
) -> NDArray[np.uint32]:
    """What a launch leaves, as `read_trace` takes it.

    Args:
        problem, schedule: of one rank.
        received: rows of each expert.
        start: clock at the launch, in ns; it has 32 bits and wraps.
        late: ns by which a block begins behind the one before.
        events: that a lane holds.
    """
    tasks = tasks_of(problem, schedule, received)
    words = np.zeros((schedule.num_sms, stamps.NUM_LANES, events + 1, 4), np.uint32)
    for block in range(schedule.num_sms):
        for lane, found in enumerate(lanes_of(schedule, tasks[block :: schedule.num_sms])):
            words[block, lane, 0, :2] = len(found), block + 10
            now = start + late * block
            for place, (kind, linear, pool_block, tile) in enumerate(found[:events]):
                ns = NS[kind]
                code = kind << 28 | (linear == 1) << 27 | pool_block << 8 | tile
                entry = now % 2**32, (now + ns) % 2**32, ns * MHZ // 1000, code
                words[block, lane, 1 + place] = entry
                now += ns
    return words
