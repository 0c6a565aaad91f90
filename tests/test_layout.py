"""Buffer layout: no overlaps, alignment, 64-bit offsets, and room for every routing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_megamoe import PRESETS, Problem
from tl_megamoe.layout import (
    ALIGNMENT,
    GUARD_BYTES,
    ITEM_BYTES,
    MAX_BLOCK_M,
    MIN_BLOCK_M,
    make_layout,
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks = draw(st.integers(1, 8))
    return Problem(
        name="random",
        hidden=128 * draw(st.integers(1, 40)),
        intermediate=128 * draw(st.integers(1, 40)),
        num_experts=ranks * draw(st.integers(1, 100)),
        num_topk=draw(st.integers(1, 10)),
        num_ranks=ranks,
    )


@given(problems(), st.integers(1, 20000))
def test_sections_are_aligned_and_apart(problem: Problem, capacity: int) -> None:
    layout = make_layout(problem, capacity)
    end = 0
    for name, section in layout.sections.items():
        assert section.name == name
        assert section.offset % ALIGNMENT == 0
        assert layout.guards[name] == (end, section.offset - end)
        assert GUARD_BYTES <= section.offset - end < GUARD_BYTES + ALIGNMENT
        size = ITEM_BYTES[section.dtype]
        for n in section.shape:
            assert n > 0
            size *= n
        assert section.num_bytes == size
        end = section.offset + size
    assert layout.guards["end"] == (end, layout.num_bytes - end)
    assert GUARD_BYTES <= layout.num_bytes - end < GUARD_BYTES + ALIGNMENT


@given(problems(), st.integers(1, 300), st.randoms())
def test_pool_holds_every_routing(problem: Problem, capacity: int, random: object) -> None:
    layout = make_layout(problem, capacity)
    routes = problem.num_ranks * capacity * problem.num_topk
    counts = [0] * problem.num_local_experts
    cuts = sorted(random.randint(0, routes) for _ in range(len(counts) - 1))  # type: ignore[attr-defined]
    for e, (a, b) in enumerate(zip([0, *cuts], [*cuts, routes], strict=True)):
        counts[e] = b - a
    worst = [1] * (len(counts) - 1) + [max(routes - len(counts) + 1, 0)]
    for case in (counts, worst):
        for block_m in (MIN_BLOCK_M, MAX_BLOCK_M):
            rows = sum(-(-c // block_m) * block_m for c in case)
            assert rows <= layout.pool_rows
            assert rows // block_m <= layout.max_pool_blocks


@given(problems(), st.integers(1, 5000))
def test_counters_do_not_overlap(problem: Problem, capacity: int) -> None:
    layout = make_layout(problem, capacity)
    at = layout.workspace_offsets
    sizes = {
        "dispatch_sync": 32,
        "combine_sync": 32,
        "dispatch_signal": 32,
        "combine_signal": 32,
        "next_task": 32,
        "expert_send_count": problem.num_experts,
        "expert_recv_count": problem.num_experts,
        "expert_recv_count_sum": problem.num_local_experts,
        "l1_arrival_count": layout.max_pool_blocks,
        "l2_arrival": layout.max_pool_blocks,
        "l2_done": layout.max_pool_blocks,
    }
    assert set(sizes) | {"end"} == set(at)
    if problem.num_ranks == 1:
        assert at["expert_recv_count"] == at["expert_send_count"]
        del sizes["expert_recv_count"]
    spans = sorted((at[name], at[name] + size) for name, size in sizes.items())
    assert spans[0][0] == 0
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
        assert end == start
    assert spans[-1][1] == at["end"] == layout.sections["workspace"].shape[0]


@given(problems(), st.integers(1, 5000))
def test_intermediate_tiles_hold_the_ring(problem: Problem, capacity: int) -> None:
    """64 x 64 tiles that a bulk copy of 8 KiB brings two at a time: a K block's are neighbours."""
    layout = make_layout(problem, capacity)
    row_tiles, column_tiles, rows, columns = layout.sections["l2_acts"].shape
    assert (rows, columns) == (64, 64)
    assert (row_tiles * rows, column_tiles * columns) == (layout.ring_rows, problem.intermediate)
    assert layout.sections["l2_acts"].num_bytes == layout.ring_rows * problem.intermediate


def test_offsets_pass_32_bits() -> None:
    layout = make_layout(PRESETS["deepseek-v4-pro"].one_rank(), 32768)
    assert max(s.offset for s in layout.sections.values()) > 2**32
    pool = layout.sections["l1_acts"]
    assert pool.num_bytes > 2**30


def test_describe_adds_up() -> None:
    layout = make_layout(PRESETS["deepseek-v4-flash"].one_rank(), 512)
    text = layout.describe()
    assert f"{layout.num_bytes:,} bytes" in text
    for section in layout.sections.values():
        assert f"{section.num_bytes:,}" in text


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5])
def test_bad_capacity(capacity: object) -> None:
    with pytest.raises(ValueError, match="capacity="):
        make_layout(PRESETS["mimo-v2.5"], capacity)  # type: ignore[arg-type]


def test_capacity_limit_of_the_source_metadata() -> None:
    p = PRESETS["mimo-v2.5"].one_rank()
    limit = 2**24 // p.num_topk
    make_layout(p, limit)
    with pytest.raises(ValueError, match=f"Largest capacity: {limit}"):
        make_layout(p, limit + 1)


def test_pool_blocks_fit_a_task() -> None:
    p = Problem(name="wide", hidden=128, intermediate=128, num_experts=16, num_topk=1, num_ranks=16)
    make_layout(p, 2**23)
    with pytest.raises(ValueError, match="22 bits of a pool block"):
        make_layout(p, 2**24)


def test_ranks_of_one_launch() -> None:
    p = Problem(name="far", hidden=128, intermediate=128, num_experts=17, num_topk=1, num_ranks=17)
    with pytest.raises(ValueError, match="num_ranks=17 of problem 'far' exceeds 16"):
        make_layout(p, 8)
