"""Combine: y[token] = sum over its slots of combine_acts[slot, token], FP32, rounded once to BF16.

role   warps      work
math   4 + 4      wait until every block's rows are written, then one (token, column chunk) a warp

barrier         arrivals                meaning
MATH            256                     all tiles of this block are scattered
combine_sync    one a block             all rows are in combine_acts (gpu scope, never reset)
combine_signal  one a launch and peer   all rows of the peer are there (system scope, never reset)

Slots are added in slot order, so y does not depend on the schedule or on which block ran a tile.
"""

from __future__ import annotations

import tilelang.language as T

from ..device import barriers
from ..device.plan import ITEM_BYTES_BF16, Params, Plan
from ..device.remote import peer_tensor
from ..device.ring import Shared

LANE_COLUMNS = 8
"""Columns of one 16-byte BF16 load."""


def _column(item, chunks: int, width: int, lane):
    """First column of a lane. An expression, not a bound name: the vectoriser must see it is a
    multiple of 8, else it falls back to 2-byte accesses."""
    return item % chunks * width + lane * LANE_COLUMNS


@T.macro
def wait_for_rows(plan: Plan, p: Params):
    """Every tile of every block of every rank is done and visible. Role: math, 256 threads."""
    barriers.sync(barriers.MATH, 256)
    if plan.problem.num_ranks > 1:
        if T.get_thread_binding() < 160:
            barriers.rank_sync(plan, p, "combine", barriers.TAG_COMBINE_PEER, send_counts=False)
    else:
        if T.get_thread_binding() == 128:
            barriers.grid_sync(plan, p, "combine_sync", barriers.TAG_COMBINE_SYNC)
    barriers.sync(barriers.MATH, 256)


@T.macro
def combine(plan: Plan, p: Params, grid_block, wg):
    """Sum the slots of every token of this rank. Role: math (each warpgroup calls it)."""
    problem, num_sms = plan.problem, plan.schedule.num_sms
    hidden, topk = problem.hidden, problem.num_topk
    lanes = 32 * LANE_COLUMNS
    vectors = 2 if hidden % (2 * lanes) == 0 else 1  # vectors a lane keeps in flight
    width = lanes * vectors
    chunks = (hidden + width - 1) // width
    tx = T.get_thread_binding()
    lane = tx % 32
    total = T.alloc_local((LANE_COLUMNS,), "float32")
    rows = T.alloc_local((topk * vectors, LANE_COLUMNS), "bfloat16")
    rounded = T.alloc_local((LANE_COLUMNS,), "bfloat16")
    expert = T.alloc_local((topk,), "int64")
    acts = peer_tensor(
        plan, p.peers, p.rank, "combine_acts", plan.layout.sections["combine_acts"].shape
    )
    item = T.alloc_var("int32")
    item = grid_block * 8 + wg * 4 + (tx - 128 - wg * 128) // 32
    while item < p.num_tokens * chunks:
        token = item // chunks
        if hidden % width == 0 or _column(item, chunks, width, lane) < hidden:
            for slot in T.unroll(topk):
                expert[slot] = p.topk_idx[token, slot]
            # All loads are in flight before the first add; an unused slot is read and dropped.
            for r in T.unroll(topk * vectors):
                for u in T.vectorized(LANE_COLUMNS):
                    rows[r, u] = acts[
                        r % topk,
                        token,
                        _column(item, chunks, width, lane) + r // topk * lanes + u,
                    ]
            for v in T.unroll(vectors):
                for u in T.unroll(LANE_COLUMNS):
                    total[u] = 0.0
                for slot in T.unroll(topk):
                    for u in T.unroll(LANE_COLUMNS):
                        total[u] += T.if_then_else(
                            (expert[slot] >= 0) & (expert[slot] < problem.num_experts),
                            T.Cast("float32", rows[v * topk + slot, u]),
                            T.float32(0.0),
                        )
                for u in T.unroll(LANE_COLUMNS):
                    rounded[u] = T.Cast("bfloat16", total[u])
                y_row = T.make_tensor_from_addr(
                    p.y_address + T.Cast("int64", token) * (hidden * ITEM_BYTES_BF16),
                    (hidden,),
                    "bfloat16",
                )
                for u in T.vectorized(LANE_COLUMNS):
                    y_row[_column(item, chunks, width, lane) + v * lanes + u] = rounded[u]
        item += num_sms * 8


@T.macro
def reset_counters(plan: Plan, p: Params, shared: Shared, grid_block):
    """Zero what this launch counted, behind the last barrier: the next one needs no memset."""
    num_sms = plan.schedule.num_sms
    tx = T.get_thread_binding()
    i = T.alloc_var("int32")
    i = grid_block * 256 + tx - 128
    while i < shared.first_block[plan.problem.num_local_experts]:
        for counter in ("l1_arrival_count", "l2_arrival", "l2_done"):
            p.workspace[plan.counter(counter) + i] = 0
        i += num_sms * 256
    if (grid_block == 0) & (tx == 128):
        p.workspace[plan.counter("next_task")] = 0
    i = grid_block * 256 + tx - 128
    while i < plan.problem.num_experts:
        p.workspace[plan.counter("expert_send_count") + i] = 0
        i += num_sms * 256
