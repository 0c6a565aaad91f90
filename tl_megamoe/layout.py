"""Where everything lies in a rank's symmetric buffer: one contiguous allocation, 64-bit offsets.

The layout depends on the problem and the capacity only, never on the schedule: one buffer serves
every schedule, and all ranks agree on every offset. `RANKS` below is `num_ranks`, `CAP` the
capacity.

section               shape                          what it holds
x                     (CAP, hidden) e4m3             tokens of this rank, filled by the caller
x_sf                  (CAP, hidden/128) f32          their scales
topk_idx              (CAP, topk) i64                global expert of a route, -1 for none
topk_weights          (CAP, topk) f32                routing weights
src_routes            (local experts, RANKS, CAP*topk) i32   routes (token*topk+slot) a source sends
l1_acts, l1_acts_sf   (rows, hidden), (hidden/128, rows)     receive pool of linear1
l1_topk_weights       (rows,) f32                    routing weight of a pool row
token_src_metadata    (rows,) i32                    rank<<24 | slot*CAP+token of a pool row
l2_acts, l2_acts_sf   (rows, intermediate), (intermediate/128, rows)  pool of linear2
combine_acts          (topk, CAP, hidden) bf16       rows that come back to this rank's tokens
recv_stats            (local experts,) i32           default target of the cumulative counts
workspace             i32                            counters, see `workspace_offsets`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .problem import SCALE_BLOCK, Problem
from .schedule import COUNTER_BITS

ALIGNMENT = 1024
"""Bytes every section starts at a multiple of: what TMA and 128-byte swizzles ask for, and more."""
MIN_BLOCK_M = 64
MAX_BLOCK_M = 128
ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class Section:
    """A typed array in the buffer: `offset` in bytes from the start of the buffer."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """The sections of a symmetric buffer, in address order.

    Attributes:
        capacity: tokens a rank may contribute.
        pool_rows: rows of the receive pools; holds every routing, also one with all tokens on one
            expert or an expert several times in one token.
        num_bytes: size of the buffer.
    """

    problem: Problem
    capacity: int
    pool_rows: int
    sections: dict[str, Section]
    workspace_offsets: dict[str, int]
    num_bytes: int

    @property
    def max_pool_blocks(self) -> int:
        """Pool blocks at the smallest block_m: how many arrival counters there are."""
        return self.pool_rows // MIN_BLOCK_M

    def describe(self) -> str:
        """The size formula with its terms, a line a section."""
        lines = [f"{self.problem.name}, capacity {self.capacity}: {self.num_bytes:,} bytes"]
        for s in self.sections.values():
            shape = " x ".join(f"{n:,}" for n in s.shape)
            place = f"{s.num_bytes:>16,}  at {s.offset:>16,}"
            lines.append(f"  {s.name:<20} {place}  {shape} {s.dtype}")
        return "\n".join(lines)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def num_pool_rows(problem: Problem, capacity: int) -> int:
    """Rows of the receive pool: every route of every rank, and a partial block for each expert."""
    routes = problem.num_ranks * capacity * problem.num_topk
    return _round_up(routes + problem.num_local_experts * (MAX_BLOCK_M - 1), MAX_BLOCK_M)


def workspace_layout(problem: Problem, pool_blocks: int) -> dict[str, int]:
    """Offsets of the counters in the workspace, in int32 elements, and its length as `end`.

    `dispatch_sync` and `combine_sync` are grid barriers and never reset (top-bit sense). The others
    are zero between launches: a launch clears what it counted.
    """
    line = 32  # one 128-byte line each: no two barriers share a sector
    offsets: dict[str, int] = {"dispatch_sync": 0, "combine_sync": line}
    offsets["expert_send_count"] = 2 * line
    end = 2 * line + problem.num_experts
    if problem.num_ranks == 1:  # nobody else sends: the counts are received where they are made
        offsets["expert_recv_count"] = offsets["expert_send_count"]
    else:
        offsets["expert_recv_count"] = end
        end += problem.num_experts
    offsets["expert_recv_count_sum"] = end
    end += problem.num_local_experts
    offsets["l1_arrival_count"] = end
    offsets["l2_arrival"] = end + pool_blocks
    offsets["end"] = end + 2 * pool_blocks
    return offsets


@lru_cache(maxsize=256)
def make_layout(problem: Problem, capacity: int) -> Layout:
    """Lay out the buffer of one rank.

    Args:
        problem: the layer.
        capacity: the most tokens a rank may contribute, at least 1.

    Raises:
        ValueError: capacity below 1, or too large for the source metadata.
    """
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ValueError(f"capacity={capacity!r} tokens a rank must be a positive integer")
    limit = (1 << COUNTER_BITS) // problem.num_topk
    if capacity > limit:
        raise ValueError(
            f"capacity={capacity} x num_topk={problem.num_topk} exceeds 2**{COUNTER_BITS}: a pool "
            f"row's source is stored in {COUNTER_BITS} bits. Largest capacity: {limit}."
        )
    rows = num_pool_rows(problem, capacity)
    workspace = workspace_layout(problem, rows // MIN_BLOCK_M)
    p, groups1, groups2 = (
        problem,
        problem.hidden // SCALE_BLOCK,
        problem.intermediate // SCALE_BLOCK,
    )
    fp8, f32, i32 = "float8_e4m3fn", "float32", "int32"
    arrays: list[tuple[str, tuple[int, ...], str]] = [
        ("x", (capacity, p.hidden), fp8),
        ("x_sf", (capacity, groups1), f32),
        ("topk_idx", (capacity, p.num_topk), "int64"),
        ("topk_weights", (capacity, p.num_topk), f32),
        ("src_routes", (p.num_local_experts, p.num_ranks, capacity * p.num_topk), i32),
        ("l1_acts", (rows, p.hidden), fp8),
        ("l1_acts_sf", (groups1, rows), f32),
        ("l1_topk_weights", (rows,), f32),
        ("token_src_metadata", (rows,), i32),
        ("l2_acts", (rows, p.intermediate), fp8),
        ("l2_acts_sf", (groups2, rows), f32),
        ("combine_acts", (p.num_topk, capacity, p.hidden), "bfloat16"),
        ("recv_stats", (p.num_local_experts,), i32),
        ("workspace", (workspace["end"],), i32),
    ]
    sections: dict[str, Section] = {}
    offset = 0
    for name, shape, dtype in arrays:
        sections[name] = Section(name, offset, shape, dtype)
        offset = _round_up(offset + sections[name].num_bytes, ALIGNMENT)
    return Layout(problem, capacity, rows, sections, workspace, offset)
