"""What a time means: bytes, operations and the floor below which no schedule gets.

Sizes follow the layer, not the schedule, so that rows of different schedules compare. A pair is one
route that is not dropped, received by this rank.
"""

from __future__ import annotations

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
