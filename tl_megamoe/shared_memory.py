"""What a block keeps in shared memory, in bytes: device/ring.py allocates the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe

if TYPE_CHECKING:
    from .schedule import Schedule

SMEM_LIMIT_BYTES = 227 * 1024
"""Shared memory one SM90 block may take, static part included (CUDA programming guide, 9.0)."""
MAX_ROW_CHUNK = 2048
STAGING_BYTES = 16 * 1024
CLAIM_SLOTS = 4
"""Claims on their way from the first to the second block of a cluster (device/cluster.py)."""
FEW_COUNT_BYTES = 2
"""Of few routes, what those of an expert in a warp, and before it, are counted in."""
MAX_FEW_STEPS = 2
"""Of few routes, those that a thread counts at most. With more, counting alone saves nothing, and
rows come faster through the pool than from their tokens (results/notes.md)."""


def whole_kib(num_bytes: int) -> int:
    return -(-num_bytes // 1024) * 1024


def buffers(
    schedule: Schedule, problem: Problem, recipe: Recipe, few_routes: int
) -> dict[str, int]:
    """`Schedule.smem_buffers`, with a table of so many routes."""
    s, scales = schedule, recipe.scales_per_k_block
    tables = 4 * s.task_slots + 2 + problem.num_experts + 3 * problem.num_local_experts + 2
    tables += few_routes
    barriers = 2 * s.stages + s.row_slots + s.task_slots
    if s.cluster_size == 2:
        tables += CLAIM_SLOTS
        barriers += s.stages + 1 + 2 * CLAIM_SLOTS
    sizes = {
        "ring_a": s.stages * s.block_m * SCALE_BLOCK,
        "ring_b": s.stages * s.max_block_n * SCALE_BLOCK,
        "ring_a_sf": s.stages * scales * s.block_m * 4,
        "staging": STAGING_BYTES,
        "amax": 2 * (s.tile_warps * s.block_m if s.swapped else 2 * 64) * 4,
        "scales": 2 * scales * s.block_m * 4,
        "tables": 4 * tables,
        "barriers": 8 * barriers,
    }
    if s.swapped:
        sizes["inverse"] = 2 * s.block_m * 4
    return {name: whole_kib(size) for name, size in sizes.items()}


def row_chunk(schedule: Schedule, problem: Problem, recipe: Recipe, few_routes: int = 0) -> int:
    """`Schedule.row_chunk`, beside a table of so many routes."""
    free = SMEM_LIMIT_BYTES - sum(buffers(schedule, problem, recipe, few_routes).values())
    for chunk in range(min(problem.hidden, MAX_ROW_CHUNK), 0, -SCALE_BLOCK):
        if problem.hidden % chunk == 0 and whole_kib(chunk * schedule.row_slots) <= free:
            return chunk
    return 0


def few_steps(schedule: Schedule, problem: Problem, recipe: Recipe) -> int:
    """Routes a thread for which there is room: their table beside row chunks as large as without
    it, and what they are counted in, a number an expert and warp, in the staging buffer."""
    if schedule.threads // 32 * problem.num_experts * FEW_COUNT_BYTES > STAGING_BYTES:
        return 0
    chunk = row_chunk(schedule, problem, recipe)
    for steps in range(MAX_FEW_STEPS if chunk else 0, 0, -1):
        if row_chunk(schedule, problem, recipe, steps * schedule.threads) == chunk:
            return steps
    return 0
