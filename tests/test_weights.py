"""Weight preparation: where each element goes, exact inverses, and refused layouts."""

from __future__ import annotations

import pytest
import torch

from tl_megamoe import Problem, transform_separate, transform_weights
from tl_megamoe.scaling import E4M3
from tl_megamoe.synthetic import random_weights
from tl_megamoe.weights import (
    PlainWeights,
    interleave_gate_up,
    pretile,
    restore_weights,
    separate_gate_up,
    untile,
)

PROBLEM = Problem(
    name="small", hidden=384, intermediate=256, num_experts=3, num_topk=2, num_ranks=1
)


@pytest.fixture
def plain(seed: int) -> PlainWeights:
    return random_weights(PROBLEM, seed=seed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_interleave_places_rows() -> None:
    inter = 256
    rows = torch.arange(2 * inter, dtype=torch.int32).view(1, -1, 1).expand(2, -1, 4)
    out = interleave_gate_up(rows.contiguous())[1, :, 2].tolist()
    for g in range(inter // 64):
        assert out[128 * g : 128 * g + 64] == list(range(64 * g, 64 * g + 64))
        up = inter + 64 * g
        assert out[128 * g + 64 : 128 * g + 128] == list(range(up, up + 64))


def test_pretile_places_blocks(plain: PlainWeights) -> None:
    tiled = pretile(plain.l1)
    assert tiled.shape == (3, 4, 3, 128, 128)
    assert tiled.is_contiguous()
    for e, r, c in ((0, 0, 0), (2, 3, 1), (1, 2, 2)):
        block = plain.l1[e, r * 128 : r * 128 + 128, c * 128 : c * 128 + 128].view(torch.uint8)
        found = tiled[e, r, c].view(torch.uint8)
        for row in range(128):
            for chunk in range(8):
                at = (chunk ^ row % 8) * 16
                wanted = block[row, chunk * 16 : chunk * 16 + 16]
                assert torch.equal(found[row, at : at + 16], wanted), (row, chunk)


def test_inverses(plain: PlainWeights) -> None:
    assert same(untile(pretile(plain.l1)), plain.l1)
    assert same(separate_gate_up(interleave_gate_up(plain.l1)), plain.l1)
    back = restore_weights(
        transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), PROBLEM)
    )
    for name in ("l1", "l1_sf", "l2", "l2_sf"):
        assert same(getattr(back, name), getattr(plain, name))


def test_pretile_copies(plain: PlainWeights) -> None:
    before = plain.l1.view(torch.uint8).clone()
    tiled = pretile(plain.l1)
    tiled.view(torch.uint8).zero_()
    assert torch.equal(plain.l1.view(torch.uint8), before)
    untile(pretile(plain.l1)).view(torch.uint8).zero_()
    assert torch.equal(plain.l1.view(torch.uint8), before)


def test_separate_equals_stacked(plain: PlainWeights) -> None:
    inter = PROBLEM.intermediate
    gate, up = plain.l1[:, :inter], plain.l1[:, inter:]  # views with gaps between experts
    gate_sf = plain.l1_sf[:, : inter // 128].contiguous()
    up_sf = plain.l1_sf[:, inter // 128 :].contiguous()
    one = transform_separate(gate, gate_sf, up, up_sf, plain.l2, plain.l2_sf, PROBLEM)
    two = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf))
    for a, b in zip((*one.l1, *one.l2), (*two.l1, *two.l2), strict=True):
        assert same(a, b)


def test_transposed_codes_are_copied_right(plain: PlainWeights) -> None:
    column_major = plain.l2.view(torch.uint8).mT.contiguous().mT.view(E4M3)
    assert not column_major.is_contiguous()
    a = transform_weights((plain.l1, plain.l1_sf), (column_major, plain.l2_sf))
    b = transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf))
    assert same(a.l2[0], b.l2[0])


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("transposed scale", ["l1 scale", "(3, 4, 3)", "strides (12, 1, 4)"]),
        ("swapped scale", ["l1 scale", "(3, 4, 3)", "(3, 3, 4)"]),
        ("int scale", ["l2 scale", "torch.int32"]),
        ("bf16 codes", ["l1 must be", "torch.bfloat16"]),
        ("odd rows", ["l1 of shape", "multiples of 128"]),
        ("wrong down", ["l2 of shape", "(3, 384, 256)"]),
    ],
)
def test_refused(plain: PlainWeights, change: str, parts: list[str]) -> None:
    l1, l1_sf, l2, l2_sf = plain.l1, plain.l1_sf, plain.l2, plain.l2_sf
    if change == "transposed scale":
        l1_sf = l1_sf.mT.contiguous().mT
    elif change == "swapped scale":
        l1_sf = l1_sf.mT.contiguous()
    elif change == "int scale":
        l2_sf = l2_sf.int()
    elif change == "bf16 codes":
        l1 = l1.bfloat16()
    elif change == "odd rows":
        l1 = l1[:, :100]
    else:
        l2 = l2[:, :256]
    with pytest.raises(ValueError, match=r"found|multiples|belong") as caught:
        transform_weights((l1, l1_sf), (l2, l2_sf), PROBLEM)
    for part in parts:
        assert part in str(caught.value)


def test_odd_block_count_cannot_be_gate_and_up(plain: PlainWeights) -> None:
    with pytest.raises(ValueError, match="has 384 rows"):
        transform_weights(
            (plain.l1[:, :384], plain.l1_sf[:, :3].contiguous()), (plain.l2, plain.l2_sf)
        )


def test_problem_mismatch(plain: PlainWeights) -> None:
    other = Problem(name="o", hidden=384, intermediate=256, num_experts=4, num_topk=2, num_ranks=1)
    with pytest.raises(ValueError, match=r"num_local_experts, 2\*intermediate, hidden"):
        transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), other)
    half, whole = plain.l1[:, :128], plain.l1[:, :256]
    half_sf, whole_sf = plain.l1_sf[:, :1].contiguous(), plain.l1_sf[:, :2].contiguous()
    with pytest.raises(ValueError, match="up of shape"):
        transform_separate(half, half_sf, whole, whole_sf, plain.l2, plain.l2_sf)
