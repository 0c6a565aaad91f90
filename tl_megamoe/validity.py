"""The rules that `Schedule.violations` states, and the limits they are about.

Each is a sentence with a name of `rules.RULES`: the field, its value and what would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .problem import SCALE_BLOCK, Problem, divisors_of
from .recipe import Recipe
from .rules import Violations
from .shared_memory import SMEM_LIMIT_BYTES

if TYPE_CHECKING:
    from .schedule import Schedule

LAUNCH_REGISTERS = 168
"""Registers a thread at launch: what 384 threads get of an SM's 65,536, rounded down to 8.
setmaxnreg only moves them between warpgroups: an increase past the block's own waits for ever."""
MAX_TILES = 256
"""Tiles of a pool block and phase: 8 bits of a task (device/walk.py)."""
SWAPPED_ROWS = 64
"""Most rows of a tile of swapped operands: the row scales of more, read from shared memory, which
is as busy as the tensor cores, cost more than the padding that they save (results/notes.md)."""


def violations(s: Schedule, problem: Problem, recipe: Recipe | None, phase: str) -> Violations:
    """`Schedule.violations`."""
    out = field_violations(s)
    if out:
        return out
    out += tile_violations(s, phase)
    out += cluster_violations(s)
    out += problem_violations(s, problem)
    registers = s.role_threads * s.load_registers
    registers += (s.threads - s.role_threads) * s.math_registers
    launched = s.threads * LAUNCH_REGISTERS
    if registers > launched:
        out.add(
            "register_pool",
            f"load_registers={s.load_registers} and math_registers={s.math_registers} "
            f"take {registers} registers a block, over the {launched} it is launched with",
        )
    if not s.row_chunk(problem, recipe):
        fixed = sum(s.smem_buffers(problem, recipe).values())
        out.add(
            "shared_memory",
            f"stages={s.stages} with block_m={s.block_m} and block_n={s.max_block_n} "
            f"takes {fixed} bytes of shared memory and leaves no room for "
            f"{s.row_slots} row chunks under {SMEM_LIMIT_BYTES}",
        )
    return out


def field_violations(s: Schedule) -> Violations:
    """Fields alone: values, and what they ask of each other."""
    choices: dict[str, tuple[Any, ...]] = {
        "math_mode": ("cooperative", "pingpong", "swapped"),
        "block_m": (32, 64, 128),
        "linear1_block_n": (128, 256),
        "linear2_block_n": (128, 256),
        "order": ("wave", "lag"),
        "load_warps": (1, 2),
        "evict_first": (0, 1),
        "cluster_size": (1, 2),
    }
    at_least = {
        "stages": 2,
        "experts_per_wave": 1,
        "lag": 0,
        "dispatch_warps": 1,
        "rows_in_flight": 1,
        "num_sms": 1,
        "prefetch": 0,
    }
    out = Violations()
    for field, allowed in choices.items():
        value = getattr(s, field)
        if value not in allowed:
            out.add("values", f"{field}={value!r} must be one of {allowed}")
    for field, least in at_least.items():
        value = getattr(s, field)
        if not isinstance(value, int) or not least <= value < 1 << 24:
            out.add("values", f"{field}={value!r} must be an integer in {least}..2**24-1")
    for field in ("load_registers", "math_registers"):
        value = getattr(s, field)
        low, high = (24, LAUNCH_REGISTERS) if field[0] == "l" else (LAUNCH_REGISTERS, 256)
        if not isinstance(value, int) or value % 8 or not low <= value <= high:
            out.add(
                "register_split",
                f"{field}={value!r} must be a multiple of 8 in {low}..{high}: load warps give "
                "registers up, math warps take them (setmaxnreg, "
                f"{LAUNCH_REGISTERS} at launch)",
            )
    if out:
        return out
    if s.dispatch_warps + s.load_warps > 4:
        out.add(
            "role_warps",
            f"dispatch_warps={s.dispatch_warps} + load_warps={s.load_warps} exceeds the "
            "4 warps of their warpgroup",
        )
    if s.rows_in_flight > 32:
        out.add("row_lanes", f"rows_in_flight={s.rows_in_flight} exceeds the 32 lanes of a warp")
    if (s.order == "lag") != (s.lag > 0):
        out.add(
            "order_lag",
            f"lag={s.lag} with order={s.order!r}: lag is 0 with order 'wave' and at "
            "least 1 with order 'lag'",
        )
    return out


def tile_violations(s: Schedule, phase: str) -> Violations:
    """What a math mode asks of tiles."""
    out = Violations()
    if s.block_m == 32 and phase != "dispatch":
        out.add(
            "wgmma_rows",
            f"block_m={s.block_m} is below the 64 rows of a WGMMA tile: only the "
            f"stand-alone phase 'dispatch' runs it, not {phase!r}",
        )
    if s.swapped and s.block_m > SWAPPED_ROWS:
        out.add(
            "swapped_rows",
            f"math_mode={s.math_mode!r} keeps the scales of all rows of a tile in registers "
            f"and needs block_m={SWAPPED_ROWS}, found block_m={s.block_m}",
        )
    if s.pingpong and s.block_m == 128:
        out.add(
            "pingpong_rows",
            f"math_mode={s.math_mode!r} gives each warpgroup a tile of 64 rows and needs "
            f"block_m=64, found block_m={s.block_m}",
        )
    for linear in ("linear1", "linear2"):
        if getattr(s, f"{linear}_block_n") == 128:
            if s.pingpong:
                out.add(
                    "pingpong_columns",
                    f"{linear}_block_n=128 splits rows between the warpgroups; with math_mode="
                    f"'pingpong' each computes 64 x 256: use {linear}_block_n=256",
                )
            elif s.swapped:
                out.add(
                    "swapped_columns",
                    f"{linear}_block_n=128 leaves a warpgroup without weights; with math_mode="
                    f"'swapped' each takes 128 rows of them: use {linear}_block_n=256",
                )
            elif s.block_m == 64:
                out.add(
                    "row_split",
                    f"{linear}_block_n=128 splits rows between two warpgroups of 64 rows each "
                    "and needs block_m=128, found block_m=64",
                )
    return out


def cluster_violations(s: Schedule) -> Violations:
    """What a cluster asks of the other fields."""
    out = Violations()
    if s.cluster_size == 1:
        return out
    if s.math_mode != "cooperative" or s.block_m != 128:
        out.add(
            "cluster_tiles",
            f"cluster_size={s.cluster_size} shares the weights of cooperative tiles of 128 "
            f"rows, found math_mode={s.math_mode!r} and block_m={s.block_m}",
        )
    if (s.linear1_block_n, s.linear2_block_n) != (256, 256):
        out.add(
            "cluster_columns",
            f"cluster_size={s.cluster_size} has each block load 128 of 256 weight rows, "
            f"found linear1_block_n={s.linear1_block_n} and linear2_block_n="
            f"{s.linear2_block_n}",
        )
    if (s.dispatch_warps, s.load_warps) != (1, 2):
        out.add(
            "cluster_warps",
            f"cluster_size={s.cluster_size} needs dispatch_warps=1 and load_warps=2, since "
            f"the fourth warp schedules, found {s.dispatch_warps} and {s.load_warps}",
        )
    if s.num_sms % s.cluster_size:
        out.add(
            "cluster_grid",
            f"num_sms={s.num_sms} is not a multiple of cluster_size={s.cluster_size}",
        )
    return out


def problem_violations(s: Schedule, problem: Problem) -> Violations:
    """What a problem asks."""
    out = Violations()
    local = problem.num_local_experts
    if local % s.experts_per_wave:
        divisors = ", ".join(map(str, divisors_of(local)))
        out.add(
            "wave_divides_experts",
            f"experts_per_wave={s.experts_per_wave} does not divide num_local_experts="
            f"{local} ({problem.num_experts} experts / {problem.num_ranks} ranks). Divisors: "
            f"{divisors}. List valid schedules with: tl-megamoe list {problem.flags()}",
        )
    if s.order == "lag" and s.experts_per_wave != local:
        out.add(
            "lag_one_wave",
            f"experts_per_wave={s.experts_per_wave} with order='lag' must be "
            f"num_local_experts={local}: the lag order has one wave",
        )
    if problem.hidden % s.linear2_block_n:
        out.add(
            "columns_divide_hidden",
            f"linear2_block_n={s.linear2_block_n} does not divide hidden={problem.hidden}",
        )
    if s.cluster_size == 2 and problem.hidden < 512:
        out.add(
            "cluster_hidden",
            f"cluster_size={s.cluster_size} needs two linear2 tiles of a pool block, "
            f"hidden=512 or more, found hidden={problem.hidden}: with one, two blocks may wait "
            "for each other (device/cluster.py)",
        )
    for phase, tiles in (
        ("linear1", s.linear1_tiles(problem)),
        ("linear2", s.linear2_tiles(problem)),
    ):
        if tiles > MAX_TILES:
            out.add(
                "walk_tiles",
                f"{phase}_block_n={getattr(s, f'{phase}_block_n')} makes {tiles} tiles of a "
                f"pool block; the walk names at most {MAX_TILES}",
            )
    k_blocks = min(problem.hidden, problem.intermediate) // SCALE_BLOCK
    if s.stages > max(k_blocks, 2):
        out.add(
            "stages_k_blocks",
            f"stages={s.stages} exceeds the {k_blocks} K blocks of the shorter phase "
            f"(hidden={problem.hidden}, intermediate={problem.intermediate}); 2 is always "
            "valid",
        )
    if s.prefetch > problem.hidden // SCALE_BLOCK:
        out.add(
            "prefetch_k_blocks",
            f"prefetch={s.prefetch} exceeds the {problem.hidden // SCALE_BLOCK} K blocks of "
            f"linear1 (hidden={problem.hidden})",
        )
    return out
