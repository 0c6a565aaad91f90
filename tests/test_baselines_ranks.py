"""Baselines of two ranks on the CPU, with stand-ins for DeepEP; the first is this process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from baseline_layers import GROUP64, PAIR, SMALL, FakeDeepGemm, compare, make_layer, weights_of
from torch import Tensor

from tl_megamoe import reference
from tl_megamoe.explorer.baselines.base import Layer, LayerSet
from tl_megamoe.explorer.baselines.v1_contig import V1Contig
from tl_megamoe.explorer.baselines.v1_ll import V1LowLatency
from tl_megamoe.explorer.baselines.v2 import V2
from tl_megamoe.recipe import Recipe
from tl_megamoe.scaling import dequantize, quantize_rows
from tl_megamoe.synthetic import Inputs, random_inputs
from tl_megamoe.weights import PlainWeights


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
