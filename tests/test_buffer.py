"""The symmetric buffer on a CPU: views, counters, inputs, reports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tl_megamoe
from tl_megamoe import MegaMoeTimeout, Problem, SymmBuffer
from tl_megamoe.buffer import TIMEOUT_TAGS
from tl_megamoe.synthetic import Inputs, random_inputs

PROBLEM = Problem(
    name="small", hidden=256, intermediate=128, num_experts=5, num_topk=3, num_ranks=1
)


@pytest.fixture
def buffer() -> SymmBuffer:
    return SymmBuffer(PROBLEM, 40, device="cpu", timeout_s=2.5)


def test_views_lie_where_the_layout_says(buffer: SymmBuffer) -> None:
    base = buffer.raw.data_ptr()
    for name, section in buffer.layout.sections.items():
        view = getattr(buffer, name)
        assert view.data_ptr() == base + section.offset
        assert tuple(view.shape) == section.shape
        assert str(view.dtype) == f"torch.{section.dtype}"
        assert view.is_contiguous()
    for name, length in (
        ("expert_recv_count_sum", 5),
        ("l1_arrival_count", buffer.layout.max_pool_blocks),
        ("l2_arrival", buffer.layout.max_pool_blocks),
    ):
        view = getattr(buffer, name)
        offset = buffer.layout.workspace_offsets[name]
        assert view.data_ptr() == buffer.workspace.data_ptr() + 4 * offset
        assert tuple(view.shape) == (length,)
    assert buffer.peers.tolist() == [base]
    assert buffer.num_bytes == buffer.raw.numel()


def test_starts_with_no_routes_and_zero_counters(buffer: SymmBuffer) -> None:
    assert (buffer.topk_idx == -1).all()
    assert not buffer.workspace.any()
    assert not buffer.recv_stats.any()
    assert buffer.timeout_ms == 2500


def test_poison_leaves_inputs_and_counters(buffer: SymmBuffer, seed: int) -> None:
    inputs = random_inputs(PROBLEM, 40, seed=seed)
    fill(buffer, inputs)
    buffer.poison()
    assert torch.equal(buffer.x.view(torch.uint8), inputs.x.view(torch.uint8))
    assert torch.equal(buffer.topk_idx, inputs.topk_idx)
    assert not buffer.workspace.any()
    for name in ("l1_acts", "l2_acts", "l1_acts_sf", "l2_acts_sf", "combine_acts"):
        assert getattr(buffer, name).float().isnan().all()
    assert (buffer.token_src_metadata == -1).all()


def fill(buffer: SymmBuffer, inputs: Inputs) -> int:
    return buffer.fill(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_fill(buffer: SymmBuffer, seed: int, tokens: int) -> None:
    inputs = random_inputs(PROBLEM, tokens, seed=seed)
    assert fill(buffer, inputs) == tokens
    assert torch.equal(buffer.x[:tokens].view(torch.uint8), inputs.x.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:tokens], inputs.x_sf)
    assert torch.equal(buffer.topk_weights[:tokens], inputs.topk_weights)
    assert (buffer.topk_idx[tokens:] == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_sf": torch.ones(4, 3)}, r"x_sf of shape \(4, 3\) must be \(tokens, hidden/128\)"),
        ({"topk_idx": torch.zeros(4, 3, dtype=torch.int32)}, "topk_idx of dtype torch.int32"),
        ({"topk_idx": torch.zeros(3, 3, dtype=torch.int64)}, r"topk_idx of shape \(3, 3\)"),
        ({"topk_weights": torch.ones(4, 3).double()}, "topk_weights of dtype torch.float64"),
        ({"x": torch.ones(4, 256)}, "x of dtype torch.float32"),
        ({"x": torch.ones(256)}, r"x of shape \(256,\)"),
        ({"x_sf": torch.ones(4, 2, device="meta")}, "x_sf is on meta"),
    ],
)
def test_fill_refuses(
    buffer: SymmBuffer, seed: int, change: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fill(buffer, replace(random_inputs(PROBLEM, 4, seed=seed), **change))
    assert (buffer.topk_idx == -1).all()  # nothing is copied unless all is right


def test_capacity_plus_one(buffer: SymmBuffer) -> None:
    with pytest.raises(ValueError, match="41 tokens, more than capacity=40"):
        fill(buffer, random_inputs(PROBLEM, 41))


def test_needs_one_rank() -> None:
    with pytest.raises(ValueError, match=r"num_ranks=8 .* problem\.one_rank\(\)"):
        SymmBuffer(tl_megamoe.PRESETS["mimo-v2.5"], 4, device="cpu")
    with pytest.raises(ValueError, match="timeout_s=0"):
        SymmBuffer(PROBLEM, 4, device="cpu", timeout_s=0)


def test_report(buffer: SymmBuffer) -> None:
    buffer.check_report()
    buffer.report[40:47] = torch.tensor([5, 0, 17, 96, 3, 14, 32], dtype=torch.int32)
    buffer.report[48:55] = torch.tensor([6, 0, 1, 128, 0, 9, 132], dtype=torch.int32)
    with pytest.raises(MegaMoeTimeout, match="linear2: pool block 3 waits for linear1") as caught:
        buffer.check_report()
    parts = ("rank 0", "block 17", "thread 96", "counted 14 of 32", "2.5 s", "behind it: combine")
    for part in parts:
        assert part in str(caught.value)
    buffer.report[8] = 99
    with pytest.raises(MegaMoeTimeout, match="tag 99"):
        buffer.check_report()


def test_every_tag_of_the_device_code_has_a_text() -> None:
    source = Path(tl_megamoe.__file__).with_name("device") / "barriers.py"
    tags = re.findall(r"^TAG_\w+ = (\d+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert tags
    assert {int(tag) for tag in tags} == set(TIMEOUT_TAGS)


def test_describe(buffer: SymmBuffer) -> None:
    assert f"{buffer.num_bytes:,} bytes" in buffer.describe()
    assert "on cpu" in buffer.describe()
    assert "capacity=40" in repr(buffer)
