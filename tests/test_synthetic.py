"""Random layers: seeds, distinct experts, routings, masks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_megamoe import PRESETS, Problem
from tl_megamoe.metrics import touched_experts
from tl_megamoe.synthetic import random_inputs, random_weights, routing_name

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


@pytest.mark.parametrize("routing", ["zipf:-1", "zipf:0", "zipf:nan", "zipf:inf"])
def test_an_exponent_is_positive(routing: str) -> None:
    with pytest.raises(ValueError, match=f"'{routing}': the exponent must be positive and finite"):
        random_inputs(SMALL, 1, routing)


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="num_tokens=-1"):
        random_inputs(SMALL, -1)
    with pytest.raises(ValueError, match="mask=1.5"):
        random_inputs(SMALL, 1, mask=1.5)
    assert random_inputs(SMALL, 0).x.shape == (0, 256)


# ---- recorded routings

ROUTES = torch.tensor([[0, 5], [3, 3], [-1, 2], [4, -1], [1, 0]])
WEIGHTS = torch.arange(10, dtype=torch.float32).view(5, 2) / 10


def save(folder: Path, what: Any, name: str = "routes.pt") -> str:
    torch.save(what, folder / name)
    return f"file:{folder / name}"


@pytest.mark.parametrize("weighted", [False, True])
def test_a_recorded_routing_is_cut_to_the_tokens(tmp_path: Path, seed: int, weighted: bool) -> None:
    held = {"topk_idx": ROUTES, "topk_weights": WEIGHTS} if weighted else ROUTES
    routing = save(tmp_path, held)
    for tokens in (0, 3, 5):
        inputs = random_inputs(SMALL, tokens, routing, seed=seed)
        assert torch.equal(inputs.topk_idx, ROUTES[:tokens])
        assert inputs.x.shape == (tokens, 256)
        if weighted:
            assert torch.equal(inputs.topk_weights, WEIGHTS[:tokens])
        else:
            assert torch.allclose(inputs.topk_weights.sum(1), torch.ones(tokens))
    other = random_inputs(SMALL, 5, routing, seed=seed + 1)  # tokens still follow the seed
    assert torch.equal(other.topk_idx, inputs.topk_idx)
    assert not torch.equal(other.x.view(torch.uint8), inputs.x.view(torch.uint8))
    masked = random_inputs(SMALL, 5, routing, mask=1.0, seed=seed)
    assert (masked.topk_idx == -1).all()


@pytest.mark.parametrize(
    ("held", "rule"),
    [
        (ROUTES[:4], "has 4 tokens and 5 are asked for, over all ranks"),
        (ROUTES.int(), "must be an int64 tensor, found torch.int32"),
        (ROUTES.tolist(), "must be an int64 tensor, found list"),
        (ROUTES[:, :1], "has shape (5, 1): it must be (tokens, 2), 2 being num_topk"),
        (ROUTES.flatten(), "has shape (10,): it must be (tokens, 2)"),
        (ROUTES + 1, "has experts 0 to 6: they must be -1, a dropped route, or 0 to 5"),
        (ROUTES - 1, "has experts -2 to 4: they must be"),
        ({"topk": ROUTES}, "holds topk: it must hold topk_idx and may hold topk_weights"),
        ({"topk_idx": ROUTES, "x": WEIGHTS}, "holds topk_idx, x: it must hold topk_idx and may"),
        (
            {"topk_idx": ROUTES, "topk_weights": WEIGHTS.double()},
            "must be a float32 tensor, found torch.float64",
        ),
        (
            {"topk_idx": ROUTES, "topk_weights": WEIGHTS[:4]},
            "has shape (4, 2): it must be that of topk_idx, (5, 2)",
        ),
        (
            {"topk_idx": ROUTES, "topk_weights": WEIGHTS / 0},
            "holds NaN or infinity: every weight must be finite",
        ),
    ],
)
def test_a_recorded_routing_fits_the_problem(tmp_path: Path, held: Any, rule: str) -> None:
    routing = save(tmp_path, held)
    with pytest.raises(ValueError, match=re.escape(rule)) as caught:
        random_inputs(SMALL, 5, routing)
    assert "routes.pt" in str(caught.value)


def test_a_routing_of_all_ranks_is_not_that_of_one(tmp_path: Path) -> None:
    routing = save(tmp_path, ROUTES)
    with pytest.raises(ValueError, match="0 to 2, .* as one of 2 ranks sees it. Map the routes"):
        random_inputs(SMALL.one_rank(), 5, routing)


def test_a_file_that_is_no_routing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        random_inputs(SMALL, 1, "file:nowhere.pt")
    (tmp_path / "text.pt").write_text("0 1 2")
    with pytest.raises(ValueError, match="cannot be read by torch.load.* Save topk_idx"):
        random_inputs(SMALL, 1, f"file:{tmp_path / 'text.pt'}")
    routing = save(tmp_path, Path("code"))  # an object, which could run anything
    with pytest.raises(ValueError, match="UnpicklingError"):
        random_inputs(SMALL, 1, routing)


def test_tables_name_a_file_by_its_contents(tmp_path: Path) -> None:
    for word in ("uniform", "zipf:1.2", "skew", "hot1"):
        assert routing_name(word) == word
    routing = save(tmp_path, ROUTES)
    name = routing_name(routing)
    assert re.fullmatch(r"file:routes\.pt@[0-9a-f]{8}", name)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "routes.pt").write_bytes((tmp_path / "routes.pt").read_bytes())
    assert routing_name(f"file:{tmp_path / 'b' / 'routes.pt'}") == name
    save(tmp_path, ROUTES.flip(0))
    assert routing_name(routing) != name
    with pytest.raises(ValueError, match="nowhere.pt' cannot be read: No such file"):
        routing_name("file:nowhere.pt")
