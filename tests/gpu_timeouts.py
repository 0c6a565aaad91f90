"""Provoke a wait that cannot end, in a process whose CUDA context is lost then.

`python tests/gpu_timeouts.py CASE SCHEDULE` prints what the process could still tell, as JSON: the
attributes and text of MegaMoeTimeout, every slot of the reports, and what must be in them.

A tag has one slot, over all virtual ranks. Of the waits of a tag that time out within 50 ms one for
the lowest pool block fills it, and what waits for the cause starts within a millisecond, so of
waits of one block any may tell. The cases see to it that no other wait of a tag is of that block:
one pool block more than the ring holds, and a lag with which nobody waits for a lower block
(`lag_of`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from gpu_cases import (
    ON_RANKS,
    RANKS_CAPACITY,
    RESERVE,
    SMALL,
    SMALL_CAPACITY,
    ring_blocks,
    variants,
)
from gpu_cases import rank_schedules as schedules_on_ranks
from gpu_hold import held
from gpu_world import World, world

from tl_megamoe import MegaMoeTimeout
from tl_megamoe.device.walk import Task, walk, walk_order
from tl_megamoe.explorer.places import num_blocks
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule
from tl_megamoe.timeouts import REPORT_FIELDS, REPORT_SLOT

TIMEOUT_MS = 1500
STUCK_BARRIER = 0x7FFFFFFF
"""A grid barrier that begins here lets its first block pass and never the others: the top bit flips
with the first arrival, and all arrivals together end one below its next flip."""
HOLD_MS = 8000
"""Longer than the bound of a wait, and than what is lingered before a launch ends."""
STUCK_COUNT = 100_000
BEHIND = -5
"""A peer's count of launches: one more does not reach this rank's."""


MANY_TOKENS = 300
"""Of one rank: more than few routes, so that the blocks count them together (dispatch.py)."""


def on_one(schedule: str, phase: str) -> tuple[World, Callable[[], object]]:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(MANY_TOKENS, 0)
    # A block that passes a stuck barrier reads lists of routes that are not written yet.
    w.ranks.first.src_routes.zero_()
    return w, lambda: w.launch(variants(SMALL)[schedule], phase)


def on_ranks(schedule: str, num_ranks: int = 2) -> tuple[World, Schedule]:
    """A pool block an expert and a tile a block of the grid: nothing stands behind a stuck tile."""
    problem = ON_RANKS[num_ranks]
    w = world(problem, RANKS_CAPACITY)
    w.fill(100, 0)
    return w, schedules_on_ranks(problem)[schedule]


HOT_TOKENS = 485
"""Of each of two ranks: with `hot_routes` one block more than the ring, of 64 rows as of 128."""


def hot_routes(schedule: Schedule, ring: int) -> int:
    """Routes to the first of two experts, all others going to the second.

    They take a pool block, and shift the rows behind it so that no dispatch warp holds rows of the
    ring's last block and of the one after it: it would keep the former from its tokens.
    """
    together = schedule.rows_in_flight  # a row is one chunk here
    return next(
        n for n in range(1, together + 1) if not (n + (ring - 1) * schedule.block_m) % together
    )


def on_hot(schedule: str) -> tuple[World, Schedule, int]:
    """All rows to rank 1, one pool block more than its ring holds; and the ring's blocks."""
    w, chosen = on_ranks(schedule)
    ring, local = ring_blocks(w.problem, chosen.block_m), w.problem.num_local_experts
    w.fill(HOT_TOKENS, 0)
    for rank in range(2):
        topk_idx = torch.full_like(w.inputs[rank].topk_idx, local + 1)
        if rank == 0:
            topk_idx.view(-1)[: hot_routes(chosen, ring)] = local
        w.change(rank, topk_idx=topk_idx)
    assert num_blocks(w.counts(1), chosen.block_m) == ring + 1
    return w, chosen, ring


Waits = set[tuple[int, int]]
"""(tag, pool block) of waits."""


def waits_left(problem: Problem, schedule: Schedule, ring: int, cause: Waits) -> Waits:
    """The waits of the load warps that never end in a launch of a block more than the ring holds.

    Args:
        problem: the layer.
        schedule: its order and lag count.
        ring: blocks of the ring.
        cause: those that do not end whatever the others do.
    """
    n1, n2 = schedule.linear1_tiles(problem), schedule.linear2_tiles(problem)
    step = schedule.lag if schedule.order == "lag" else schedule.experts_per_wave
    order = walk_order(ring + 1, problem.num_local_experts, ring, schedule.order == "lag", step)
    tasks = list(walk([0, ring + 1], *order, n1, n2))
    queues = [tasks[b :: schedule.num_sms] for b in range(schedule.num_sms)]
    done: set[Task] = set()

    def waits(task: Task) -> int:
        """The tag of the wait that holds up a task; 0: none."""
        before = task.block - ring
        if task.phase == 2:
            needed = [Task(1, task.block, tile) for tile in range(n1)]
            return 5 if (5, task.block) in cause or not done.issuperset(needed) else 0
        if (4, task.block) in cause:
            return 4
        needed = [Task(2, before, tile) for tile in range(n2)] if before >= 0 else []
        return 8 if (8, task.block) in cause or not done.issuperset(needed) else 0

    while ready := [q for q in queues if q and not waits(q[0])]:
        for queue in ready:
            done.add(queue.pop(0))
    return {(waits(queue[0]), queue[0].block) for queue in queues if queue}


def lowest(waits: Waits) -> Waits:
    """Of the waits of a tag, those for its lowest pool block: what it reports."""
    return {(tag, min(block for t, block in waits if t == tag)) for tag, _ in waits}


def lag_of(problem: Problem, schedule: Schedule, ring: int, cause: Waits) -> Schedule:
    """The schedule in lag order, with a lag where the lowest waits of each tag are the cause."""
    for lag in range(1, ring):
        found = replace(schedule, order="lag", lag=lag, experts_per_wave=problem.num_local_experts)
        if lowest(waits_left(problem, found, ring, cause)) == cause:
            return found
    raise AssertionError(f"no lag of {schedule.name} has {cause} as its lowest waits")


def start_some(w: World, schedule: Schedule, ranks: Sequence[int]) -> None:
    kernel, y = w.kernel(schedule), w.outputs()

    def launch(rank: int) -> None:
        if rank in ranks:
            tokens = w.inputs[rank].num_tokens
            kernel.launch(w.ranks.buffers[rank], w.weights[rank], y[rank], tokens, schedule)

    w.ranks.run(launch)
    w.ranks.synchronize()


def dispatch_sync(schedule: str) -> tuple[World, Callable[[], object]]:
    w, launch = on_one(schedule, "dispatch")
    b = w.ranks.first
    b.workspace[b.layout.workspace_offsets["dispatch_sync"]] = STUCK_BARRIER
    return w, launch


def combine_sync(schedule: str) -> tuple[World, Callable[[], object]]:
    w, launch = on_one(schedule, "combine")
    b = w.ranks.first
    b.workspace[b.layout.workspace_offsets["combine_sync"]] = STUCK_BARRIER
    return w, launch


def held_sms_few(schedule: str) -> tuple[World, Callable[[], object]]:
    """The same with few routes, whose tiles are all of the first blocks."""
    return held_sms(schedule, 100)


def held_sms(schedule: str, tokens: int = MANY_TOKENS) -> tuple[World, Callable[[], object]]:
    """A kernel of another stream has RESERVE multiprocessors, and keeps them too long."""
    w, chosen = world(SMALL, SMALL_CAPACITY), variants(SMALL)[schedule]
    w.fill(tokens, 0)
    w.launch(chosen)  # to load a kernel may wait for the one that holds

    def launch() -> None:
        with held(RESERVE, HOLD_MS):
            w.launch(chosen)

    return w, launch


def never_launches(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_ranks(schedule)
    return w, lambda: start_some(w, chosen, (0,))


def two_never_launch(schedule: str) -> tuple[World, Callable[[], object]]:
    """Two ranks wait for two others: four waits of a tag for one slot."""
    w, chosen = on_ranks(schedule, 4)
    return w, lambda: start_some(w, chosen, (0, 2))


def dispatch_signal(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_ranks(schedule)
    w.ranks.buffers[1].dispatch_signal[0] = BEHIND
    return w, lambda: w.launch(chosen)


def combine_signal(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_ranks(schedule)
    w.ranks.buffers[1].combine_signal[0] = BEHIND
    return w, lambda: w.launch(chosen)


def l1_arrival_count(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_ranks(schedule)
    w.ranks.buffers[1].l1_arrival_count[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


def l2_arrival(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_ranks(schedule)
    w.ranks.buffers[1].l2_arrival[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


def pool_ring(schedule: str) -> tuple[World, Callable[[], object]]:
    """Block 0 seems unfinished: its rows are not free for the block a ring further on."""
    w, chosen, ring = on_hot(schedule)
    chosen = lag_of(w.problem, chosen, ring, pool_ring_waits(ring))
    w.ranks.buffers[1].l2_arrival[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


def pool_ring_waits(ring: int) -> Waits:
    """Of the load warps: linear2 of block 0, and the block whose rows dispatch cannot write."""
    return {(5, 0), (4, ring)}


def intermediate_ring(schedule: str) -> tuple[World, Callable[[], object]]:
    """Rows of linear2 seem in use. All tokens arrive: pool rows are free after linear1."""
    w, chosen, _ = on_hot(schedule)
    w.ranks.buffers[1].l2_done[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


CASES: dict[str, Callable[[str], tuple[World, Callable[[], object]]]] = {
    case.__name__: case
    for case in (
        dispatch_sync,
        combine_sync,
        held_sms,
        held_sms_few,
        never_launches,
        two_never_launch,
        dispatch_signal,
        combine_signal,
        l1_arrival_count,
        l2_arrival,
        pool_ring,
        intermediate_ring,
    )
}
FIELDS = ("phase", "rank", "peer", "expert", "tile", "have", "want", "pool_block")


def main(case: str, schedule: str) -> int:
    w, launch = CASES[case](schedule)
    for buffer in w.ranks.buffers.values():
        buffer.timeout_ms, buffer.timeout_s = TIMEOUT_MS, TIMEOUT_MS / 1000
    chosen = (variants(SMALL) if w.problem == SMALL else schedules_on_ranks(w.problem))[schedule]
    told = {
        "experts": [
            [e for e, rows in enumerate(w.counts(rank)) if rows]
            for rank in range(w.problem.num_ranks)
        ],
        "ring_blocks": ring_blocks(w.problem, chosen.block_m),
        "num_sms": chosen.num_sms,
    }
    w.ranks.synchronize()
    try:
        launch()
    except MegaMoeTimeout as error:
        told.update({name: getattr(error, name) for name in FIELDS}, message=str(error))
        told["reports"] = [
            dict(zip(REPORT_FIELDS, slot, strict=False), report_of=rank)
            for rank, buffer in w.ranks.buffers.items()
            for slot in buffer.report.view(-1, REPORT_SLOT).tolist()
            if slot[0]
        ]
    print(json.dumps(told), flush=True)
    return 0 if "message" in told else 3


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    os._exit(code)  # what asks the GPU once more, while objects go, would abort the process
