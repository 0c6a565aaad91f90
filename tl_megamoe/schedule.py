"""How one launch runs a problem: the free choices, what follows from them, and which are valid."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from . import shared_memory, validity
from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe
from .rules import Violations

BLOCK_K = SCALE_BLOCK
"""Columns of one K block: one activation scale, one 128-byte FP8 row of a swizzled tile."""
MATH_WARPS = 8
ROW_STEP = 16
"""Rows of a tile of swapped operands are a multiple of it: two 8 x 8 matrices of a transposing
store, 16 bytes of row scales."""
COOPERATIVE_THRESHOLD = 256
"""Tokens from which the built-in default shares a tile between the two math warpgroups."""
NAME_PREFIXES = {"pingpong": "pp-", "swapped": "sw-"}
"""What a schedule's name begins with, by math mode; nothing for cooperative."""
COUNTER_BITS = 24
"""Bits of `slot * capacity + token` in the source metadata of a pool row."""


class ScheduleError(ValueError):
    """A schedule breaks a rule for the problem at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One point of the search space. Hashable; only free choices are fields.

    Attributes:
        math_mode: `cooperative`: the two math warpgroups share a tile. `pingpong`: each has its
            own, so that one finishes a tile while the other multiplies (block_m 64, block_n 256).
            `swapped`: they share a tile, but its weights are the M operand of WGMMA and its rows
            the N operand, in steps of 16: for few rows an expert (block_m 64, block_n 256).
        block_m: rows of a pool block and of a tile, 64 or 128; 32 for the dispatch phase alone.
        linear1_block_n, linear2_block_n: weight rows that one K loop of the phase multiplies.
            Cooperative warpgroups split the rows of a tile of 128, the columns of one of 64. With
            128 (block_m 128 only) a linear1 tile is two K loops, so that it still holds whole
            128-column groups.
        stages: depth of the operand ring in K blocks.
        experts_per_wave: experts whose linear1 tiles all precede their linear2 tiles; divides
            `num_local_experts`. With order `lag` it must be `num_local_experts`.
        order: `wave`, or `lag`: linear1 and linear2 of up to 32 pool blocks come in turn, linear2
            at a fixed distance. A launch of many ranks that receives more pool blocks than the ring
            holds (layout.py) walks in lag order whatever this says (`device.walk.walk_order`).
        lag: that distance in pool blocks; 0 with order `wave`. Where the ring wraps it is cut to
            half the ring and to the ring without a block an expert; with order `wave` it is a
            quarter of the ring then, cut likewise.
        dispatch_warps: warps that pull rows, 1 to 3.
        load_warps: 2: one warp loads A and its scales, one B. 1: one warp loads both.
        load_registers, math_registers: registers a thread after the roles split (the dispatch and
            load warps share one warpgroup, so they share one number).
        rows_in_flight: row chunks that a dispatch warp has in flight.
        num_sms: blocks of the grid, all resident at once.
        prefetch: K blocks of a block's first weight tile sent to L2 while tokens are routed.
        evict_first: 1: the weights of an expert with one pool block, which are read once, are the
            first that L2 gives up, and what only the launch itself reads is dropped from L2 at its
            end instead of being written to memory (device/l2.py). 0: as the hardware does.
        cluster_size: 2: two blocks of the grid take neighbouring tasks, and where both multiply the
            same weights each loads half of them for both (device/cluster.py); for tiles of 128
            rows, with one dispatch warp. 1: every block loads its own.
    """

    math_mode: Literal["cooperative", "pingpong", "swapped"] = "cooperative"
    block_m: int = 128
    linear1_block_n: int = 256
    linear2_block_n: int = 256
    stages: int = 4
    experts_per_wave: int = 1
    order: Literal["wave", "lag"] = "wave"
    lag: int = 0
    dispatch_warps: int = 2
    load_warps: int = 2
    load_registers: int = 40
    math_registers: int = 232
    rows_in_flight: int = 3
    num_sms: int = 132
    prefetch: int = 0
    evict_first: int = 0
    cluster_size: int = 1

    # ---- identity

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedule:
        """A schedule from exactly its fields; `evict_first` and `cluster_size` may be missing,
        which is 0 and 1: files that were written before them lack them.

        Raises:
            ScheduleError: an unknown or missing field, or a value of the wrong type.
        """
        values = {"evict_first": 0, "cluster_size": 1, **values}
        names = {f.name for f in fields(cls)}
        unknown, missing = sorted(set(values) - names), sorted(names - set(values))
        if unknown or missing:
            raise ScheduleError(
                f"schedule with fields {sorted(values)}: unknown {unknown}, missing {missing}"
            )
        for name, value in values.items():
            wanted = str if name in ("order", "math_mode") else int
            if type(value) is not wanted:
                raise ScheduleError(
                    f"{name}={value!r} of a schedule must be {wanted.__name__}, "
                    f"found {type(value).__name__}"
                )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, in order; `from_dict` reads them back."""
        return asdict(self)

    @property
    def name(self) -> str:
        """A short name, unique among schedules: the key of a candidate in the tables."""
        walk = f"w{self.experts_per_wave}" if self.order == "wave" else f"lag{self.lag}"
        mode = NAME_PREFIXES.get(self.math_mode, "")
        end = f"-e{self.evict_first}" if self.evict_first else ""
        end += f"-c{self.cluster_size}" if self.cluster_size > 1 else ""
        return (
            f"{mode}m{self.block_m}-n{self.linear1_block_n}.{self.linear2_block_n}-s{self.stages}-{walk}"
            f"-d{self.dispatch_warps}l{self.load_warps}"
            f"-r{self.load_registers}.{self.math_registers}-f{self.rows_in_flight}"
            f"-sm{self.num_sms}-p{self.prefetch}{end}"
        )

    def kernel_key(self) -> Schedule:
        """The schedule with the fields that a launch passes as scalars set to their defaults.

        Schedules with equal keys share one compiled kernel: `experts_per_wave`, `order`, `lag`,
        `prefetch` and `evict_first` are such.
        """
        default = Schedule()
        return replace(
            self,
            experts_per_wave=default.experts_per_wave,
            order=default.order,
            lag=default.lag,
            prefetch=default.prefetch,
            evict_first=default.evict_first,
        )

    # ---- derived

    def on_sms(self, num_sms: int) -> Schedule:
        """The schedule on so many multiprocessors at most: whole clusters, one at least."""
        clusters = min(self.num_sms, num_sms) // self.cluster_size
        return replace(self, num_sms=max(1, clusters) * self.cluster_size)

    @property
    def pingpong(self) -> bool:
        """Whether each math warpgroup computes its own tile."""
        return self.math_mode == "pingpong"

    @property
    def swapped(self) -> bool:
        """Whether the weights are the M operand of the products, so that N follows the rows."""
        return self.math_mode == "swapped"

    @property
    def tile_warps(self) -> int:
        """Math warps that compute one tile."""
        return MATH_WARPS // 2 if self.pingpong else MATH_WARPS

    @property
    def role_threads(self) -> int:
        """Threads of the dispatch and load roles: one warpgroup, of which some warps may idle."""
        return 128

    @property
    def threads(self) -> int:
        """Threads of a block: dispatch and load, then two math warpgroups."""
        return self.role_threads + 32 * MATH_WARPS

    @property
    def first_load_thread(self) -> int:
        return 32 * self.dispatch_warps

    @property
    def max_block_n(self) -> int:
        return max(self.linear1_block_n, self.linear2_block_n)

    @property
    def row_slots(self) -> int:
        """Row chunks that a block has in flight during dispatch."""
        return self.dispatch_warps * self.rows_in_flight

    @property
    def task_slots(self) -> int:
        """Tiles on their way from the load warps to the math warpgroups (device/tasks.py)."""
        return self.stages + 6

    def tile_rows(self, linear: int) -> tuple[int, ...]:
        """Rows of A that a tile of linear1 or linear2 (`linear` is 1 or 2) may have; a block is
        multiplied as a tile of the fewest that hold it.

        A block of 128 rows that holds at most 64 is multiplied as one of 64, whose columns the
        warpgroups split, where a tile has 256 columns. With swapped operands the rows of a tile
        follow those that its block holds.
        """
        if self.swapped:
            return tuple(range(ROW_STEP, self.block_m + 1, ROW_STEP))
        block_n = self.linear1_block_n if linear == 1 else self.linear2_block_n
        return (64, 128) if self.block_m == 128 and block_n == 256 else (self.block_m,)

    def linear1_tiles(self, problem: Problem) -> int:
        """Linear1 tiles of a pool block: each writes 128 intermediate columns."""
        return problem.intermediate // SCALE_BLOCK

    def linear2_tiles(self, problem: Problem) -> int:
        """Linear2 tiles of a pool block."""
        return problem.hidden // self.linear2_block_n

    def smem_buffers(self, problem: Problem, recipe: Recipe | None = None) -> dict[str, int]:
        """Shared memory by buffer, in bytes, without the row chunks of dispatch.

        Each is made a multiple of 1 KiB (device/ring.py), and so starts at one: what WGMMA's
        swizzles ask for. Dynamic lies behind static memory, at a multiple of 1 KiB too.
        """
        routes = self.few_routes(problem, recipe)
        return shared_memory.buffers(self, problem, recipe or Recipe(), routes)

    def row_chunk(self, problem: Problem, recipe: Recipe | None = None) -> int:
        """Bytes of a row that one bulk copy of dispatch moves: a divisor of the row, as large as
        shared memory allows, at most 2048. 0 when not even 128 bytes fit."""
        return shared_memory.row_chunk(self, problem, recipe or Recipe())

    def few_routes(self, problem: Problem, recipe: Recipe | None = None) -> int:
        """Up to how many routes, some a thread, every block counts without the other blocks
        (phases/dispatch.py); 0 where it never does: on several ranks, and where they lack room."""
        if problem.num_ranks > 1:
            return 0
        return self.threads * shared_memory.few_steps(self, problem, recipe or Recipe())

    def is_few(self, problem: Problem, num_tokens: int, recipe: Recipe | None = None) -> bool:
        """Whether every block of a launch counts all routes of so many tokens."""
        most = self.few_routes(problem, recipe)
        return most > 0 and num_tokens * problem.num_topk <= most

    def launch_gathers(self, problem: Problem, num_tokens: int, recipe: Recipe | None) -> bool:
        """Whether a fused launch loads linear1's rows from their tokens, not through the pool
        (phases/gather.py): with swapped operands, where it has few routes. It leaves nothing in
        `l1_acts`, `l1_acts_sf`, `l1_topk_weights` and `token_src_metadata`."""
        return self.swapped and self.is_few(problem, num_tokens, recipe)

    def smem_bytes(self, problem: Problem, recipe: Recipe | None = None) -> int:
        """Shared memory that a block takes, static and dynamic, in bytes."""
        rows = shared_memory.whole_kib(self.row_slots * self.row_chunk(problem, recipe))
        return sum(self.smem_buffers(problem, recipe).values()) + rows

    # ---- validity

    def violations(
        self, problem: Problem, recipe: Recipe | None = None, phase: str = "fused"
    ) -> Violations:
        """Every rule that this schedule breaks for `problem`: the only statement of validity.

        Args:
            problem: the layer.
            recipe: decides how much shared memory the row scales take; `Recipe()` when None.
            phase: `fused`, or a stand-alone phase, of which `dispatch` multiplies nothing.

        Returns:
            One sentence a rule, each beginning with the field and its value; empty if valid.
        """
        return validity.violations(self, problem, recipe, phase)

    def check(self, problem: Problem, recipe: Recipe | None = None, phase: str = "fused") -> None:
        """Raise ScheduleError with every violation; do nothing for a valid schedule."""
        found = self.violations(problem, recipe, phase)
        if found:
            raise ScheduleError("; ".join(found))


def default_schedule(
    problem: Problem,
    num_tokens: int,
    math_mode: str | None = None,
    cooperative_threshold: int = COOPERATIVE_THRESHOLD,
    recipe: Recipe | None = None,
) -> Schedule:
    """The built-in choice for a problem that no frozen table covers.

    Pingpong below `cooperative_threshold` tokens, where 256 divides the hidden size and a scale
    covers 128 columns (with 64 it is not timed yet). Else cooperative, and block_m follows the mean
    rows an expert receives: up to one block of 64 rows for most experts, else 128. One wave: all
    linear1 tiles, then all linear2 tiles. With a hidden size that 256 does not divide both linears
    split rows: with one of each split ptxas spills.

    Args:
        problem: the layer.
        num_tokens: tokens a rank contributes (a bound that all ranks share).
        math_mode: asked for, whether valid or not (`Schedule.violations` tells); chosen when None.
        cooperative_threshold: tokens from which cooperative is chosen.
        recipe: of the launch; `Recipe()` when None.
    """
    rows = num_tokens * problem.num_topk * problem.num_ranks / problem.num_experts
    wide = problem.hidden % 256 == 0
    shortest = min(problem.hidden, problem.intermediate) // BLOCK_K
    if math_mode is None:
        few = num_tokens < cooperative_threshold
        suits = wide and (recipe or Recipe()).scales_per_k_block == 1
        math_mode = "pingpong" if few and suits else "cooperative"
    one_shape = math_mode in ("pingpong", "swapped")
    block_m = 64 if one_shape or (rows <= 64 and wide) else 128
    return Schedule(
        math_mode=math_mode,  # type: ignore[arg-type]
        block_m=block_m,
        linear1_block_n=256 if wide or one_shape else 128,
        linear2_block_n=256 if wide or one_shape else 128,
        stages=max(2, min(4, shortest)),
        experts_per_wave=problem.num_local_experts,
    )
