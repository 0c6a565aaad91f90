"""Baselines on the CPU, with stand-ins for the packages that check what they are given."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.explorer.baselines import BASELINES, base, named
from tl_megamoe.explorer.baselines.base import Baseline, Layer, LayerSet, Prepared
from tl_megamoe.explorer.baselines.deepgemm import DeepGemm
from tl_megamoe.explorer.baselines.deepgemm_mega_moe import DeepGemmMegaMoe, _group_of_one
from tl_megamoe.explorer.baselines.pieces import Rows, quantise
from tl_megamoe.explorer.baselines.torch_bf16 import TorchBf16
from tl_megamoe.explorer.baselines.torch_fp8 import TorchFp8
from tl_megamoe.explorer.baselines.unfused import Unfused
from tl_megamoe.explorer.baselines.v1_contig import V1Contig
from tl_megamoe.explorer.baselines.v1_ll import V1LowLatency
from tl_megamoe.explorer.baselines.v2 import V2
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.scaling import dequantize, quantize_rows
from tl_megamoe.synthetic import Inputs, random_inputs, random_weights
from tl_megamoe.weights import PlainWeights

SMALL = Problem(name="s", hidden=512, intermediate=512, num_experts=4, num_topk=2, num_ranks=1)
PAIR = replace(SMALL, num_ranks=2)
POW2 = Recipe(scale="pow2")
GROUP64 = Recipe(intermediate_group=64)


@lru_cache
def weights_of(index: int) -> PlainWeights:
    return random_weights(SMALL, seed=index)


def make_layer(
    tokens: int, seed: int, recipe: Recipe | None = None, *, mask: float = 0.0, sets: int = 1
) -> Layer:
    routed = random_inputs(SMALL, tokens, "zipf:1", mask, seed)
    made = []
    for index in range(sets):
        inputs = random_inputs(SMALL, tokens, seed=seed + 1 + index)
        inputs = replace(inputs, topk_idx=routed.topk_idx, topk_weights=routed.topk_weights)
        made.append(LayerSet(weights_of(index), inputs))
    return Layer(SMALL, recipe or Recipe(), made)


def expected(layer: Layer, index: int) -> Tensor:
    s = layer.sets[index]
    i = s.inputs
    return reference.moe(
        layer.problem, i.x, i.x_sf, i.topk_idx, i.topk_weights, s.plain, layer.recipe
    )


def errors(baseline: Baseline, layer: Layer) -> reference.Comparison:
    """The last set's result under the baseline's own bounds."""
    prepared = baseline.prepare(layer)
    return compare(baseline, prepared, layer)


def compare(baseline: Baseline, prepared: Prepared, layer: Layer) -> reference.Comparison:
    index = len(layer.sets) - 1
    prepared.launch(index)
    bounds = baseline.tolerance
    assert bounds is not None
    return reference.compare(
        prepared.outputs[index],
        expected(layer, index),
        intermediate=layer.problem.intermediate,
        max_rel_error=bounds.result_of(layer.num_tokens),
        max_token_error=bounds.token,
    )


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


# ---- stand-ins for the packages


def scaled_mm(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: Any, out: Tensor
) -> Tensor:
    """`torch._scaled_mm` with block scales on SM90: what it asks for, and its result."""
    rows, k = a.shape
    assert rows % 4 == 0, "scales that begin at multiples of 16 bytes"
    assert b.stride() == (1, k)
    assert scale_a.shape == (rows, k // 128)
    assert scale_a.stride() == (1, rows)
    assert scale_a.storage_offset() * 4 % 16 == 0
    assert scale_b.t().is_contiguous()
    assert scale_b.t().shape == (b.shape[1] // 128, k // 128)
    assert out.dtype == out_dtype == torch.bfloat16
    return out.copy_(reference.scaled_product(a, scale_a, b.t(), scale_b.t()))


class FakeDeepGemm:
    """Grouped products as DeepGEMM's SM90 kernels take them; rows of no expert become NaN."""

    def __init__(self, alignment: int = 32):
        self.alignment = alignment
        self.masked_calls: list[int] = []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor
    ) -> None:
        (codes, sf), (w, w_sf) = a, b
        assert sf.shape == (len(codes), w.shape[2] // 128)
        assert sf.stride() == (1, len(codes)), "the layout that is not transposed once more"
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.shape == (len(codes),)
        d.fill_(torch.nan)
        for start in range(0, len(codes), self.alignment):
            block = slice(start, start + self.alignment)
            experts = {e for e in grouped_layout[block].tolist() if e >= 0}
            assert len(experts) <= 1
            for e in experts:
                d[block] = reference.scaled_product(codes[block], sf[block], w[e], w_sf[e])
            d[block][grouped_layout[block] < 0] = torch.nan

    def m_grouped_fp8_gemm_nt_masked(
        self,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        masked_m: Tensor,
        expected_m: int,
    ) -> None:
        (codes, sf), (w, w_sf) = a, b
        experts, most, k = codes.shape
        assert sf.shape == (experts, most, k // 128)
        assert sf.stride() == (most * (k // 128), 1, most)
        assert masked_m.dtype == torch.int32
        self.masked_calls.append(expected_m)
        d.fill_(torch.nan)
        for e, count in enumerate(masked_m.tolist()):
            d[e, :count] = reference.scaled_product(
                codes[e, :count], sf[e, :count], w[e], w_sf[e]
            ).bfloat16()


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


# ---- DeepEP: two ranks, of which the first is this process


class FakeWorld:
    """What both ranks hold; what rank 1's experts add to the tokens of rank 0."""

    num_sms = 20

    def __init__(self, layer: Layer, seed: int):
        self.layer = layer
        self.tokens = layer.num_tokens
        self.other = [random_inputs(SMALL, self.tokens, seed=seed + 50 + i) for i in range(2)]
        self.plain = [weights_of(index) for index in range(2)]

    def index_of(self, x: Tensor) -> int:
        sets = self.layer.sets
        return next(i for i, s in enumerate(sets) if s.inputs.x.data_ptr() == x.data_ptr())

    def both(self, index: int) -> Inputs:
        """The tokens of rank 0, then those of rank 1."""
        mine, other = self.layer.sets[index].inputs, self.other[index]
        x = torch.cat([i.x.view(torch.uint8) for i in (mine, other)]).view(torch.float8_e4m3fn)
        rest = ("x_sf", "topk_idx", "topk_weights")
        return Inputs(x, *(torch.cat([getattr(i, n) for i in (mine, other)]) for n in rest))

    def received(self, index: int) -> tuple[Inputs, Tensor]:
        """What rank 0 receives, in reverse order, with local experts; and which tokens."""
        inputs = self.both(index)
        local = torch.where(inputs.topk_idx < 2, inputs.topk_idx, -1)
        which = (local >= 0).any(1).nonzero().flatten().flip(0)
        x = inputs.x.view(torch.uint8)[which].view(torch.float8_e4m3fn)
        return Inputs(x, inputs.x_sf[which], local[which], inputs.topk_weights[which]), which

    def finish(self, index: int, partial: Tensor, which: Tensor) -> Tensor:
        """Rank 0's tokens: its experts' rows as it computed them, and those of rank 1."""
        inputs, plain = self.layer.sets[index].inputs, self.plain[index]
        far = inputs.topk_idx.masked_fill(inputs.topk_idx < 2, -1)
        y = reference.moe(SMALL, inputs.x, inputs.x_sf, far, inputs.topk_weights, plain).float()
        near = which < self.tokens
        y[which[near]] += partial[near].float()
        return y.bfloat16()


class FakeBuffer:
    """`deep_ep.Buffer` and `deep_ep.ElasticBuffer`, normal kernels and low latency."""

    def __init__(self, world: FakeWorld):
        self.world = world

    def __call__(self, *args: Any, **options: Any) -> FakeBuffer:
        self.options = options
        return self

    def get_dispatch_config(self, num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert num_experts == 4
        return "per rank", None, "per expert", "in rank", None

    def get_low_latency_rdma_size_hint(self, tokens: int, hidden: int, n: int, e: int) -> int:
        return tokens * hidden * n * e

    def answer(self, x: tuple[Tensor, Tensor], handle: Any) -> tuple[Any, Any, Any, Any]:
        index = self.world.index_of(x[0])
        inputs, which = self.world.received(index)
        if handle is not None:
            assert handle.index == index
            return (inputs.x, inputs.x_sf), None, None, None
        made = SimpleNamespace(index=index, which=which, num_sms=20)
        return (inputs.x, inputs.x_sf), inputs.topk_idx, inputs.topk_weights, made

    def combine(self, x: Tensor, handle: Any) -> tuple[Tensor, None, None]:
        return self.world.finish(handle.index, x, handle.which), None, None


class FakeV1(FakeBuffer):
    def dispatch(self, x: Any, handle: Any = None, **options: Any) -> tuple[Any, ...]:
        want = {"num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"}
        assert handle is not None or set(options) == want | {"topk_idx", "topk_weights"}
        received, idx, weights, made = self.answer(x, handle)
        return received, idx, weights, [], made, None

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, most: int, experts: int, use_fp8: bool
    ) -> tuple[Any, ...]:
        assert use_fp8
        assert x.dtype == torch.bfloat16
        sets = self.world.layer.sets
        held = [dequantize(s.inputs.x, s.inputs.x_sf).bfloat16() for s in sets]
        index = next(i for i, values in enumerate(held) if torch.equal(values, x))
        inputs, which = self.world.received(index)
        codes = torch.full((2, 2 * most, SMALL.hidden), 0x7F, dtype=torch.uint8)
        sf = torch.zeros((2, SMALL.hidden // 128, 2 * most))
        again, again_sf = quantize_rows(dequantize(inputs.x, inputs.x_sf).bfloat16())
        counts, places = [], []
        for e in range(2):
            token, slot = (inputs.topk_idx == e).nonzero().T
            codes[e, : len(token)] = again.view(torch.uint8)[token]
            sf[e, :, : len(token)] = again_sf[token].T
            counts.append(len(token))
            places.append((token, slot))
        handle = SimpleNamespace(index=index, which=which, places=places, inputs=inputs)
        received = codes.view(torch.float8_e4m3fn), sf.transpose(1, 2)
        return received, torch.tensor(counts, dtype=torch.int32), handle, None, None

    def low_latency_combine(
        self, rows: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any, out: Tensor
    ) -> None:
        partial = torch.zeros((len(handle.which), SMALL.hidden))
        for e, (token, slot) in enumerate(handle.places):
            weight = handle.inputs.topk_weights[token, slot, None]
            partial.index_add_(0, token, rows[e, : len(token)].float() * weight)
        out.copy_(self.world.finish(handle.index, partial, handle.which))


class FakeV2(FakeBuffer):
    def dispatch(
        self, x: Any, handle: Any = None, num_sms: int = 0, **options: Any
    ) -> tuple[Any, ...]:
        if handle is None:
            assert options["num_experts"] == 4
            assert self.options["num_max_tokens_per_rank"] == options["num_max_tokens_per_rank"]
        else:
            assert num_sms == handle.num_sms
        received, idx, weights, made = self.answer(x, handle)
        return received, idx, weights, made or handle, None


@pytest.mark.parametrize("kind", ["v1-contig", "v1-ll", "v2"])
def test_a_baseline_of_two_ranks_computes_the_layer(kind: str, seed: int) -> None:
    layer = make_layer(24, seed, sets=2)
    world = FakeWorld(layer, seed)
    gemm = FakeDeepGemm()
    v1, v2 = FakeV1(world), FakeV2(world)
    api = (SimpleNamespace(Buffer=v1, ElasticBuffer=v2), gemm)
    classes: dict[str, Any] = {"v1-contig": V1Contig, "v1-ll": V1LowLatency, "v2": V2}
    baseline = classes[kind](api)
    own = [
        LayerSet(
            PlainWeights(*(getattr(s.plain, n)[:2] for n in ("l1", "l1_sf", "l2", "l2_sf"))),
            s.inputs,
        )
        for s in layer.sets
    ]
    ranks = replace(layer, problem=PAIR, sets=own, group=SimpleNamespace(size=lambda: 2))
    assert baseline.refuses(PAIR, Recipe()) is None
    prepared = baseline.prepare(ranks)
    for index in (0, 1):
        prepared.launch(index)
    found = compare(baseline, prepared, layer)
    assert found, found.reason


@pytest.mark.parametrize("kind", [V1Contig, V1LowLatency, V2])
def test_several_ranks_need_a_group(kind: Any, seed: int) -> None:
    layer = make_layer(3, seed)
    baseline = kind((FakeV1(FakeWorld(layer, seed)), FakeDeepGemm()))
    assert "one rank" in str(baseline.refuses(SMALL, Recipe()))
    assert "exact-64" in str(baseline.refuses(PAIR, GROUP64))
    with pytest.raises(ValueError, match="runs on several ranks: give the layer their process"):
        baseline.prepare(layer)


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
