"""The fuzzer's launches: faults that fake kernels plant, the layer in float32, its bounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import fuzz_launch
import fuzz_layer
import fuzz_routes
import fuzz_stages
import fuzz_truth
import gpu_cases
import gpu_kernels
import pytest
import torch
from fake_kernels import FakeKernel, fake_layer, loop_ranks
from fuzz_cases import Case, draw_kernel, draw_launch
from fuzz_layer import InPlace, Runner, Worker, fuzz, launches_of
from fuzz_routes import Routes

from tl_megamoe import reference
from tl_megamoe.explorer.layer import Layer
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.scaling import dequantize_blocks
from tl_megamoe.schedule import Schedule
from tl_megamoe.synthetic import random_weights

# ---- launches, on the CPU with fake kernels


def fake_worker(kernel: type[FakeKernel] = FakeKernel, **options: Any) -> Runner:
    def make(case: Case) -> Layer:
        layer = fake_layer(loop_ranks(case.problem, case.capacity, case.numeric), **options)
        layer._compile = lambda spec: kernel(layer, spec, *options.values() or (ignore,))  # type: ignore[assignment,return-value]
        return layer

    return Runner(lambda: InPlace(Worker(make)))


def ignore(buffer: Any, spec: Any) -> None:
    """Nothing is broken."""


def small_layers(seed: int, number: int) -> list[Case]:
    """Launches that the CPU does in milliseconds."""

    def make(rng: random.Random) -> Case:
        case = replace(draw_kernel(rng, "reference"), check="layer")
        return draw_launch(rng, case)

    return [make(random.Random(f"{seed}:{n}")) for n in range(number)]


def test_right_launches_pass(seed: int) -> None:
    cases = small_layers(seed, 40)
    summary = fuzz(cases, fake_worker(), seconds=60)
    assert not summary.failures
    assert len(summary.kernels) > 20
    assert str(summary).startswith(f"40 cases; 80 GPU launches; {len(summary.kernels)} kernels; ")
    assert sum(summary.kinds["ranks"].values()) == 40


class Louder(FakeKernel):
    def combine(self, b: Any, y: torch.Tensor) -> None:
        super().combine(b, y)
        y *= 1.02


class Leaking(FakeKernel):
    """Its last token gets a row that nobody wrote in the launch."""

    def combine(self, b: Any, y: torch.Tensor) -> None:
        super().combine(b, y)
        if len(y):
            y[-1] += b.l1_acts_sf[0, -1]


class Unsteady(FakeKernel):
    def combine(self, b: Any, y: torch.Tensor) -> None:
        super().combine(b, y)
        flipped = y.view(torch.int16)
        flipped += getattr(self, "launches", 0)
        self.launches = 1


class Unclamped(FakeKernel):
    def launch(self, *arguments: Any, activation_clamp: float | None = None, **more: Any) -> None:
        super().launch(*arguments, **more)


def leave_a_count(buffer: Any, spec: Any) -> None:
    buffer.l2_arrival[0] = 1


def lose_a_weight(buffer: Any, spec: Any) -> None:
    buffer.l1_topk_weights += 1


def lose_a_row(buffer: Any, spec: Any) -> None:
    buffer.l1_acts.view(torch.uint8).bitwise_xor_(1)


def lose_a_scale(buffer: Any, spec: Any) -> None:
    buffer.l1_acts_sf *= 2


def lose_a_source(buffer: Any, spec: Any) -> None:
    buffer.token_src_metadata += 1


def lose_a_count(buffer: Any, spec: Any) -> None:
    buffer.expert_recv_count_sum[-1] += 1


def leave_a_claim(buffer: Any, spec: Any) -> None:
    buffer.workspace[buffer.layout.workspace_offsets["next_task"]] = 1


def write_past_the_end(buffer: Any, spec: Any) -> None:
    buffer.raw[-1] = 0


def count_twice(buffer: Any, spec: Any) -> None:
    buffer.recv_stats += 1


@pytest.mark.parametrize(
    ("kernel", "break_it", "reason"),
    [
        (Louder, ignore, "y is not what linear1 left"),
        (Leaking, ignore, "y is not what linear1 left"),
        (Unsteady, ignore, "the second launch gives other bits"),
        (Unclamped, ignore, "of linear1 is wrong"),
        (FakeKernel, leave_a_count, "l2_arrival is not cleared"),
        (FakeKernel, lose_a_weight, "l1_topk_weights is wrong"),
        (FakeKernel, leave_a_claim, "next_task is not cleared"),
        (FakeKernel, lose_a_row, "l1_acts is wrong"),
        (FakeKernel, lose_a_scale, "l1_acts_sf is wrong"),
        (FakeKernel, lose_a_source, "token_src_metadata is wrong"),
        (FakeKernel, lose_a_count, "expert_recv_count_sum is wrong"),
        (FakeKernel, write_past_the_end, "a guard was written to"),
        (FakeKernel, count_twice, "recv_stats is wrong"),
    ],
)
def test_wrong_launches_are_found(
    kernel: type[FakeKernel], break_it: Callable[..., None], reason: str, seed: int
) -> None:
    runner = fake_worker(kernel, break_it=break_it)
    assert any(reason in runner.fails(case) for case in small_layers(seed, 40))


def test_scaled_weights_reach_kernel_and_reference(seed: int) -> None:
    case = replace(small_layers(seed, 1)[0], tokens=(3,) * 8)
    case = replace(case, num_ranks=1, num_experts=4, tokens=(3,), capacity=4)
    layer = fake_layer(loop_ranks(case.problem, 4))
    sf = layer.plain.l1_sf.clone(), layer.plain.l2_sf.clone()
    for factor in (1e4, 1e-8, 1.0):  # not one upon the other
        fuzz_launch.scale_weights(layer, sf, factor)
        assert torch.equal(layer.plain.l1_sf, sf[0] * factor)
        assert torch.equal(layer.weights[0].l1[1], sf[0] * factor)
        assert torch.equal(layer.weights[0].l2[1], sf[1] * factor)


def test_pools_that_wrap(seed: int) -> None:
    """Rows are looked at as far as later ones have not taken their memory, metadata of all."""
    case = Case(
        check="layer",
        hidden=256,
        num_ranks=2,
        num_experts=2,
        num_topk=2,
        capacity=512,
        tokens=(512, 500),
        routing="hot1",
        schedule=Schedule(stages=2),
        seed=seed,
    )
    layer = fake_layer(loop_ranks(case.problem, case.capacity))
    layer.set(fuzz_truth.make_inputs(case))
    layer.launch(case.schedule, "dispatch")
    every = fuzz_truth.joined(list(layer.inputs))
    routes = Routes.of(every.topk_idx, case)
    hot = next(rank for rank in range(2) if routes.counts[rank])
    buffer = layer.ranks.buffers[hot]
    ring = buffer.layout.ring_rows
    assert sum(routes.counts) == 2024 > 2 * ring

    def found() -> str:
        flags = fuzz_launch.Flags()
        pool = fuzz_launch.compare_pool(flags, case, hot, buffer, routes, every)
        assert pool.wraps
        assert pool.kept.sum() == ring - (-2024 % 128)
        return flags.first()

    other = layer.ranks.buffers[1 - hot]
    nothing = fuzz_launch.compare_pool(fuzz_launch.Flags(), case, 1 - hot, other, routes, every)
    assert not nothing.wraps
    assert len(nothing.kept) == 0
    assert found() == ""
    for row in (0, ring - 1):
        buffer.l1_acts.view(torch.uint8)[row, 7] ^= 1
        assert found() == f"rank {hot}: l1_acts is wrong"
        buffer.l1_acts.view(torch.uint8)[row, 7] ^= 1
    buffer.token_src_metadata[0] += 1
    assert found() == f"rank {hot}: token_src_metadata is wrong"


@pytest.mark.parametrize("shape", [(5, 0, 3), (1,), (0, 0), (40, 41, 1, 90, 3)])
def test_products_of_experts(shape: tuple[int, ...], seed: int) -> None:
    """Each row is multiplied with the weights of its expert, whatever is multiplied together."""
    whole = Problem(
        name="p", hidden=256, intermediate=128, num_experts=len(shape), num_topk=1, num_ranks=1
    )
    weights = random_weights(whole, seed=seed)
    a = torch.randn((sum(shape), 256), generator=torch.Generator().manual_seed(seed))
    groups = tuple(fuzz_routes.grouped(shape, 256, 256))
    got = fuzz_truth.products(a, weights.l1, weights.l1_sf, groups)
    start = 0
    for expert, count in enumerate(shape):
        rows = slice(start, start := start + count)
        want = a[rows] @ dequantize_blocks(weights.l1[expert], weights.l1_sf[expert]).T
        torch.testing.assert_close(got[rows], want, rtol=1e-4, atol=1e-4)


def test_groups_of_experts_hold_every_row_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    for size in (1, 2**16, 2**28):
        monkeypatch.setattr(fuzz_routes, "GROUP_BYTES", size)
        counts = [rng.choice((0, 1, 2, 7, 100)) for _ in range(20)]
        total, seen = sum(counts), []
        for experts, index in fuzz_routes.grouped(counts, 128, 128):
            assert index.shape == (len(experts), max(counts[e] for e in experts.tolist()))
            assert (index < total).sum() * 2 >= index.numel()
            seen += index[index < total].tolist()
            for expert, rows in zip(experts.tolist(), index, strict=True):
                first = sum(counts[:expert])
                assert rows[rows < total].tolist() == list(range(first, first + counts[expert]))
        assert sorted(seen) == list(range(total))


@pytest.mark.parametrize(("error", "fault"), [(3e-4, ""), (0.0, "scale"), (0.0, "K block")])
def test_stages_pass_errors_of_wgmma_alone(
    error: float, fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rule for scales, or one of two K blocks left out, is found in most small layers."""
    generator, plain = torch.Generator().manual_seed(seed), reference.scaled_product

    def noisy(a: torch.Tensor, a_sf: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        if fault == "K block" and a_sf.shape[1] > 1:
            a_sf = a_sf * torch.tensor([1.0] * (a_sf.shape[1] - 1) + [0.0])
        out = plain(a, a_sf, *w)
        size = out.double().square().mean(1, keepdim=True).sqrt().float()
        return out + torch.randn(out.shape, generator=generator) * error * size

    refused, layers = 0, 0
    for case in small_layers(seed, 80):
        whole = replace(case.problem, num_ranks=1)
        w = random_weights(whole)
        w = replace(w, l1_sf=w.l1_sf * case.w_scale, l2_sf=w.l2_sf * case.w_scale)
        every = fuzz_truth.joined(fuzz_truth.make_inputs(case))
        routes = Routes.of(every.topk_idx, case)
        right = fuzz_truth.make_truth(every, routes, w, case.numeric, case.clamp)
        pool = reference.dispatch(every.x, every.x_sf, every.topk_idx, every.topk_weights, whole)
        recipe = case.numeric
        if fault == "scale":
            recipe = replace(recipe, scale="exact" if recipe.scale == "pow2" else "pow2")
        with monkeypatch.context() as patch:
            patch.setattr(reference, "scaled_product", noisy)
            codes, sf = reference.linear1(pool, w.l1, w.l1_sf, recipe, case.clamp)
            rows = reference.linear2(codes, sf, w.l2, w.l2_sf, pool.counts)
        y = reference.combine(rows, pool, len(every.x))
        codes = codes.view(torch.uint8)
        wrong = [
            *fuzz_stages.wrong_intermediate(case, right, codes, sf),
            fuzz_stages.wrong_sums(right, w, codes, sf, y),
        ]
        layers += bool((right.h != 0).any())
        refused += any(bool(flags.any()) for flags in wrong)
    assert layers > 40
    assert refused >= layers * 0.5 if fault else refused == 0


def refusal(
    case: Case, error: float, recipe: str, generator: torch.Generator, patch: pytest.MonkeyPatch
) -> str:
    """What `judge` says of a layer whose products are off by a part of their root mean square.

    A token's routes to one expert are the same row, and are off by the same.
    """
    weights = random_weights(replace(case.problem, num_ranks=1))
    w = replace(weights, l1_sf=weights.l1_sf * case.w_scale, l2_sf=weights.l2_sf * case.w_scale)
    every = fuzz_truth.joined(fuzz_truth.make_inputs(case))
    routes, plain = Routes.of(every.topk_idx, case), fuzz_truth.products
    right = fuzz_truth.make_truth(every, routes, w, case.numeric, case.clamp)
    _, same = (routes.token * case.num_experts + routes.expert).unique(return_inverse=True)

    def noisy(*arguments: Any) -> torch.Tensor:
        out = plain(*arguments)
        size = out.double().square().mean(1, keepdim=True).sqrt().float()
        return out + torch.randn(out.shape, generator=generator)[same] * error * size

    other = Recipe.parse(recipe or case.recipe)
    with patch.context() as context:
        context.setattr(fuzz_truth, "products", noisy)
        y = fuzz_truth.make_truth(every, routes, w, other, case.clamp).y
    return fuzz_truth.judge(case, y, right) if len(y) else ""


def distinct(case: Case) -> bool:
    """Whether no token has two routes to one expert, whose errors would add up."""
    routes = Routes.of(fuzz_truth.joined(fuzz_truth.make_inputs(case)).topk_idx, case)
    pairs = routes.token * case.num_experts + routes.expert
    return len(pairs.unique()) == len(pairs)


@pytest.mark.parametrize(("error", "recipe", "layers"), [(2e-4, "", 80), (0.0, "pow2-64", 160)])
def test_errors_of_wgmma_pass_and_another_recipe_does_not(
    error: float, recipe: str, layers: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales and clamps at which a small error of a gate is a large one of the result."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (case for case in small_layers(seed, 800) if not recipe or distinct(case))
    cases = list(islice(drawn, layers))
    assert len(cases) == layers
    refused = sum(bool(refusal(case, error, recipe, generator, monkeypatch)) for case in cases)
    assert refused > 3 if recipe else refused == 0


def test_the_same_row_many_times(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 13 routes of a token go to one expert: its errors add up."""
    problem = Problem(
        name="duplicates", hidden=256, intermediate=384, num_experts=2, num_topk=13, num_ranks=1
    )
    schedule = Schedule(stages=2, experts_per_wave=1)
    of = Case.of(problem, schedule, 690, clamp=0.226)
    case = replace(of, tokens=(690,), routing="hot1", x_scale=185.0)
    generator = torch.Generator().manual_seed(seed)
    for error in (1e-4, 2e-4, 2.9e-4):
        assert not refusal(case, error, "", generator, monkeypatch)
    assert refusal(case, 0.03, "", generator, monkeypatch)


# ---- on a GPU


def prebuilt() -> list[Case]:
    """Kernels that other sm90 tests launch too: `gpu_kernels` builds them."""
    small, capacity = gpu_cases.SMALL, gpu_cases.SMALL_CAPACITY
    every, ranks = gpu_cases.variants(small), gpu_cases.WRAPS
    cases = [Case.of(small, schedule, capacity) for schedule in every.values()]
    for name, fast_math in gpu_cases.CLAMP_CASES:
        cases.append(Case.of(small, every[name], capacity, clamp=1.0, fast_math=fast_math))
    for recipe in ALL_RECIPES[1:]:
        named = gpu_cases.schedules(small, gpu_cases.RECIPE_SPLITS, recipe)
        cases += [Case.of(small, s, capacity, recipe=str(recipe)) for s in named.values()]
    on_ranks = gpu_cases.rank_schedules(ranks).values()
    return cases + [Case.of(ranks, s, gpu_cases.RANKS_CAPACITY) for s in on_ranks]


def test_kernels_of_the_short_gpu_run_are_built_with_the_others() -> None:
    built = {spec.key() for spec in gpu_kernels.specs()}
    cases = prebuilt()
    assert {case.spec.key() for case in cases} <= built
    assert {case.num_ranks for case in cases} == {1, gpu_cases.WRAPS.num_ranks}


@pytest.mark.sm90
def test_a_short_run_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_layer, "LAUNCHES_IN_A_ROW", 5)
    rng, every = random.Random(seed), prebuilt()
    kernels = rng.sample([case for case in every if case.num_ranks == 1], 9)
    kernels += rng.sample([case for case in every if case.num_ranks > 1], 3)
    said: list[str] = []
    cases = launches_of(kernels, seed)
    summary = fuzz(cases, Runner(), seconds=90, shrink_seconds=20, max_cases=60, say=said.append)
    assert not summary.failures, said
    assert len(summary.kernels) >= 6
