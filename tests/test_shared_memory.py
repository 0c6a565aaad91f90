"""Shared buffers of a kernel start at multiples of 1 KiB, whatever TileLang's order of them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from gpu_cases import SMALL, SMALL_CAPACITY, phase_schedule, variants

from tl_megamoe.kernel import KernelSpec, compile_kernel
from tl_megamoe.schedule import Schedule
from tl_megamoe.shared_memory import SMEM_LIMIT_BYTES

PLACE = re.compile(r"\(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\)")


def places(phase: str, schedule: Schedule) -> list[int]:
    """Offsets of the dynamic shared buffers, in bytes."""
    spec = KernelSpec(problem=SMALL, schedule=schedule, capacity=SMALL_CAPACITY, phase=phase)
    return [int(at) for at in PLACE.findall(compile_kernel(spec).source())]


@pytest.mark.parametrize(
    ("phase", "schedule"),
    [
        # 512 bytes of row scales lay before the weights' ring: WGMMA read other rows.
        ("linear2", phase_schedule(SMALL, "pingpong")),
        ("fused", variants(SMALL)["wide128"]),
    ],
    ids=["linear2-pingpong", "fused-wide128"],
)
def test_buffers_start_at_whole_kib(phase: str, schedule: Schedule) -> None:
    found = places(phase, schedule)
    assert len(found) >= 5
    assert all(at % 1024 == 0 for at in found), found
    assert all(a < b for a, b in pairwise(found))
    assert found[-1] < SMEM_LIMIT_BYTES
