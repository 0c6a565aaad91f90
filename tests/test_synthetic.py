"""Random layers: seeds, distinct experts, routings, masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tl_megamoe import PRESETS, Problem
from tl_megamoe.metrics import touched_experts
from tl_megamoe.synthetic import random_inputs, random_weights

FLASH = replace(PRESETS["deepseek-v4-flash"].one_rank(), hidden=128)
SMALL = Problem(name="s", hidden=256, intermediate=128, num_experts=6, num_topk=2, num_ranks=2)


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.2", "skew"])
def test_experts_of_a_token_are_distinct(seed: int, routing: str) -> None:
    idx = random_inputs(FLASH, 300, routing, seed=seed).topk_idx
    assert idx.dtype == torch.int64
    assert idx.min() >= 0
    assert idx.max() < 32
    assert all(len(set(row)) == 6 for row in idx.tolist())


def test_popularity(seed: int) -> None:
    def sorted_counts(routing: str) -> torch.Tensor:
        idx = random_inputs(FLASH, 2000, routing, seed=seed).topk_idx
        return torch.bincount(idx.flatten(), minlength=32).sort(descending=True).values.float()

    uniform, skew, zipf = (sorted_counts(r) for r in ("uniform", "skew", "zipf:1.2"))
    assert uniform[0] / uniform[-1] < 1.5
    assert skew[3] > 2 * skew[4]
    assert zipf[0] > 8 * zipf[-1]
    assert touched_experts(random_inputs(FLASH, 50, "hot1", seed=seed).topk_idx) == 1


def test_few_experts_allow_duplicates(seed: int) -> None:
    problem = Problem(
        name="f", hidden=128, intermediate=128, num_experts=3, num_topk=8, num_ranks=1
    )
    idx = random_inputs(problem, 100, seed=seed).topk_idx
    assert set(idx.flatten().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("mask", [0.0, 0.3, 1.0])
def test_mask(seed: int, mask: float) -> None:
    inputs = random_inputs(FLASH, 500, mask=mask, seed=seed)
    assert (inputs.topk_idx < 0).float().mean().item() == pytest.approx(mask, abs=0.05)
    plain = random_inputs(FLASH, 500, seed=seed)
    kept = inputs.topk_idx >= 0
    assert torch.equal(inputs.topk_idx[kept], plain.topk_idx[kept])
    assert torch.allclose(inputs.topk_weights.sum(1), torch.ones(500))


def test_seeds(seed: int) -> None:
    a, b, c = (random_inputs(SMALL, 7, seed=s) for s in (seed, seed, seed + 1))
    assert torch.equal(a.x.view(torch.uint8), b.x.view(torch.uint8))
    assert not torch.equal(a.x.view(torch.uint8), c.x.view(torch.uint8))
    assert a.num_tokens == 7


def test_ranks_share_the_global_experts(seed: int) -> None:
    everyone = random_weights(replace(SMALL, num_ranks=1), seed=seed)
    for rank in range(2):
        mine = random_weights(SMALL, seed=seed, rank=rank)
        part = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(mine.l1.view(torch.uint8), everyone.l1.view(torch.uint8)[part])
        assert torch.equal(mine.l2_sf, everyone.l2_sf[part])
    assert not torch.equal(everyone.l1.view(torch.uint8)[0], everyone.l1.view(torch.uint8)[1])
    assert everyone.l1.float().std().item() == pytest.approx(1.0, abs=0.05)
    assert 0.5 / 16 <= everyone.l1_sf.min().item() < everyone.l1_sf.max().item() < 1.5 / 16


@pytest.mark.parametrize("routing", ["round-robin", "zipf", "zipf:x", "hot"])
def test_unknown_routing(routing: str) -> None:
    with pytest.raises(ValueError, match="routing="):
        random_inputs(SMALL, 1, routing)


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="num_tokens=-1"):
        random_inputs(SMALL, -1)
    with pytest.raises(ValueError, match="mask=1.5"):
        random_inputs(SMALL, 1, mask=1.5)
    assert random_inputs(SMALL, 0).x.shape == (0, 256)
