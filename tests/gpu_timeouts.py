"""Provoke a wait that cannot end, in a process whose CUDA context is lost then.

`python tests/gpu_timeouts.py CASE SCHEDULE` prints what the process could still tell, as JSON: the
attributes and text of MegaMoeTimeout, and the tags of all waits that reported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from gpu_cases import ON_RANKS, RANKS_CAPACITY, SMALL, SMALL_CAPACITY, ring_blocks, variants
from gpu_cases import rank_schedules as schedules_on_ranks
from gpu_world import World, world

from tl_megamoe import MegaMoeTimeout
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.schedule import Schedule
from tl_megamoe.timeouts import REPORT_SLOT

TIMEOUT_MS = 1500
STUCK_BARRIER = 0x7FFFFFFF
"""A grid barrier that begins here lets its first block pass and never the others: the top bit flips
with the first arrival, and all arrivals together end one below its next flip."""
STUCK_COUNT = 100_000
BEHIND = -5
"""A peer's count of launches: one more does not reach this rank's."""


def on_one(schedule: str, phase: str) -> tuple[World, Callable[[], object]]:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(100, 0)
    # A block that passes a stuck barrier reads lists of routes that are not written yet.
    w.ranks.first.src_routes.zero_()
    return w, lambda: w.launch(variants(SMALL)[schedule], phase)


def on_two(schedule: str, tokens: int = 100, routing: str = "uniform") -> tuple[World, Schedule]:
    problem = ON_RANKS[2]
    w = world(problem, RANKS_CAPACITY)
    w.fill(tokens, 0, routing)
    return w, schedules_on_ranks(problem)[schedule]


def hot(w: World) -> SymmBuffer:
    """The buffer of the rank that receives all rows."""
    return w.ranks.buffers[max(range(2), key=lambda rank: sum(w.counts(rank)))]


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


def never_launches(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_two(schedule)
    return w, lambda: start_some(w, chosen, (0,))


def dispatch_signal(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_two(schedule)
    w.ranks.buffers[1].dispatch_signal[0] = BEHIND
    return w, lambda: w.launch(chosen)


def combine_signal(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_two(schedule)
    w.ranks.buffers[1].combine_signal[0] = BEHIND
    return w, lambda: w.launch(chosen)


def l1_arrival_count(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_two(schedule)
    w.ranks.buffers[1].l1_arrival_count[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


def l2_arrival(schedule: str) -> tuple[World, Callable[[], object]]:
    w, chosen = on_two(schedule)
    w.ranks.buffers[1].l2_arrival[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


def pool_ring(schedule: str) -> tuple[World, Callable[[], object]]:
    """Block 0 seems unfinished: its rows are not free for the block a ring further on."""
    w, chosen = on_two(schedule, RANKS_CAPACITY, "hot1")
    hot(w).l2_arrival[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


def intermediate_ring(schedule: str) -> tuple[World, Callable[[], object]]:
    """Rows of linear2 seem in use. Less than twice round the ring, so that no pool row waits."""
    w, chosen = on_two(schedule, 700, "hot1")
    hot(w).l2_done[0] = STUCK_COUNT
    return w, lambda: w.launch(chosen)


CASES: dict[str, Callable[[str], tuple[World, Callable[[], object]]]] = {
    case.__name__: case
    for case in (
        dispatch_sync,
        combine_sync,
        never_launches,
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
        "first_experts": [
            next((e for e, n in enumerate(w.counts(rank)) if n), None)
            for rank in range(w.problem.num_ranks)
        ],
        "hot_rank": hot(w).rank if w.problem.num_ranks == 2 else 0,
        "ring_blocks": ring_blocks(w.problem, chosen.block_m),
        "num_sms": chosen.num_sms,
    }
    w.ranks.synchronize()
    try:
        launch()
    except MegaMoeTimeout as error:
        told.update({name: getattr(error, name) for name in FIELDS}, message=str(error))
        told["tags"] = sorted(
            {
                int(slot[0])
                for buffer in w.ranks.buffers.values()
                for slot in buffer.report.view(-1, REPORT_SLOT)
                if slot[0]
            }
        )
    print(json.dumps(told), flush=True)
    return 0 if "message" in told else 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
