"""The checks of `tl-megamoe check` on fake kernels: what passes, what fails, in which cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gpu_world
import pytest
import torch
from check_layers import ALL_CHECKS, CAPACITY, ONE, TWO, make, schedule_of
from fake_kernels import fake_layer, loop_ranks

from tl_megamoe import reference
from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.explorer import check, checker
from tl_megamoe.explorer.checker import CheckConfig
from tl_megamoe.explorer.checks import ACCUMULATORS, PHASE_CHECKS
from tl_megamoe.explorer.findings import intermediate_found, pool_found
from tl_megamoe.explorer.places import first_places, kernel_places
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.layout import make_layout
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe

# ---- the checks


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
@pytest.mark.parametrize("problem", [ONE, TWO], ids=["one", "two"])
def test_right_kernels_pass_every_check(problem: Problem, recipe: Recipe) -> None:
    layer = make(problem, recipe)
    for tokens in ([0] * problem.num_ranks, [20, 7][: problem.num_ranks]):
        layer.fill(tokens, 5, mask=0.2)
        for phase, name in ALL_CHECKS:
            found = PHASE_CHECKS[phase][name](layer, schedule_of(phase, problem))
            assert found, found
            assert found.check == name
            assert found.ranks == f"{problem.num_ranks} {layer.ranks.mode}"
            assert found.tokens == ("0" if not tokens[0] else ",".join(map(str, tokens)))


def flip_code(b: SymmBuffer, spec: KernelSpec) -> None:
    """The sign of one code of each pool and a bit of one row that came back."""
    if b.rank == b.problem.num_ranks - 1:
        b.l1_acts.view(torch.uint8)[0, 5] ^= 128
        b.l2_acts.view(torch.uint8)[0] ^= 128
        b.combine_acts[b.combine_acts.isfinite()] *= 1.1


BREAKS: dict[str, tuple[Callable[[SymmBuffer, KernelSpec], None], tuple[str, ...], str]] = {
    "a pulled code": (flip_code, ("dispatch",), "1 elements of l1_acts differ"),
    "a count": (
        lambda b, spec: b.expert_recv_count_sum.add_(1),
        ("dispatch",),
        "local expert 0 received",
    ),
    "metadata": (
        lambda b, spec: b.token_src_metadata.add_(1 << 24),
        ("dispatch",),
        "elements of token_src_metadata differ",
    ),
    "a scale": (lambda b, spec: b.l1_acts_sf.mul_(1.001), ("dispatch",), "l1_acts_sf differ"),
    "codes": (flip_code, ("linear1",), "more than one step apart"),
    "an intermediate scale": (
        lambda b, spec: b.l2_acts_sf.mul_(1.01),
        ("linear1",),
        "scales are off",
    ),
    "rows": (flip_code, ("linear2",), "relative error"),
    "a row too many": (
        lambda b, spec: b.combine_acts.nan_to_num_(1.0),
        ("linear2",),
        "without a route were written",
    ),
    "a counter": (
        lambda b, spec: b.l2_done.add_(1),
        ("dispatch", "linear1", "linear2", "fused"),
        "counters are not zero",
    ),
}


@pytest.mark.parametrize("problem", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("name", list(BREAKS))
def test_wrong_kernels_fail(name: str, problem: Problem) -> None:
    break_it, phases, reason = BREAKS[name]
    for phase in phases:
        layer = make(problem, break_it=break_it)
        layer.fill(30, 5)
        check_name = list(PHASE_CHECKS[phase])[-1]
        found = PHASE_CHECKS[phase][check_name](layer, schedule_of(phase, problem))
        assert not found
        assert found.status == "fail"
        assert reason in found.reason, found
        if problem.num_ranks == 2:
            assert "rank 1: " in found.reason


def test_wrong_results_and_unsteady_ones_fail() -> None:
    layer = make(ONE)
    layer.fill(30, 5)
    schedule = schedule_of("fused", ONE)
    assert schedule is not None
    right = layer.launch

    def off(factor: float, only: int) -> Callable[..., Any]:
        launches = []

        def launch(*args: Any, **options: Any) -> Any:
            launches.append(1)
            y = right(*args, **options)
            return {r: t * factor if len(launches) == only else t for r, t in y.items()}

        return launch

    layer.launch = off(1.1, 1)  # type: ignore[method-assign]
    assert "relative error 1.0" in PHASE_CHECKS["fused"]["fused"](layer, schedule).reason
    layer.launch = off(1.1, 2)  # type: ignore[method-assign]
    found = PHASE_CHECKS["fused"]["fused"](layer, schedule)
    assert found.reason == "launch 2 gives other bits than the first"
    layer.launch = off(1.1, 1)  # type: ignore[method-assign]
    assert "of y differ" in PHASE_CHECKS["combine"]["combine"](layer, schedule).reason


def test_accumulators_off_by_a_thousandth_fail() -> None:
    layer = make(ONE)
    layer.fill(30, 5)
    schedule = schedule_of("linear1", ONE)
    right = layer.launch

    def launch(*args: Any, accumulators: Any, **options: Any) -> Any:
        y = right(*args, accumulators=accumulators, **options)
        accumulators[0] *= 1.001
        return y

    layer.launch = launch  # type: ignore[method-assign]
    found = PHASE_CHECKS["linear1"][ACCUMULATORS](layer, schedule)
    assert found.reason.startswith("relative error 1.00e-03 exceeds 5.00e-04")


@pytest.mark.parametrize("other", ALL_RECIPES, ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_linear1_tells_the_recipes_apart(recipe: Recipe, other: Recipe) -> None:
    layer = make(ONE, recipe)
    layer.fill(40, 5)
    schedule = schedule_of("linear1", ONE)
    assert schedule is not None
    assert PHASE_CHECKS["linear1"]["linear1"](layer, schedule)
    places = first_places(layer.counts(0), schedule.block_m, layer.ranks.device)
    found = intermediate_found(layer, 0, schedule.block_m, places, other)
    assert bool(found.reason) == (recipe != other)


@pytest.mark.parametrize("many", [1, 40])
def test_a_power_of_two_may_be_the_next_one_where_few_are(many: int) -> None:
    layer = make(ONE, Recipe(scale="pow2"))
    layer.fill(80, 5)
    schedule = schedule_of("linear1", ONE)
    assert schedule is not None
    PHASE_CHECKS["linear1"]["linear1"](layer, schedule)
    b = layer.ranks.first
    places = first_places(layer.counts(0), schedule.block_m, b.device)
    for place in places[:many].tolist():
        b.l2_acts_sf[0, place] *= 2
        row = b.l2_acts[place // 64, :2, place % 64]  # its first 128 columns
        row.copy_((row.float() / 2).to(row.dtype))
    found = intermediate_found(layer, 0, schedule.block_m, places)
    assert ("powers of two" in found.reason) == (many == 40), found
    b.l2_acts[places[0] // 64, :2, places[0] % 64] = 3.0
    assert intermediate_found(layer, 0, schedule.block_m, places).reason


def test_interface_refuses_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_megamoe.explorer import checks

    layer = make(TWO)
    layer.fill(3, 1)
    assert checks.check_interface(layer)
    monkeypatch.setattr(checks, "fp8_mega_moe", lambda *args, **options: None)
    found = checks.check_interface(layer)
    assert "rank 1: fp8_mega_moe accepts y in float32, " in found.reason
    monkeypatch.undo()
    layer.ranks.buffers[1].l2_arrival[3] = 1
    assert checks.check_interface(layer).reason == (
        "rank 1: counters are not zero before the first launch"
    )


# ---- a ring that wraps


def test_rings_that_wrap() -> None:
    """All routes to one rank: the fused kernel leaves the last blocks, the linears are skipped."""
    problem = replace(ONE, name="wraps", num_experts=8, num_ranks=4, num_topk=6)
    layer = fake_layer(loop_ranks(problem, CAPACITY))
    layer.fill(CAPACITY, 3, "hot1")
    hot = max(range(4), key=lambda r: sum(layer.counts(r)))
    assert sum(layer.counts(hot)) == 4 * CAPACITY * 6
    schedule = replace(schedule_of("fused", problem), block_m=64)  # type: ignore[type-var]
    b = layer.ranks.buffers[hot]
    assert sum(layer.counts(hot)) > b.layout.ring_rows
    for name in (ACCUMULATORS, "linear1"):
        found = PHASE_CHECKS["linear1"][name](layer, schedule)
        assert found.status == "skipped"
        assert f"rank {hot} receives {4 * CAPACITY * 6} rows" in found.reason
    assert PHASE_CHECKS["dispatch"]["dispatch"](layer, schedule)
    assert not pool_found(layer, hot, 64, in_order=True).reason
    places = kernel_places(b, layer.counts(hot), 64)
    assert len(places) == 4 * CAPACITY * 6
    b.l1_acts_sf[0, (4 * CAPACITY * 6 - 1) % b.layout.ring_rows] += 1
    assert pool_found(layer, hot, 64, in_order=True).reason.startswith("1 elements of l1_acts_sf")


# ---- which schedules, which cases


def test_every_mode_split_and_block_is_checked() -> None:
    found = check.check_schedules(ONE, 132, Recipe())
    assert [s.block_m for s in found["dispatch"]] == [32, 64, 128]
    shapes = [(s.math_mode, s.block_m, s.linear1_block_n) for s in found["fused"]]
    assert shapes == [
        ("pingpong", 64, 256),
        ("swapped", 64, 256),
        ("cooperative", 64, 256),
        ("cooperative", 128, 256),
        ("cooperative", 128, 128),
    ]
    wide = replace(ONE, hidden=512)
    for num_sms, grid in ((132, 132), (33, 32)):
        clusters = check.check_schedules(wide, num_sms, Recipe())["fused"]
        assert [s.cluster_size for s in clusters] == [1, 1, 1, 1, 2, 1]
        assert clusters[-2].num_sms == grid
    assert {s.num_sms for group in found.values() for s in group} == {132}
    assert len(check.check_schedules(ONE, 132, Recipe(), "pingpong")["linear1"]) == 1
    narrow = replace(ONE, hidden=384)
    pulls = check.check_schedules(narrow, 132, Recipe())["dispatch"]
    # Blocks of 64 rows need 256 columns of both linears, and 256 does not divide 384.
    assert [(s.block_m, s.linear2_block_n) for s in pulls] == [(32, 128), (128, 128)]
    with pytest.raises(ValueError, match="--math-mode pingpong: no such schedule"):
        check.check_schedules(narrow, 132, Recipe(), "pingpong")


def test_cases_and_their_kernels() -> None:
    schedules = check.check_schedules(TWO, 66, Recipe())
    cases = check.plan_cases("all", schedules, (0, 9), 2)
    assert list(cases) == ["interface", *check.PHASES]
    assert [c.tokens for c in cases["combine"]] == [(0, 0), (9, 9), (0, 9)]
    assert [c.check for c in cases["linear1"]] == ([ACCUMULATORS] * 5 + ["linear1"] * 5) * 3
    config = CheckConfig(problem=TWO, rank_mode="virtual", capacity=64)
    specs = check.specs_of(config, cases)
    assert len(specs) == 3 + 5 + 5 + 5 + 1 + 5
    assert sum(spec.debug for spec in specs) == 5
    assert list(check.plan_cases("combine", schedules, (9,), 1)) == ["interface", "combine"]
    more = check.plan_cases("all", schedules, (0, 9), 2, 64)
    assert {name: cases[name] for name in check.PHASES[:4]} == {
        n: more[n] for n in check.PHASES[:4]
    }
    assert [(c.tokens, c.routing) for c in more["fused"][15:]] == [((64, 64), "hot1")] * 5
    assert check.specs_of(config, more) == specs
    assert list(check.plan_cases("combine", schedules, (9,), 2, 64)) == ["interface", "combine"]


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_the_default_capacity_wraps_the_ring_of_many_ranks(name: str, ranks: int) -> None:
    problem = replace(PRESETS[name], num_ranks=ranks)
    capacity = check.check_capacity(problem, 192)
    tokens = check.tokens_round_the_ring(problem, capacity)
    if ranks == 1:
        assert (capacity, tokens) == (768, 0)
        return
    layout = make_layout(problem, capacity)
    rows = ranks * tokens * problem.num_topk
    assert tokens == capacity >= 768
    for block_m in (64, 128):
        assert -(-rows // block_m) > layout.ring_blocks(block_m)
    assert capacity == 768 or not check.tokens_round_the_ring(problem, capacity - 128)


def test_a_case_round_the_ring_fills_it_and_tells_its_routing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(ONE, num_experts=4, num_ranks=4)
    capacity = next(n for n in range(8, 999) if check.tokens_round_the_ring(problem, n))
    layer = fake_layer(loop_ranks(problem, capacity))
    served = checker.Checker.__new__(checker.Checker)
    config = CheckConfig(problem=problem, rank_mode="virtual", capacity=capacity)
    served.config, served.layer, served._filled = config, layer, None
    schedules = check.check_schedules(problem, 33, Recipe())
    case = check.plan_cases("fused", schedules, (3,), 4, capacity)["fused"][-1]
    # The fake kernels have no turns, without which nothing right comes round a ring.
    right = PHASE_CHECKS["combine"]["combine"]
    monkeypatch.setitem(PHASE_CHECKS["fused"], "fused", right)
    row = served.run(case)
    assert row.status == "ok", row
    hot = max(range(4), key=lambda rank: sum(layer.counts(rank)))
    assert sum(layer.counts(hot)) > layer.ranks.first.layout.ring_rows
    assert row.cells[2] == f"{capacity} hot1"
    assert checker.blank_row(config, case, "timeout", "").cells[2] == f"{capacity} hot1"
    # Other routing with as many tokens: filled anew.
    served.run(replace(case, routing="uniform"))
    assert sum(layer.counts(hot)) <= layer.ranks.first.layout.ring_rows


def test_the_bound_is_that_of_the_comparison() -> None:
    """By tokens with a route, of the rank whose error is printed."""
    layer = make(TWO)
    layer.fill([40, 3], 5)
    schedule = schedule_of("fused", TWO)
    right = layer.launch

    def off(*args: Any, **options: Any) -> Any:
        y = right(*args, **options)
        return {rank: t * (1.002 if rank == off_rank else 1.0) for rank, t in y.items()}

    layer.launch = off  # type: ignore[method-assign]
    for off_rank, tokens in ((0, 40), (1, 3)):
        found = PHASE_CHECKS["fused"]["fused"](layer, schedule)
        bounds = reference.tolerances(tokens, TWO.intermediate)
        assert found.bound == f"{bounds[0]:.1e}, token {bounds[1]:.1e}", off_rank
    layer.fill([40, 40], 5, mask=1.0)
    bounds = reference.tolerances(0, TWO.intermediate)
    found = PHASE_CHECKS["fused"]["fused"](layer, schedule)
    assert found.bound == f"{bounds[0]:.1e}, token {bounds[1]:.1e}"


def test_a_wrong_result_is_no_measure_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, schedules that are wrong in the same way as the first one are wrong too."""
    world = object.__new__(gpu_world.World)
    world._first = {}
    right, wrong = torch.ones(2), torch.zeros(2)

    def found(_: Any, rank: int, y: torch.Tensor, expected: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(reason="" if torch.equal(y, expected) else f"rank {rank} is off")

    monkeypatch.setattr(gpu_world, "layer_found", found)
    monkeypatch.setattr(gpu_world.World, "expected", lambda *_: right)
    for _ in range(2):
        assert world._judge(0, wrong, None, True) == "rank 0 is off"
    assert world._judge(0, right, None, True) == ""
    assert "other bits" in world._judge(0, wrong, None, True)
