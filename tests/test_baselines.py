"""Baselines on the CPU, with stand-ins for the packages that check what they are given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from baseline_layers import (
    GROUP64,
    PAIR,
    SMALL,
    FakeDeepGemm,
    compare,
    errors,
    make_layer,
    scaled_mm,
)
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.explorer.baselines import BASELINES, base, named
from tl_megamoe.explorer.baselines.base import Baseline
from tl_megamoe.explorer.baselines.deepgemm import DeepGemm
from tl_megamoe.explorer.baselines.deepgemm_mega_moe import DeepGemmMegaMoe, _group_of_one
from tl_megamoe.explorer.baselines.pieces import Rows, quantise
from tl_megamoe.explorer.baselines.torch_bf16 import TorchBf16
from tl_megamoe.explorer.baselines.torch_fp8 import TorchFp8
from tl_megamoe.explorer.baselines.unfused import Unfused, unfused_specs
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.scaling import quantize_rows
from tl_megamoe.schedule import default_schedule
from tl_megamoe.synthetic import random_inputs
from tl_megamoe.weights import PlainWeights

POW2 = Recipe(scale="pow2")


# ---- pieces


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("tokens", "mask"), [(37, 0.0), (37, 0.4), (1, 1.0)])
def test_rows_are_those_of_the_reference(tokens: int, mask: float, equal: bool, seed: int) -> None:
    inputs = random_inputs(SMALL, tokens, "zipf:1", mask, seed)
    rows = Rows(inputs.topk_idx, inputs.topk_weights, 4, 16, equal=equal)
    pool = reference.dispatch(
        inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights, replace(SMALL)
    )
    assert rows.counts == list(pool.counts)
    held = torch.cat(
        [torch.arange(p.start, p.start + c) for p, c in zip(rows.parts, rows.counts, strict=True)]
    )
    assert torch.equal(rows.token[held], pool.token)
    assert torch.equal(rows.weight[held], pool.topk_weights)
    assert torch.equal(rows.expert[held].long(), pool.expert)
    assert torch.equal(rows.place.view(tokens, 2)[pool.token, pool.slot], held)
    padding = torch.ones(rows.num_rows, dtype=torch.bool)
    padding[held] = False
    assert rows.num_rows > 0
    assert set(rows.expert[padding].tolist()) <= {-1}
    assert not rows.weight[padding].any()
    assert all(part.start % 16 == 0 and part.stop % 16 == 0 for part in rows.parts)
    assert (rows.kept is None) == (mask == 0.0)
    if equal:
        assert len({part.stop - part.start for part in rows.parts}) == 1


def test_packed_scales_are_columns_of_each_block(seed: int) -> None:
    inputs = random_inputs(SMALL, 9, seed=seed)
    rows = Rows(inputs.topk_idx, inputs.topk_weights, 4, 16)
    packed = inputs.x_sf.flatten()[rows.scale_index(4, rows.parts, rows.token)]
    for part in rows.parts:
        block = packed[4 * part.start : 4 * part.stop].view(4, -1)
        assert torch.equal(block.t(), inputs.x_sf[rows.token[part]])


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_quantise_is_that_of_the_library(recipe: Recipe, seed: int) -> None:
    values = torch.randn((50, 512), generator=torch.Generator().manual_seed(seed)) * 3
    values[7] = 0.0
    codes, sf = quantise(values, recipe)
    want, want_sf = quantize_rows(values, recipe.intermediate_group, recipe)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(sf, want_sf)


# ---- the layer


ONE_RANK = [
    TorchFp8(scaled_mm),
    TorchBf16(),
    DeepGemm(api=FakeDeepGemm()),
    DeepGemm(masked=True, api=FakeDeepGemm()),
]


@pytest.mark.parametrize("mask", [0.0, 0.3])
@pytest.mark.parametrize("recipe", [Recipe(), POW2], ids=str)
@pytest.mark.parametrize("baseline", ONE_RANK, ids=lambda b: b.name)
def test_a_baseline_computes_the_layer(
    baseline: Baseline, recipe: Recipe, mask: float, seed: int
) -> None:
    layer = make_layer(40, seed, recipe, mask=mask)
    found = errors(baseline, layer)
    assert found, found.reason
    assert found.rel_error > 2e-3, "the bound would be the recipe's own"


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("baseline", ONE_RANK, ids=lambda b: b.name)
def test_few_tokens(baseline: Baseline, tokens: int, seed: int) -> None:
    found = errors(baseline, make_layer(tokens, seed))
    assert found, found.reason


@pytest.mark.parametrize("baseline", [ONE_RANK[0], *ONE_RANK[2:]], ids=lambda b: b.name)
def test_another_recipe_is_outside_the_bounds(baseline: Baseline, seed: int) -> None:
    layer = make_layer(40, seed, Recipe())
    prepared = baseline.prepare(replace(layer, recipe=POW2))
    found = compare(baseline, prepared, layer)
    assert not found
    assert "relative error" in found.reason


def test_the_masked_layout_tells_the_mean_rows(seed: int) -> None:
    api = FakeDeepGemm()
    DeepGemm(masked=True, api=api).prepare(make_layer(40, seed)).launch(0)
    assert api.masked_calls == [20, 20]


def test_an_older_masked_name_serves(seed: int) -> None:
    new = FakeDeepGemm()
    old = SimpleNamespace(fp8_m_grouped_gemm_nt_masked=new.m_grouped_fp8_gemm_nt_masked)
    assert errors(DeepGemm(masked=True, api=old), make_layer(9, seed))
    with pytest.raises(ValueError, match="deep_gemm has no get_mk_alignment"):
        DeepGemm(api=SimpleNamespace()).prepare(make_layer(9, seed))


@pytest.mark.parametrize("baseline", ONE_RANK[:1] + ONE_RANK[2:], ids=lambda b: b.name)
def test_scales_of_64_columns_are_refused(baseline: Baseline) -> None:
    assert "recipe exact-64" in str(baseline.refuses(SMALL, GROUP64))
    assert baseline.refuses(SMALL, POW2) is None
    assert "2 ranks" in str(baseline.refuses(PAIR, Recipe()))


def test_cublas_wants_512_columns() -> None:
    odd = replace(SMALL, intermediate=384)
    assert "intermediate=384: cuBLAS pads" in str(TorchFp8().refuses(odd, Recipe()))


def test_unfused_needs_our_side(seed: int) -> None:
    with pytest.raises(ValueError, match="runs our own kernels"):
        Unfused().prepare(make_layer(3, seed))
    assert Unfused().refuses(PAIR, Recipe()) is None


def test_unfused_phases_have_no_hint_that_pays_only_in_the_fused_kernel(seed: int) -> None:
    layer = make_layer(3, seed)
    memory: Any = SimpleNamespace(capacity=64)
    sets = [replace(s, buffer=memory, weights=memory) for s in layer.sets]
    ran: list[int] = []

    def compile_spec(spec: KernelSpec) -> Any:
        return SimpleNamespace(launch=lambda *given: ran.append(given[-1].evict_first))

    schedule = replace(default_schedule(SMALL, 3), evict_first=1)
    given = replace(layer, sets=sets, schedule=schedule, compile_spec=compile_spec)
    Unfused().prepare(given).launch(0)
    assert ran == [0] * len(unfused_specs(SMALL, schedule, 64, Recipe()))


# ---- DeepGEMM's own layer


class FakeMegaMoe:
    """The layer with scales of 64 columns, from what its symmetric buffer holds."""

    def get_symm_buffer_for_mega_moe(
        self, group: Any, experts: int, tokens: int, topk: int, hidden: int, inter: int
    ) -> Any:
        assert group.size() == 1
        room = -(-tokens // 128) * 128
        return SimpleNamespace(
            x=torch.zeros((room, hidden)).to(torch.float8_e4m3fn),
            x_sf=torch.zeros((room, hidden // 128)),
            topk_idx=torch.full((room, topk), -1),
            topk_weights=torch.zeros((room, topk)),
        )

    def transform_weights_for_mega_moe_sm90(self, l1: Any, l2: Any) -> tuple[Any, Any]:
        return l1, l2

    def fp8_mega_moe(self, y: Tensor, l1: Any, l2: Any, buffer: Any) -> None:
        n, recipe = len(y), Recipe(intermediate_group=64)
        tensors = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        y.copy_(reference.moe(SMALL, *(t[:n] for t in tensors), PlainWeights(*l1, *l2), recipe))


def test_mega_moe_has_bounds_of_another_recipe(seed: int) -> None:
    baseline = DeepGemmMegaMoe(FakeMegaMoe())
    layer = replace(make_layer(40, seed), group=SimpleNamespace(size=lambda: 1))
    found = errors(baseline, layer)
    assert found, found.reason
    assert found.rel_error > 1e-2, "another recipe"


def test_one_process_is_a_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        pytest.skip("the tests run as ranks")
    try:
        assert _group_of_one().size() == 1
        assert _group_of_one() is dist.group.WORLD
        assert "under torchrun" in str(base.no_ranks())
    finally:
        dist.destroy_process_group()


# ---- what is there


def test_names_are_unique_and_explained() -> None:
    names = [baseline.name for baseline in BASELINES]
    assert len(set(names)) == len(names)
    for baseline in BASELINES:
        assert named(baseline.name) is baseline
        assert baseline.what
        assert baseline.version() == "" or baseline.version()[0].isalnum()
    with pytest.raises(ValueError, match="--baseline sonic: there is no such baseline. All: unfu"):
        named("sonic")


def test_import_problems_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_a_package.py").write_text("fp8_gemm = 1\n")
    (tmp_path / "broken_package.py").write_text("raise OSError('no libcuda')\n")
    problem = base.import_problem
    assert problem("no_such_package") == "no_such_package is not installed"
    assert problem("broken_package") == "broken_package does not import: OSError: no libcuda"
    assert problem("half_a_package") is None
    found = problem("half_a_package", attributes=["fp8_gemm", "fp8_mega_moe"])
    assert str(found).endswith("has no fp8_mega_moe")


def test_without_ranks_or_gpu_a_baseline_says_so() -> None:
    assert "under torchrun" in str(base.no_ranks())
    if not torch.cuda.is_available():
        assert Unfused().available() == "no SM90 GPU here"
