"""Rows that combine has under way: as many as the registers hold, for any top-k."""

from __future__ import annotations

import pytest
from gpu_cases import fit, small

from tl_megamoe.kernel import KernelSpec, inspect_kernel
from tl_megamoe.phases.combine import items_in_flight


@pytest.mark.parametrize(
    ("hidden", "num_topk", "math_registers", "found"),
    [
        (7168, 6, 232, (2, 2)),
        (6144, 8, 232, (2, 2)),
        (6144, 8, 224, (2, 1)),
        (6144, 9, 232, (2, 1)),
        (384, 6, 232, (2, 1)),
        (7168, 13, 232, (2, 1)),
        (7168, 14, 232, (1, 1)),
        (7168, 8, 168, (2, 1)),
        (7168, 9, 168, (1, 1)),
    ],
)
def test_items_in_flight(
    hidden: int, num_topk: int, math_registers: int, found: tuple[int, int]
) -> None:
    assert items_in_flight(hidden, num_topk, math_registers) == found


@pytest.mark.parametrize(
    ("num_topk", "math_registers"), [(8, 232), (8, 224), (9, 232), (13, 232), (28, 232), (8, 168)]
)
def test_no_spills(num_topk: int, math_registers: int) -> None:
    problem = small(f"combine{num_topk}", num_experts=30, num_topk=num_topk)
    schedule = fit(problem, math_registers=math_registers)
    report = inspect_kernel(
        KernelSpec(problem=problem, schedule=schedule, capacity=64, phase="combine")
    )
    assert report.spill_bytes == 0
