"""What a time means: bytes, operations and the floor below which no schedule gets.

Sizes follow the layer, not the schedule, so that rows of different schedules compare. A pair is one
route that is not dropped, received by this rank. Tokens, touched experts and pairs may also be the
sums over all ranks that share a GPU: the results are then those of the whole GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

HBM_READ_TBS = 4.589
"""Terabytes (1e12) a second that a plain read kernel reaches on an H200; measured (its data sheet
says 4.8)."""


def touched_experts(topk_idx: Tensor, problem: Problem | None = None) -> int:
    """Distinct experts that a routing sends rows to.

    Args:
        topk_idx: (tokens, topk) int64; negative entries are dropped routes.
        problem: when given, entries past its experts count as dropped too.
    """
    routed = topk_idx[topk_idx >= 0]
    if problem is not None:
        routed = routed[routed < problem.num_experts]
    return int(routed.unique().numel())


def num_pairs(topk_idx: Tensor, problem: Problem | None = None) -> int:
    """Routes that are not dropped; arguments as for `touched_experts`."""
    routed = topk_idx >= 0
    if problem is not None:
        routed = routed & (topk_idx < problem.num_experts)
    return int(routed.sum())


def remote_pairs(topk_idx: Sequence[Tensor], problem: Problem) -> tuple[int, ...]:
    """Routes that each rank receives from the tokens of other ranks.

    Args:
        topk_idx: for each rank, (tokens, topk) int64 of the tokens it contributes.
        problem: the layer over all ranks.
    """
    local = problem.num_local_experts
    received = [0] * problem.num_ranks
    for source, routes in enumerate(topk_idx):
        kept = routes[(routes >= 0) & (routes < problem.num_experts)]
        for rank, count in enumerate((kept // local).bincount(minlength=len(received)).tolist()):
            received[rank] += count if rank != source else 0
    return tuple(received)


def nvlink_bytes(problem: Problem, pairs_in: int, pairs_out: int) -> int:
    """Bytes one rank's kernel moves over NVLink in a launch, the larger direction.

    In: for each remote row it pulls, its FP8 columns, their scales (hidden/32 bytes) and its weight
    (4). Out: for each remote row it computes, the BF16 row it writes back. What its peers pull from
    it and write to it crosses the same link and is counted with them.

    Args:
        problem: the layer over all ranks.
        pairs_in: routes whose rows the rank pulls from other ranks (`remote_pairs`).
        pairs_out: routes whose results it writes to other ranks; in a whole launch the same ones.
    """
    row_in = problem.hidden + problem.hidden // 32 + 4
    return max(pairs_in * row_in, pairs_out * 2 * problem.hidden)


def nvlink_gbs(problem: Problem, pairs_in: int, pairs_out: int, time_us: float) -> float:
    """Gigabytes (1e9) a second of `nvlink_bytes` in `time_us` microseconds."""
    return nvlink_bytes(problem, pairs_in, pairs_out) / (time_us * 1e3)


def flops(problem: Problem, pairs: int) -> int:
    """Operations of the two products: 2 x pairs x 3 x hidden x intermediate."""
    return 6 * pairs * problem.hidden * problem.intermediate


def weight_bytes(problem: Problem, touched: int) -> int:
    """FP8 bytes of the experts that a routing touches."""
    return touched * 3 * problem.hidden * problem.intermediate


def floor_us(
    problem: Problem, num_tokens: int, touched: int, pairs: int, yardstick_tflops: float
) -> float:
    """The least time of one layer in microseconds: memory or math, whichever is longer.

    Memory: the touched weights once, and `num_tokens` rows in FP8 and out in BF16, at
    `HBM_READ_TBS`. Math: the products at the rate of the yardstick measured beside the kernel.

    Args:
        problem: the layer.
        num_tokens: tokens that this rank contributes.
        touched: experts that receive a row.
        pairs: routes that this rank receives.
        yardstick_tflops: FP8 matrix product rate in TFLOP/s, the highest of the cell.

    Raises:
        ValueError: the yardstick is not positive.
    """
    return max(
        memory_floor_us(problem, num_tokens, touched), math_us(problem, pairs, yardstick_tflops)
    )


def memory_floor_us(problem: Problem, num_tokens: int, touched: int) -> float:
    """The memory term of `floor_us`."""
    num_bytes = weight_bytes(problem, touched) + num_tokens * problem.hidden * 3
    return num_bytes / (HBM_READ_TBS * 1e6)


def math_us(problem: Problem, pairs: int, yardstick_tflops: float) -> float:
    """The math term of `floor_us`."""
    if not yardstick_tflops > 0:
        raise ValueError(f"yardstick_tflops={yardstick_tflops} must be positive")
    return flops(problem, pairs) / (yardstick_tflops * 1e6)


def tflops(problem: Problem, pairs: int, time_us: float) -> float:
    """TFLOP/s of the two products in `time_us` microseconds."""
    return flops(problem, pairs) / (time_us * 1e6)


def hbm_bytes(problem: Problem, num_tokens: int, touched: int, pairs: int) -> int:
    """Bytes a layer moves at least through HBM, its pools included.

    Touched weights; for each pair the FP8 row written and read (2 x hidden), the intermediate row
    written and read (2 x intermediate) and the BF16 row written and read (4 x hidden); for each
    token the BF16 output row.
    """
    per_pair = 2 * problem.hidden + 2 * problem.intermediate + 4 * problem.hidden
    return weight_bytes(problem, touched) + pairs * per_pair + num_tokens * 2 * problem.hidden


def hbm_gbs(problem: Problem, num_tokens: int, touched: int, pairs: int, time_us: float) -> float:
    """Gigabytes (1e9) a second of `hbm_bytes` in `time_us` microseconds."""
    return hbm_bytes(problem, num_tokens, touched, pairs) / (time_us * 1e3)


def ratio(time_us: float, floor: float) -> float:
    """`time_us` over `floor`, both in microseconds: 1 is the floor."""
    return time_us / floor
