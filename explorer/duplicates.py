"""Which candidates are the same launch, so that only one of them is timed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tl_megamoe.device.walk import first_blocks, walk_order
from tl_megamoe.kernel import KernelReport
from tl_megamoe.layout import make_layout
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule


def launch_key(
    report: KernelReport,
    problem: Problem,
    schedule: Schedule,
    capacity: int,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    phase: str = "fused",
) -> tuple[Hashable, ...]:
    """What a launch of a candidate runs: two candidates with equal keys are the same launch.

    The kernel's text, its grid and shared memory (which the text does not hold), and the scalars
    it is launched with (`CompiledKernel.launch`) as far as its phase reads them.

    Args:
        report: of the candidate's kernel of `phase`.
        problem: the layer as it runs.
        schedule: the candidate.
        capacity: tokens of a rank's buffer.
        counts: rows that each local expert receives, a list for each rank; for candidates that are
            timed with several routings the lists of all of them. With it the order is the one that
            the walk really takes (`device.walk.walk_order`): where the ring wraps a schedule in
            wave order walks in lag order, and a lag beyond the last block is no other than that
            block. None compares the schedules' own fields.
        phase: what is timed; the walk's order reaches `fused` alone, prefetch `dispatch` too, the
            place in L2 all that load weights.
    """
    lag_order = schedule.order == "lag"
    step = schedule.lag if lag_order else schedule.experts_per_wave
    walks: tuple[tuple[bool, int], ...] = ()
    if phase == "fused" and counts is None:
        walks = ((lag_order, step),)
    elif phase == "fused" and counts is not None:
        ring = make_layout(problem, capacity).ring_blocks(schedule.block_m)
        blocks = [first_blocks(received, schedule.block_m)[-1] for received in counts]
        orders = [walk_order(n, problem.num_local_experts, ring, lag_order, step) for n in blocks]
        # The device cuts a lag at the number of blocks (`tlmm_task`).
        walks = tuple(
            (lag, min(by, n) if lag else by) for n, (lag, by) in zip(blocks, orders, strict=True)
        )
    prefetch = schedule.prefetch if phase in ("fused", "dispatch") else None
    evict_first = schedule.evict_first if phase in ("fused", "linear1", "linear2") else None
    return (report.source_hash, report.smem_bytes, schedule.num_sms, walks, prefetch, evict_first)
