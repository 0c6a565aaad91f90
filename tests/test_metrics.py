"""Metrics against published anchors and by hand."""

from __future__ import annotations

import pytest
import torch

from tl_megamoe import PRESETS, Problem, metrics

ANCHORS = [  # problem, tokens, touched experts, best peer us, yardstick TFLOP/s, floor us, ratio
    ("deepseek-v4-flash", 16, 32, 205.8, 1514, 175.5, 1.17),
    ("deepseek-v4-flash", 512, 32, 294.1, 1485, 176.9, 1.66),
    ("deepseek-v4-flash", 1024, 32, 424.9, 1336, 231.5, 1.84),
    ("deepseek-v4-flash", 8192, 32, 2491.6, 1312, 1885.6, 1.32),
    ("deepseek-v4-pro", 16, 41, 635.3, 1508, 590.3, 1.08),
    ("deepseek-v4-pro", 4096, 48, 3302.6, 1252, 2593.4, 1.27),
    ("mimo-v2.5", 256, 32, 280.9, 1492, 176.2, 1.59),
    ("mimo-v2.5-pro", 16, 46, 420.8, 1504, 378.5, 1.11),
    ("mimo-v2.5-pro", 1024, 48, 884.1, 1291, 479.1, 1.85),
]


@pytest.mark.parametrize(("name", "tokens", "touched", "peer", "yardstick", "floor", "r"), ANCHORS)
def test_floor_of_the_anchors(
    name: str, tokens: int, touched: int, peer: float, yardstick: float, floor: float, r: float
) -> None:
    problem = PRESETS[name].one_rank()
    got = metrics.floor_us(problem, tokens, touched, tokens * problem.num_topk, yardstick)
    # The anchors' yardsticks are whole numbers: half a TFLOP/s in 1300, and 0.1 us of the floor.
    assert got == pytest.approx(floor, rel=4e-4, abs=0.06)
    assert metrics.ratio(peer, got) == pytest.approx(r, abs=0.006)


def test_by_hand() -> None:
    p = Problem(name="p", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
    assert metrics.flops(p, 10) == 6 * 10 * 256 * 128
    assert metrics.tflops(p, 10, 2.0) == pytest.approx(6 * 10 * 256 * 128 / 2e-6 / 1e12)
    total = 3 * (3 * 256 * 128) + 10 * (2 * 256 + 2 * 128 + 4 * 256) + 5 * 2 * 256
    assert metrics.hbm_bytes(p, 5, 3, 10) == total
    assert metrics.hbm_gbs(p, 5, 3, 10, 2.0) == pytest.approx(total / 2e-6 / 1e9)
    assert metrics.memory_floor_us(p, 5, 3) == pytest.approx(
        (3 * 3 * 256 * 128 + 5 * 256 * 3) / 4.589e12 * 1e6
    )


def test_touched_experts_never_counts_dropped_routes() -> None:
    idx = torch.tensor([[0, 3], [3, -1], [9, 3]])
    p = Problem(name="p", hidden=128, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
    assert metrics.touched_experts(idx) == 3
    assert metrics.touched_experts(idx, p) == 2
    assert (metrics.num_pairs(idx), metrics.num_pairs(idx, p)) == (5, 4)
    assert metrics.touched_experts(torch.tensor([[0, 1], [1, 0]])) == 2
    assert metrics.touched_experts(torch.full((3, 2), -1)) == 0


def test_remote_pairs_leave_out_own_and_dropped_routes() -> None:
    p = Problem(name="p", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=3)
    by_rank = [
        torch.tensor([[0, 1], [2, 5]]),  # two stay, one goes to rank 1, one to rank 2
        torch.tensor([[3, -1], [4, 0], [6, 99]]),  # one stays, one to 2, one to 0
        torch.empty((0, 2), dtype=torch.int64),
    ]
    assert metrics.remote_pairs(by_rank, p) == (1, 1, 2)
    one = Problem(name="p", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=1)
    assert metrics.remote_pairs(by_rank[:1], one) == (0,)


def test_nvlink_bytes_by_hand() -> None:
    p = Problem(name="p", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=3)
    row_in, row_out = 256 + 2 * 4 + 4, 2 * 256
    assert metrics.nvlink_bytes(p, 10, 10) == 10 * row_out
    assert metrics.nvlink_bytes(p, 100, 10) == 100 * row_in
    assert metrics.nvlink_bytes(p, 0, 0) == 0
    assert metrics.nvlink_gbs(p, 10, 10, 4.0) == pytest.approx(10 * row_out / 4e-6 / 1e9)


@pytest.mark.parametrize("yardstick", [0.0, -1.0, float("nan")])
def test_yardstick_must_be_positive(yardstick: float) -> None:
    with pytest.raises(ValueError, match="yardstick_tflops"):
        metrics.floor_us(PRESETS["mimo-v2.5"], 1, 1, 8, yardstick)
