"""Where everything lies in a rank's symmetric buffer: one contiguous allocation, 64-bit offsets.

The layout depends on the problem and the capacity only, never on the schedule: one buffer serves
every schedule, and all ranks agree on every offset. `RANKS` below is `num_ranks`, `CAP` the
capacity.

An unused guard lies before each section and behind the last.

section               shape                          what it holds
x                     (CAP, hidden) e4m3             tokens of this rank, filled by the caller
x_sf                  (CAP, hidden/128) f32          their scales
topk_idx              (CAP, topk) i64                global expert of a route, -1 for none
topk_weights          (CAP, topk) f32                routing weights
src_routes            (local experts, RANKS, CAP*topk) i32   routes (token*topk+slot) a source sends
                                                     (not few ones: phases/dispatch.py)
l1_acts, l1_acts_sf   (ring, hidden), (hidden/128, ring)     receive pool of linear1
l1_topk_weights       (pool,) f32                    routing weight of a pool row
token_src_metadata    (pool,) i32                    rank<<24 | slot*CAP+token of a pool row
l2_acts, l2_acts_sf   (ring, intermediate), (intermediate/group, ring)  pool of linear2
combine_acts          (topk, CAP, hidden) bf16       rows that come back to this rank's tokens
recv_stats            (local experts,) i32           default target of the cumulative counts
workspace             i32                            counters, see `workspace_layout`

`pool` counts every row that any routing can bring to this rank, `ring` the rows that there is
memory for: pool block b lives in ring block b % ring blocks. One rank has them equal. With more
ranks all tokens of all ranks may meet on one of them, RANKS times what an even routing brings; a
launch that receives more than the ring holds runs linear2 a lag behind linear1 and reuses the rows
of blocks that are done (device/walk.py, `walk_order`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

from .problem import SCALE_BLOCK, Problem
from .recipe import Recipe
from .schedule import COUNTER_BITS

ALIGNMENT = 1024
"""Bytes every section starts at a multiple of: what TMA and 128-byte swizzles ask for, and more."""
GUARD_BYTES = 1024
"""Bytes before the first section and at least as many behind each, which nothing uses:
`SymmBuffer(debug=True)` looks whether anything was written there."""
MIN_BLOCK_M = 32
MAX_BLOCK_M = 128
MAX_RANKS = 16
"""Ranks of one NVLink domain that a launch may span: their signal words share a 128-byte line, and
a pool row's source rank has its own bits above `COUNTER_BITS`."""
RING_FRACTION = Fraction(7, 16)
"""Part of a rank's own routes that the ring holds beside one block an expert. With it 8192 tokens
on 8 ranks take 623 MiB (deepseek-v4-flash) and 1084 MiB (deepseek-v4-pro)."""
POOL_BLOCK_BITS = 22
"""Bits of a pool block, of 64 rows at least, in a task (device/walk.py)."""
LINE = 32
"""Integers of a 128-byte line: no two barriers share one."""
ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class Section:
    """A typed array in the buffer: `offset` in bytes from the start of the buffer.

    `peer_access` says whether other ranks read or write it.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    peer_access: bool

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """The sections of a symmetric buffer, in address order.

    Attributes:
        capacity: tokens a rank may contribute.
        recipe: decides the scales of an intermediate row.
        pool_rows: rows that are numbered: every routing, also one with all tokens on one expert or
            an expert several times in one token.
        ring_rows: rows that the pools have memory for.
        num_bytes: size of the buffer.
    """

    problem: Problem
    capacity: int
    recipe: Recipe
    pool_rows: int
    ring_rows: int
    sections: dict[str, Section]
    workspace_offsets: dict[str, int]
    num_bytes: int

    @property
    def guards(self) -> dict[str, tuple[int, int]]:
        """Offset and length in bytes of what is unused before each section, by its name, and
        behind the last, as `end`."""
        found: dict[str, tuple[int, int]] = {}
        end = 0
        for section in self.sections.values():
            found[section.name] = (end, section.offset - end)
            end = section.offset + section.num_bytes
        return {**found, "end": (end, self.num_bytes - end)}

    @property
    def max_pool_blocks(self) -> int:
        """Pool blocks at the smallest block_m: how many arrival counters there are."""
        return self.pool_rows // MIN_BLOCK_M

    def ring_blocks(self, block_m: int) -> int:
        """Pool blocks of `block_m` rows that the pools have memory for."""
        return self.ring_rows // block_m

    def describe(self) -> str:
        """The size formula with its terms, a line a section, and what of it other ranks reach."""
        lines = [
            f"{self.problem.name}, capacity {self.capacity}, {self.problem.num_ranks} ranks, "
            f"recipe {self.recipe}: {self.num_bytes:,} bytes"
        ]
        for s in self.sections.values():
            shape = " x ".join(f"{n:,}" for n in s.shape)
            place = f"{s.num_bytes:>16,}  at {s.offset:>16,}"
            reach = "symmetric" if s.peer_access else "local"
            lines.append(f"  {s.name:<20} {place}  {reach:<9}  {shape} {s.dtype}")
        symmetric = sum(s.num_bytes for s in self.sections.values() if s.peer_access)
        local = sum(s.num_bytes for s in self.sections.values() if not s.peer_access)
        padding = self.num_bytes - symmetric - local
        lines.append(
            f"  symmetric {symmetric:,} + local {local:,} + alignment and guards {padding:,} = "
            f"{self.num_bytes:,} bytes = {self.num_bytes / 2**20:.1f} MiB"
        )
        return "\n".join(lines)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def num_pool_rows(problem: Problem, capacity: int) -> int:
    """Rows a rank may receive: every route of every rank, and a partial block for each expert."""
    routes = problem.num_ranks * capacity * problem.num_topk
    return _round_up(routes + problem.num_local_experts * (MAX_BLOCK_M - 1), MAX_BLOCK_M)


def num_ring_rows(problem: Problem, capacity: int) -> int:
    """Rows of memory behind the pools, a multiple of 128 and of two blocks at least."""
    pool = num_pool_rows(problem, capacity)
    if problem.num_ranks == 1:
        return pool
    routes = math.ceil(RING_FRACTION * capacity * problem.num_topk)
    blocks = problem.num_local_experts + -(-routes // MAX_BLOCK_M)
    return min(pool, blocks * MAX_BLOCK_M)


def workspace_layout(problem: Problem, pool_blocks: int) -> dict[str, int]:
    """Offsets of the counters in the workspace, in int32 elements, and its length as `end`.

    `dispatch_sync` and `combine_sync` are grid barriers and never reset (top-bit sense).
    `dispatch_signal` and `combine_signal` hold a word a peer, in which it counts its launches, and
    are never reset either. `expert_recv_count` of more than one rank is overwritten by its senders
    in every launch. The others are zero between launches: a launch clears what it counted.
    """
    offsets: dict[str, int] = {}
    end = 0

    def add(name: str, length: int) -> None:
        nonlocal end
        offsets[name] = end
        end += length

    for name in ("dispatch_sync", "combine_sync", "dispatch_signal", "combine_signal", "next_task"):
        add(name, LINE)
    add("expert_send_count", problem.num_experts)
    if problem.num_ranks == 1:  # nobody else sends: the counts are received where they are made
        offsets["expert_recv_count"] = offsets["expert_send_count"]
    else:
        add("expert_recv_count", problem.num_experts)
    add("expert_recv_count_sum", problem.num_local_experts)
    for name in ("l1_arrival_count", "l2_arrival", "l2_done"):
        add(name, pool_blocks)
    offsets["end"] = end
    return offsets


@lru_cache(maxsize=256)
def make_layout(problem: Problem, capacity: int, recipe: Recipe | None = None) -> Layout:
    """Lay out the buffer of one rank.

    Args:
        problem: the layer.
        capacity: the most tokens a rank may contribute, at least 1; the same on all ranks.
        recipe: `Recipe()` when None.

    Raises:
        ValueError: capacity below 1, or too large for the source metadata; too many ranks.
    """
    recipe = recipe or Recipe()
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ValueError(f"capacity={capacity!r} tokens a rank must be a positive integer")
    limit = (1 << COUNTER_BITS) // problem.num_topk
    if capacity > limit:
        raise ValueError(
            f"capacity={capacity} x num_topk={problem.num_topk} exceeds 2**{COUNTER_BITS}: a pool "
            f"row's source is stored in {COUNTER_BITS} bits. Largest capacity: {limit}."
        )
    if problem.num_ranks > MAX_RANKS:
        raise ValueError(
            f"num_ranks={problem.num_ranks} of problem {problem.name!r} exceeds {MAX_RANKS}, the "
            "most ranks of one launch. Spread the experts over fewer ranks."
        )
    rows, ring = num_pool_rows(problem, capacity), num_ring_rows(problem, capacity)
    if rows // 64 >= 1 << POOL_BLOCK_BITS:
        raise ValueError(
            f"capacity={capacity} on num_ranks={problem.num_ranks} ranks of problem "
            f"{problem.name!r} numbers {rows} pool rows, over {64 << POOL_BLOCK_BITS}: a task "
            f"holds {POOL_BLOCK_BITS} bits of a pool block. Use a smaller capacity."
        )
    workspace = workspace_layout(problem, rows // MIN_BLOCK_M)
    p = problem
    groups1 = problem.hidden // SCALE_BLOCK
    groups2 = problem.intermediate // recipe.intermediate_group
    fp8, f32, i32 = "float8_e4m3fn", "float32", "int32"
    arrays: list[tuple[str, tuple[int, ...], str, bool]] = [
        ("x", (capacity, p.hidden), fp8, True),
        ("x_sf", (capacity, groups1), f32, True),
        ("topk_idx", (capacity, p.num_topk), "int64", False),
        ("topk_weights", (capacity, p.num_topk), f32, True),
        ("src_routes", (p.num_local_experts, p.num_ranks, capacity * p.num_topk), i32, True),
        ("l1_acts", (ring, p.hidden), fp8, False),
        ("l1_acts_sf", (groups1, ring), f32, False),
        ("l1_topk_weights", (rows,), f32, False),
        ("token_src_metadata", (rows,), i32, False),
        ("l2_acts", (ring // 64, p.intermediate // 64, 64, 64), fp8, False),
        ("l2_acts_sf", (groups2, ring), f32, False),
        ("combine_acts", (p.num_topk, capacity, p.hidden), "bfloat16", True),
        ("recv_stats", (p.num_local_experts,), i32, False),
        ("workspace", (workspace["end"],), i32, True),
    ]
    sections: dict[str, Section] = {}
    offset = GUARD_BYTES
    for name, shape, dtype, peer_access in arrays:
        sections[name] = Section(name, offset, shape, dtype, peer_access)
        offset = _round_up(offset + sections[name].num_bytes + GUARD_BYTES, ALIGNMENT)
    return Layout(problem, capacity, recipe, rows, ring, sections, workspace, offset)
