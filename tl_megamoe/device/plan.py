"""What a kernel knows at compile time, and the names its parameters go by inside the macros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from ..layout import Layout, make_layout
from ..problem import SCALE_BLOCK, Problem
from ..recipe import Recipe
from ..schedule import ROW_STEP, Schedule

FP8 = "float8_e4m3fn"
ITEM_BYTES_BF16 = 2
MAX_ROUTE_STEPS = 8
"""Routes a thread keeps in registers between counting and listing them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Compile-time facts of one program. Hashable, so that macros may close over it.

    Attributes:
        phase: `fused`, or the one phase that a stand-alone program runs.
        clamp: whether gate and up are clamped before SwiGLU (the bound is a kernel argument).
        fast_math: approximate reciprocal and exponential in the SwiGLU epilogue.
        debug: the stand-alone linear1 writes its accumulators to `y_address` too.
        profile: roles stamp what they do into the memory at `trace_address` (device/trace.py).
    """

    phase: str
    problem: Problem
    schedule: Schedule
    recipe: Recipe
    layout: Layout
    clamp: bool
    fast_math: bool
    debug: bool
    profile: bool = False

    @classmethod
    def make(
        cls,
        phase: str,
        problem: Problem,
        schedule: Schedule,
        recipe: Recipe,
        capacity: int,
        clamp: bool,
        fast_math: bool,
        debug: bool,
        profile: bool = False,
    ) -> Plan:
        layout = make_layout(problem, capacity, recipe)
        return cls(phase, problem, schedule, recipe, layout, clamp, fast_math, debug, profile)

    def runs(self, phase: str) -> bool:
        """Whether this program runs `phase`."""
        return self.phase in ("fused", phase)

    @property
    def fused(self) -> bool:
        return self.phase == "fused"

    @property
    def groups1(self) -> int:
        """K blocks of linear1, also the scale groups of a token."""
        return self.problem.hidden // SCALE_BLOCK

    @property
    def groups2(self) -> int:
        """K blocks of linear2, also the tiles of linear1 in a pool block."""
        return self.problem.intermediate // SCALE_BLOCK

    @property
    def walk_tiles1(self) -> int:
        """Linear1 tiles that the walk deals out for a pool block."""
        return self.schedule.linear1_tiles(self.problem) if self.runs("linear1") else 0

    @property
    def walk_tiles2(self) -> int:
        return self.schedule.linear2_tiles(self.problem) if self.runs("linear2") else 0

    @property
    def route_steps(self) -> int:
        """Routes that one thread holds at once: those of the capacity, at most MAX_ROUTE_STEPS."""
        routes = self.layout.capacity * self.problem.num_topk
        return min(-(-routes // (self.schedule.num_sms * self.schedule.threads)), MAX_ROUTE_STEPS)

    @property
    def route_batch(self) -> int:
        """Routes that the grid lists in one round."""
        return self.route_steps * self.schedule.num_sms * self.schedule.threads

    @property
    def few_routes(self) -> int:
        """Routes up to which a launch takes the short way for few; 0 if this program has none.

        Not the profiling build in pingpong mode: with both it spills registers in the K loop.
        """
        if not self.runs("dispatch") or (self.profile and self.schedule.pingpong):
            return 0
        return self.schedule.few_routes(self.problem, self.recipe)

    @property
    def counts_few(self) -> bool:
        """Whether this program has that way."""
        return self.few_routes > 0

    @property
    def gathers(self) -> bool:
        """Whether launches with few routes load the rows of linear1 from their tokens
        (phases/gather.py)."""
        return self.fused and self.counts_few and self.schedule.swapped

    def is_few(self, p: Any) -> Any:
        """Whether a launch has few routes; traced, where `counts_few`."""
        return p.num_tokens * self.problem.num_topk <= self.few_routes

    @property
    def ring_wraps(self) -> bool:
        """Whether a launch may have more pool blocks than the pools have memory for."""
        return self.layout.ring_rows < self.layout.pool_rows

    @property
    def ring_blocks(self) -> int:
        """Pool blocks that the pools have memory for; 2**31 - 1 when that is all of them."""
        return self.layout.ring_blocks(self.schedule.block_m) if self.ring_wraps else 2**31 - 1

    def tile_rows(self, linear: int) -> tuple[int, ...]:
        """`Schedule.tile_rows`."""
        return self.schedule.tile_rows(linear)

    def padded_rows(self, valid: Any) -> Any:
        """Rows that a tile of swapped operands loads, of a block with `valid` rows, which counts
        those of the expert's later blocks too."""
        return T.min((valid + ROW_STEP - 1) // ROW_STEP * ROW_STEP, self.schedule.block_m)

    def takes(self, linear: int, rows: int, valid: Any) -> Any:
        """Whether a block with `valid` rows (or more than it holds) is multiplied as a tile of
        `rows` rows: the fewest of `tile_rows` that hold them."""
        sizes = self.tile_rows(linear)
        if len(sizes) == 1:
            return True
        if rows == sizes[0]:
            return valid <= rows
        fewer = sizes[sizes.index(rows) - 1]
        return valid > fewer if rows == sizes[-1] else (valid > fewer) & (valid <= rows)

    def valid_rows(self, shared: Any, block: Any, expert: Any) -> Any:
        """Rows of a traced pool block that its expert received."""
        return shared.total[expert] - (block - shared.first_block[expert]) * self.schedule.block_m

    def ring_row(self, block: Any) -> Any:
        """First row in memory of a traced pool block."""
        return (block % self.ring_blocks if self.ring_wraps else block) * self.schedule.block_m

    @property
    def row_chunk(self) -> int:
        return self.schedule.row_chunk(self.problem, self.recipe)

    @property
    def chunks_per_row(self) -> int:
        return self.problem.hidden // self.row_chunk

    @property
    def l1_arrival_target(self) -> int:
        """What `l1_arrival_count` of a pool block reaches: a count for each chunk of its rows."""
        return self.schedule.block_m * self.chunks_per_row

    @property
    def warpgroups_a_tile(self) -> int:
        """Math warpgroups that compute one tile."""
        return self.schedule.tile_warps // 4

    @property
    def l2_arrival_target(self) -> int:
        """What `l2_arrival` of a pool block reaches: a count a linear1 tile and warpgroup."""
        return self.warpgroups_a_tile * self.schedule.linear1_tiles(self.problem)

    @property
    def l2_done_target(self) -> int:
        """What `l2_done` of a pool block reaches: one count a linear2 tile."""
        return self.schedule.linear2_tiles(self.problem)

    def offset(self, section: str) -> int:
        """Bytes from a buffer's base address to a section."""
        return self.layout.sections[section].offset

    def counter(self, name: str) -> int:
        """Index of a counter in the workspace, in int32 elements."""
        return self.layout.workspace_offsets[name]


@dataclass(frozen=True, slots=True)
class Params:
    """The kernel's parameters, bundled for the macros. Tensors unless noted.

    `order_step` is `experts_per_wave` with the wave order, `lag` with the lag order. `y_address`
    and `report_address` are plain addresses: y's rows change from call to call, the report is
    pinned host memory.
    """

    topk_idx: Any
    peers: Any
    workspace: Any
    l1_acts: Any
    l1_acts_sf: Any
    l1_topk_weights: Any
    metadata: Any
    l2_acts: Any
    l2_acts_sf: Any
    w1: Any
    w1_sf: Any
    w2: Any
    w2_sf: Any
    recv_stats: Any
    y_address: Any  # int64
    report_address: Any  # int64
    timeout_ms: Any  # int32
    rank: Any  # int32
    num_tokens: Any  # int32
    lag_order: Any  # int32, 1 with the lag order
    order_step: Any  # int32
    prefetch: Any  # int32
    evict_first: Any  # int32, 0 or 1
    clamp: Any  # float32
    trace_address: Any  # int64 in the profiling build, else None
