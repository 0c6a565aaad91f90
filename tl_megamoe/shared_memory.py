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


def whole_kib(num_bytes: int) -> int:
    return -(-num_bytes // 1024) * 1024


def buffers(schedule: Schedule, problem: Problem, recipe: Recipe, few: bool) -> dict[str, int]:
    """`Schedule.smem_buffers`, with the table of few routes or without."""
    s, scales = schedule, recipe.scales_per_k_block
    tables = 4 * s.task_slots + problem.num_experts + 3 * problem.num_local_experts + 2
    tables += s.threads if few else 0
    sizes = {
        "ring_a": s.stages * s.block_m * SCALE_BLOCK,
        "ring_b": s.stages * s.max_block_n * SCALE_BLOCK,
        "ring_a_sf": s.stages * scales * s.block_m * 4,
        "staging": STAGING_BYTES,
        "amax": 2 * (s.tile_warps * s.block_m if s.swapped else 2 * 64) * 4,
        "scales": 2 * scales * s.block_m * 4,
        "tables": 4 * tables,
        "barriers": 8 * (2 * s.stages + s.row_slots + s.task_slots),
    }
    if s.swapped:
        sizes["inverse"] = 2 * s.block_m * 4
    return {name: whole_kib(size) for name, size in sizes.items()}


def row_chunk(schedule: Schedule, problem: Problem, recipe: Recipe, few: bool = False) -> int:
    """`Schedule.row_chunk`, beside the table of few routes or without it."""
    free = SMEM_LIMIT_BYTES - sum(buffers(schedule, problem, recipe, few).values())
    for chunk in range(min(problem.hidden, MAX_ROW_CHUNK), 0, -SCALE_BLOCK):
        if problem.hidden % chunk == 0 and whole_kib(chunk * schedule.row_slots) <= free:
            return chunk
    return 0


def has_room_for_few(schedule: Schedule, problem: Problem, recipe: Recipe) -> bool:
    """Whether the table of few routes fits beside row chunks as large as without it, and what they
    are counted in, a byte an expert and warp, the staging buffer."""
    if schedule.threads // 32 * problem.num_experts > STAGING_BYTES:
        return False
    chunk = row_chunk(schedule, problem, recipe)
    return chunk > 0 and row_chunk(schedule, problem, recipe, few=True) == chunk
