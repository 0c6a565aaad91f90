"""Tier 4, bad input: what is refused and what is not; the next launch is right in any case.

The guards of the buffers are looked at after every launch (gpu_world.py); around the caller's own
tensors there are canaries here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    MODES,
    ON_RANKS,
    RANKS_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    each_rank_count,
    of_mode,
    rank_schedules,
    reserved_schedules,
    variants,
)
from gpu_world import World, world

from tl_megamoe import (
    BufferOverwrittenError,
    ScheduleError,
    SymmBuffer,
    fp8_mega_moe,
    mega_moe,
    residency,
)
from tl_megamoe.explorer.findings import same_bits
from tl_megamoe.loading import prepare
from tl_megamoe.schedule import Schedule
from tl_megamoe.weights import MoEWeights

pytestmark = pytest.mark.sm90

modes = pytest.mark.parametrize("mode", MODES)  # on top, so that it varies fastest
each_number = pytest.mark.parametrize("num_ranks", each_rank_count((2,)))

NO_EXPERTS = (-2, -(2**31), -(2**63), 2**31 - 1, 2**31, 2**32, 2**32 + 3, 2**63 - 1)
"""Of no layer here; cut to 32 bits some of them would be one."""
CANARY = 64
"""Elements before and behind a tensor of the caller."""


def between_canaries(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """A tensor of the caller with known bytes on both sides, and whether they are as they were."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * CANARY,), 77, dtype=dtype, device="cuda")

    def untouched() -> bool:
        return bool((whole[:CANARY] == 77).all() and (whole[CANARY + size :] == 77).all())

    return whole[CANARY : CANARY + size].view(shape), untouched


# ---- routes


@modes
@pytest.mark.parametrize("tokens", [130, 300])
def test_no_route_writes_outside(tokens: int, mode: str, shared_seed: int) -> None:
    """Routes to nowhere among others, then nothing but such routes."""
    w = world(SMALL, SMALL_CAPACITY)
    chosen = of_mode(variants(SMALL), mode)
    for part, every in enumerate((3, 1)):
        w.fill(tokens, shared_seed + part)
        topk_idx = w.inputs[0].topk_idx.clone()
        nowhere = torch.tensor((*NO_EXPERTS, SMALL.num_experts), device="cuda")
        flat = topk_idx.view(-1)[::every]
        flat.copy_(nowhere.repeat(len(flat))[: len(flat)])
        w.change(topk_idx=topk_idx)
        w.check(chosen)
        for schedule in chosen.values():
            y, y_untouched = between_canaries((tokens, SMALL.hidden), torch.bfloat16)
            stats, stats_untouched = between_canaries((SMALL.num_local_experts,), torch.int32)
            w.start(schedule, {0: y}, recv_stats={0: stats})
            w.ranks.barrier()
            assert y_untouched()
            assert stats_untouched()
            assert same_bits(y, w.y)
            assert (stats - 77).tolist() == list(w.counts(0))
            w.ranks.first.check_guards()


@modes
@each_number
def test_no_route_writes_outside_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(129, shared_seed)
    nowhere = torch.tensor((*NO_EXPERTS, w.problem.num_experts), device=w.ranks.device)
    for rank in range(num_ranks):
        topk_idx = w.inputs[rank].topk_idx.clone()
        flat = topk_idx.view(-1)[rank::3]
        flat.copy_(nowhere.repeat(len(flat))[: len(flat)])
        w.change(rank, topk_idx=topk_idx)
    w.check(of_mode(rank_schedules(w.problem), mode), pools=True)


# ---- values


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


@modes
@BAD
def test_a_routing_weight_stays_in_its_token(bad: float, mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(130, shared_seed)
    chosen = of_mode(variants(SMALL), mode)
    clean = w.run(next(iter(chosen.values())))
    weights = w.inputs[0].topk_weights.clone()
    weights[7, 1] = bad
    w.change(topk_weights=weights)
    for schedule in chosen.values():
        y = w.run(schedule)
        assert not y[7].isfinite().any()
        y[7] = clean[7]
        assert same_bits(y, clean)


def of_weights(weights: MoEWeights, which: str) -> torch.Tensor:
    """A tensor of a layer's weights, as bytes where it holds codes."""
    found: torch.Tensor = getattr(weights, which[:2])[which.endswith("_sf")]
    return found if which.endswith("_sf") else found.view(torch.uint8)


@modes
@pytest.mark.parametrize(
    ("which", "bad"),
    [
        ("l1", 0x7F),
        ("l2", 0xFF),
        *((which, bad) for which in ("l1_sf", "l2_sf") for bad in (torch.nan, torch.inf)),
    ],
)
def test_an_expert_s_weights_stay_in_its_tokens(
    which: str, bad: float, mode: str, shared_seed: int
) -> None:
    """One value of one expert: the tokens that it does not compute keep their bits."""
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(257, shared_seed)
    chosen = of_mode(variants(SMALL), mode)
    clean = w.run(next(iter(chosen.values())))
    expert = 3
    touched = (w.inputs[0].topk_idx == expert).any(1)
    assert touched.any()
    assert not touched.all()
    changed, at = of_weights(w.weights[0], which)[expert].view(-1), 1
    before = changed[at].clone()
    changed[at] = bad
    try:
        for schedule in chosen.values():
            y = w.run(schedule)
            assert same_bits(y[~touched], clean[~touched])
            assert not y[touched].isfinite().all(1).any()
    finally:
        changed[at] = before
    w.check(chosen)


@modes
@each_number
def test_all_of_a_rank_s_tokens_are_nan(num_ranks: int, mode: str, shared_seed: int) -> None:
    """Activations, scales and routing weights of one rank, all of them: the others keep theirs."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(70, shared_seed)
    schedule = next(iter(of_mode(rank_schedules(w.problem), mode).values()))
    clean = w.launch(schedule)
    i = w.inputs[1]
    codes = torch.full_like(i.x.view(torch.uint8), 0x7F).view(i.x.dtype)
    sf, weights = i.x_sf.clone().fill_(torch.nan), i.topk_weights.clone().fill_(torch.inf)
    w.change(1, x=codes, x_sf=sf, topk_weights=weights)
    y = w.launch(schedule)
    reasons = dict.fromkeys(w.ranks.here, "")
    for rank in w.ranks.here:
        if rank == 1 and not y[1].isnan().all():
            reasons[rank] = "a NaN is lost"
        if rank != 1 and not same_bits(y[rank], clean[rank]):
            reasons[rank] = "a token of another rank changed"
    w.agree(reasons)
    w.fill(70, shared_seed)
    w.check({"after": schedule})


# ---- arguments


def refused_calls(w: World) -> Mapping[str, tuple[str, Callable[[], None]]]:
    """Calls that must be refused, and what their errors say."""
    weights, b, tokens = w.weights[0], w.ranks.first, 10
    hidden = SMALL.hidden
    good: dict[str, Any] = {
        "y": torch.empty((tokens, hidden), dtype=torch.bfloat16, device="cuda"),
        "l1_weights": weights.l1,
        "l2_weights": weights.l2,
        "sym_buffer": b,
    }
    odd = torch.empty(tokens * hidden + 1, dtype=torch.bfloat16, device="cuda")[1:]
    wide = torch.empty((tokens, 2 * hidden), dtype=torch.bfloat16, device="cuda")
    l1, l1_sf = weights.l1
    l2, l2_sf = weights.l2
    stats = torch.zeros(SMALL.num_local_experts + 1, dtype=torch.int32, device="cuda")
    long = torch.empty((SMALL_CAPACITY + 1, hidden), dtype=torch.bfloat16, device="cuda")
    doubled = torch.cat((l1_sf.flatten(), l1_sf.flatten()))
    shifted = doubled[1 : 1 + l1_sf.numel()].view_as(l1_sf)
    counts = "cumulative_local_expert_recv_stats"
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "device of y": ("y must be on cuda:0", {"y": good["y"].cpu()}),
        "dtype of y": ("y must be torch.bfloat16", {"y": good["y"].half()}),
        "shape of y": ("y must have shape", {"y": good["y"][:, :256].contiguous()}),
        "strides of y": ("y must be contiguous", {"y": wide[:, ::2]}),
        "address of y": ("y must start at a multiple of 16", {"y": odd.view(tokens, hidden)}),
        "tokens": ("y has 1025 tokens, more than capacity=1024", {"y": long}),
        "device": (r"l1_weights\[0\] must be on cuda:0", {"l1_weights": (l1.cpu(), l1_sf)}),
        "dtype": (r"l2_weights\[1\] must be torch.float32", {"l2_weights": (l2, l2_sf.half())}),
        "another phase's": (r"l1_weights\[0\] must have shape", {"l1_weights": weights.l2}),
        "address of scales": (
            r"l1_weights\[1\] must start at a multiple of 16",
            {"l1_weights": (l1, shifted)},
        ),
        "address of counts": (f"{counts} must start at a multiple of 16", {counts: stats[1:]}),
    }

    def call(change: dict[str, Any]) -> Callable[[], None]:
        return lambda: fp8_mega_moe(**{**good, **change})

    return {name: (message, call(change)) for name, (message, change) in changes.items()}


def test_a_refused_call_leaves_the_buffer_usable(seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(10, seed)
    schedule = variants(SMALL)["wide128"]
    w.check({"before": schedule})
    weights = w.weights[0]
    y = torch.empty((10, SMALL.hidden), dtype=torch.bfloat16, device="cuda")
    for name, (message, call) in refused_calls(w).items():
        with pytest.raises(ValueError, match=message):
            call()
        fp8_mega_moe(y, weights.l1, weights.l2, w.ranks.first, schedule=schedule)
        assert same_bits(y, w.y), name
    w.check({"after": schedule})


# ---- debug mode


@pytest.fixture(scope="module")
def debugged() -> SymmBuffer:
    made = SymmBuffer(SMALL, SMALL_CAPACITY, timeout_s=5.0, debug=True)
    made.warmup(num_shared=0)
    return made


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_a_debug_buffer_gives_the_same_bits(debugged: SymmBuffer, tokens: int, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(tokens, seed, mask=0.2)
    w.check({"plain": variants(SMALL)["wide128"]})
    i, weights = w.inputs[0], w.weights[0]
    for _ in range(3):
        found = mega_moe(i.x, i.x_sf, i.topk_idx, i.topk_weights, weights, debugged)
        assert same_bits(found, w.y)


def test_a_debug_buffer_refuses_and_goes_on(debugged: SymmBuffer, seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(65, seed)
    w.check({"plain": variants(SMALL)["wide128"]})
    i, weights = w.inputs[0], w.weights[0]
    given = (i.topk_weights, weights, debugged)
    wrong = i.topk_idx.clone()
    wrong[64, 1] = SMALL.num_experts
    with pytest.raises(ValueError, match=rf"topk_idx\[64, 1\]={SMALL.num_experts} of SymmBuffer"):
        mega_moe(i.x, i.x_sf, wrong, *given)
    section = debugged.layout.sections["combine_acts"]
    past = section.offset + section.num_bytes
    debugged.raw[past] = 1
    with pytest.raises(BufferOverwrittenError, match="0 bytes behind combine_acts") as told:
        mega_moe(i.x, i.x_sf, i.topk_idx, *given)
    assert told.value.offset == past
    assert same_bits(mega_moe(i.x, i.x_sf, i.topk_idx, *given), w.y)


def test_a_debug_buffer_in_a_graph(debugged: SymmBuffer, seed: int) -> None:
    """A capture holds the launch alone; guards are looked at when asked for."""
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(65, seed)
    w.check({"plain": variants(SMALL)["wide128"]})
    i, weights = w.inputs[0], w.weights[0]
    debugged.fill(i.x, i.x_sf, i.topk_idx, i.topk_weights)
    y = torch.empty((65, SMALL.hidden), dtype=torch.bfloat16, device="cuda")
    fp8_mega_moe(y, weights.l1, weights.l2, debugged)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_mega_moe(y, weights.l1, weights.l2, debugged)
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        debugged.check_guards()
        assert same_bits(y, w.y)


@modes
def test_virtual_ranks_in_debug_mode(mode: str, shared_seed: int) -> None:
    """Calls of the op on all ranks: nobody waits for one rank before all are launched."""
    w = world(ON_RANKS[2], RANKS_CAPACITY)
    w.fill((129, 64), shared_seed)
    (schedule, *_) = of_mode(rank_schedules(w.problem), mode).values()
    w.check({"plain": schedule})
    buffers, y = w.ranks.buffers, w.outputs()
    for buffer in buffers.values():
        prepare(buffer, 129, schedule=schedule, token_bound=129)

    def launch(rank: int) -> None:
        weights = w.weights[rank]
        fp8_mega_moe(
            y[rank], weights.l1, weights.l2, buffers[rank], schedule=schedule, token_bound=129
        )

    for _ in range(3):
        w.ranks.run(launch)
        for rank, out in y.items():
            assert same_bits(out, w._first[None, True][rank])
            out.fill_(torch.nan)
    w.check({"after": schedule})


# ---- residency


def test_the_driver_says_how_many_blocks_fit(
    debugged: SymmBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: dict[str, Schedule] = {**variants(SMALL), **reserved_schedules()}
    monkeypatch.setattr(residency, "_known", {})
    with caplog.at_level(logging.DEBUG, logger=residency.__name__):
        for schedule in chosen.values():
            kernel, _ = prepare(debugged, 8, schedule=schedule)
            residency.check_resident(kernel, debugged)
    said = [r.getMessage() for r in caplog.records if r.name == residency.__name__]
    assert not said  # everything could be asked
    assert residency.context_sms(debugged.device.index) == debugged.num_sms
    for found in residency._known.values():
        assert found.blocks_per_sm >= 1
        assert 0 < found.registers <= 168
    monkeypatch.setattr(residency, "context_sms", lambda _: 100)
    kernel, _ = prepare(debugged, 8, schedule=chosen["wide128"])
    refused = f"num_sms={chosen['wide128'].num_sms} of .*: 100 blocks can be resident"
    with pytest.raises(ScheduleError, match=refused):
        residency.check_resident(kernel, debugged)
    fewer = replace(chosen["few_sms"], prefetch=0)
    residency.check_resident(prepare(debugged, 8, schedule=fewer)[0], debugged)
