"""The fused kernel against the whole-layer reference, on the GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_cases import (
    EXPERTS,
    FROZEN_TOKENS,
    MANY_ROUTES,
    MANY_ROUTES_CAPACITY,
    ODD,
    ONE_RANK,
    PRESET_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    TOKENS,
    edge_schedules,
    fit,
    many_routes_schedule,
    preset_schedules,
    variants,
)
from gpu_world import World, world

from tl_megamoe import fp8_mega_moe, mega_moe, reference
from tl_megamoe.problem import Problem, divisors_of
from tl_megamoe.schedule import Schedule, ScheduleError

pytestmark = pytest.mark.sm90

SMALL_TOKENS = (0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 260, 819, 1024)


def check(
    w: World, schedules: dict[str, Schedule], *, launches: int = 2, clamp: float | None = None
) -> None:
    """Every schedule is right, repeats bitwise, agrees bitwise with the others, resets counters."""
    expected = w.expected(clamp)
    first = None
    for name, schedule in schedules.items():
        for _ in range(launches):
            y = w.launch(schedule, clamp=clamp)
            if first is None:
                first = y
                same = reference.compare(y, expected, intermediate=w.problem.intermediate)
                assert same, f"{name}: {same.reason}"
            assert torch.equal(y.view(torch.int16), first.view(torch.int16)), name
        assert w.counters_are_zero(), name


def walks(schedule: Schedule, problem: Problem) -> dict[str, Schedule]:
    """Runtime variants of a schedule: orders, wave sizes, lags, prefetch."""
    out = {
        f"wave{n}": replace(schedule, order="wave", lag=0, experts_per_wave=n)
        for n in divisors_of(problem.num_local_experts)
    }
    out |= {
        f"lag{lag}": replace(
            schedule, order="lag", lag=lag, experts_per_wave=problem.num_local_experts
        )
        for lag in (1, 3, 10**6)
    }
    out["no_prefetch"] = replace(schedule, prefetch=0)
    return out


@pytest.mark.parametrize("mask", [0.0, 0.3])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", list(ONE_RANK))
def test_presets(name: str, tokens: int, mask: float, seed: int) -> None:
    w = world(ONE_RANK[name], PRESET_CAPACITY)
    w.fill(tokens, seed, mask=mask)
    check(w, preset_schedules(w.problem))


@pytest.mark.parametrize(
    ("routing", "mask"), [("zipf:1.2", 0.0), ("skew", 0.0), ("hot1", 0.0), ("uniform", 1.0)]
)
@pytest.mark.parametrize("name", list(ONE_RANK))
def test_preset_routing(name: str, routing: str, mask: float, seed: int) -> None:
    w = world(ONE_RANK[name], PRESET_CAPACITY)
    w.fill(1024, seed, routing, mask)
    check(w, preset_schedules(w.problem))


def test_preset_walks(seed: int) -> None:
    w = world(ONE_RANK["deepseek-v4-flash"], PRESET_CAPACITY)
    w.fill(1024, seed, "zipf:0.8", 0.1)
    for schedule in preset_schedules(w.problem).values():
        check(w, walks(schedule, w.problem), launches=1)


@pytest.mark.parametrize(
    ("routing", "mask"),
    [("uniform", 0.0), ("uniform", 0.3), ("uniform", 1.0), ("zipf:1.2", 0.0), ("hot1", 0.1)],
)
@pytest.mark.parametrize("tokens", SMALL_TOKENS)
def test_small(tokens: int, routing: str, mask: float, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, seed, routing, mask)
    check(w, variants(SMALL))


def test_small_walks(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(700, seed, "zipf:1.0", 0.2)
    for schedule in variants(SMALL).values():
        check(w, walks(schedule, SMALL), launches=1)


@pytest.mark.parametrize("tokens", [1, 65, 819])
@pytest.mark.parametrize("problem", [*EXPERTS.values(), *ODD.values()], ids=lambda p: p.name)
def test_edge_sizes(problem: Problem, tokens: int, seed: int) -> None:
    w = world(problem, SMALL_CAPACITY)
    for part, (routing, mask) in enumerate((("uniform", 0.0), ("zipf:1.2", 0.3))):
        w.fill(tokens, seed + part, routing, mask)
        check(w, edge_schedules(problem))
    schedule = next(iter(edge_schedules(problem).values()))
    check(w, walks(schedule, problem), launches=1)


def test_hundred_relaunches(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(777, seed, "zipf:0.7", 0.1)
    check(w, {"wide128": variants(SMALL)["wide128"]}, launches=100)


def test_hundred_relaunches_full_size(seed: int) -> None:
    w = world(ONE_RANK["deepseek-v4-flash"], PRESET_CAPACITY)
    w.fill(1024, seed)
    check(w, {"m128": preset_schedules(w.problem)["m128"]}, launches=100)


def test_changing_tokens_and_schedules_share_a_buffer(seed: int) -> None:
    """Counters and barriers fit the next launch whatever grid, block_m and tokens it has."""
    w = world(SMALL, SMALL_CAPACITY)
    schedules = list(variants(SMALL).values())
    for step in range(30):
        w.fill((step * 37) % 400, seed + step, mask=0.1)
        check(w, {"step": schedules[step % len(schedules)]}, launches=1)


def test_weights_of_zero_and_below(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(300, seed)
    assert w.inputs is not None
    weights = w.inputs.topk_weights.clone()
    weights[::3] = 0.0
    weights[1::3] *= -1.0
    w.set(replace(w.inputs, topk_weights=weights))
    check(w, variants(SMALL))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_in_their_token(bad: float, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(200, seed)
    clean = w.launch(variants(SMALL)["wide128"])
    assert w.inputs is not None
    x_sf = w.inputs.x_sf.clone()
    x_sf[7, 1] = bad
    w.set(replace(w.inputs, x_sf=x_sf))
    for schedule in variants(SMALL).values():
        y = w.launch(schedule)
        assert not y[7].isfinite().any()
        y[7] = clean[7]
        assert torch.equal(y, clean)


def test_experts_out_of_range_are_dropped(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(130, seed)
    assert w.inputs is not None
    topk_idx = w.inputs.topk_idx.clone()
    topk_idx[::5, 0] = SMALL.num_experts
    topk_idx[1::5, 1] = -7
    topk_idx[2::5, 0] = 2**32 + 3  # expert 3 if it were cut to 32 bits
    w.set(replace(w.inputs, topk_idx=topk_idx))
    check(w, variants(SMALL))
    assert w.buffer.expert_recv_count_sum.tolist() == list(w.pool().counts)


@pytest.mark.parametrize(("name", "fast_math"), [("wide128", True), ("rows", False)])
def test_clamp(name: str, fast_math: bool, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(400, seed)
    expected = w.expected(clamp=0.5)
    y = w.launch(variants(SMALL)[name], clamp=0.5, fast_math=fast_math)
    same = reference.compare(y, expected, intermediate=SMALL.intermediate)
    assert same, same.reason
    assert not reference.compare(y, w.expected(), intermediate=SMALL.intermediate)


def test_a_grid_larger_than_the_gpu_is_refused(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(10, seed)
    y = torch.empty((10, SMALL.hidden), dtype=torch.bfloat16, device="cuda")
    too_large = replace(variants(SMALL)["wide128"], num_sms=1000)
    with pytest.raises(ScheduleError, match="num_sms=1000 exceeds the"):
        fp8_mega_moe(y, w.weights.l1, w.weights.l2, w.buffer, schedule=too_large)


def test_routing_in_several_rounds(seed: int) -> None:
    """One block lists more routes than its threads hold at once."""
    w = world(MANY_ROUTES, MANY_ROUTES_CAPACITY)
    for tokens in (MANY_ROUTES_CAPACITY, 1, 0, 777):
        w.fill(tokens, seed + tokens)
        check(w, {"one_sm": many_routes_schedule()})


def test_graph_replay(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(400, seed, "zipf:1.0", 0.1)
    schedule = variants(SMALL)["wide128"]
    expected = w.launch(schedule)
    y = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            fp8_mega_moe(y, w.weights.l1, w.weights.l2, w.buffer, schedule=schedule)
    for _ in range(5):
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


def test_op_and_functional_form(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(300, seed)
    assert w.inputs is not None
    schedule = variants(SMALL)["wide64"]
    expected = w.launch(schedule)
    stats = torch.ones(SMALL.num_local_experts, dtype=torch.int32, device="cuda")
    y = torch.empty_like(expected)
    for _ in range(2):
        fp8_mega_moe(
            y, w.weights.l1, w.weights.l2, w.buffer, stats, (1, 128, 128), schedule=schedule
        )
    assert torch.equal(y, expected)
    assert (stats - 1).tolist() == [2 * n for n in w.pool().counts]
    i = w.inputs
    again = mega_moe(
        i.x, i.x_sf, i.topk_idx, i.topk_weights, w.weights, w.buffer, schedule=schedule
    )
    assert torch.equal(again, expected)


def test_op_uses_the_frozen_schedule(seed: int) -> None:
    """Without a schedule the op takes the frozen one, compiled here for it if need be."""
    from tl_megamoe.frozen import resolve
    from tl_megamoe.op import prepare

    w = world(ONE_RANK["deepseek-v4-flash"], PRESET_CAPACITY)
    for tokens in FROZEN_TOKENS:
        found = resolve(w.problem, w.buffer.device_name, w.buffer.capacity, tokens)
        assert found.origin == "frozen", found
        w.fill(tokens, seed)
        assert w.inputs is not None
        y = torch.empty((tokens, w.problem.hidden), dtype=torch.bfloat16, device="cuda")
        fp8_mega_moe(y, w.weights.l1, w.weights.l2, w.buffer)
        assert prepare(w.buffer, tokens)[1] == found.schedule
        same = reference.compare(y, w.expected(), intermediate=w.problem.intermediate)
        assert same, same.reason


@pytest.mark.parametrize(
    ("counter", "phase", "text"),
    [
        ("l1_arrival_count", "linear1", "linear1: pool block 0 waits for its tokens"),
        ("l2_arrival", "linear2", "linear2: pool block 0 waits for linear1"),
    ],
)
def test_a_wait_that_cannot_end_is_reported(counter: str, phase: str, text: str) -> None:
    """A corrupt counter ends the launch with a message; in a child, whose CUDA context is lost."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from gpu_cases import SMALL, SMALL_CAPACITY, variants
        from gpu_world import world
        w = world(SMALL, SMALL_CAPACITY)
        w.buffer.timeout_ms = 500
        w.fill(100, 0)
        w.buffer.{counter}[0] = 100000
        w.launch(variants(SMALL)["wide128"])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert "MegaMoeTimeout" in run.stderr, run.stderr[-2000:]
    assert text in run.stderr


def test_fit_is_valid() -> None:
    for problem in (*ONE_RANK.values(), *EXPERTS.values(), *ODD.values()):
        assert not fit(problem).violations(problem)
