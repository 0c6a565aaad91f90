"""Tier 5, stress: many launches, graph replays, random cases, all equal to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    FLASH,
    MODES,
    ON_RANKS,
    PRESET_CAPACITY,
    RANKS_CAPACITY,
    SMALL,
    SMALL_CAPACITY,
    each_rank_count,
    of_mode,
    preset_schedules,
    rank_schedules,
    variants,
)
from gpu_world import World, walks, world

from tl_megamoe import fp8_mega_moe
from tl_megamoe.explorer.places import counters_are_zero
from tl_megamoe.schedule import Schedule

pytestmark = pytest.mark.sm90

modes = pytest.mark.parametrize("mode", MODES)  # on top, so that it varies fastest
each_number = pytest.mark.parametrize("num_ranks", each_rank_count())


def relaunch(w: World, schedule: Schedule, launches: int) -> None:
    """Compared on the GPU; the host looks once in a hundred launches: they follow closely."""
    w.check({"first": schedule}, launches=1)
    expected = {rank: w._first[None, True][rank].view(torch.int16) for rank in w.ranks.here}
    y = w.outputs()
    differing = torch.zeros(1, dtype=torch.int64, device=w.ranks.device)
    for n in range(1, launches + 1):
        for out in y.values():
            out.fill_(torch.nan)
        w.start(schedule, y)
        for rank, out in y.items():
            differing += (out.view(torch.int16) != expected[rank]).any()
        if n % 100 == 0:
            w.ranks.barrier()
            reason = f"{int(differing)} of {n} launches differ" if differing else ""
            w.agree(dict.fromkeys(w.ranks.here, reason))


@modes
def test_thousand_relaunches(mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(777, shared_seed, "zipf:0.7", 0.1)
    for schedule in of_mode(variants(SMALL), mode).values():
        relaunch(w, schedule, 1000)


@modes
@each_number
def test_thousand_relaunches_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([(300, 0, 65, 129)[r % 4] for r in range(num_ranks)], shared_seed, "zipf:0.7", 0.1)
    relaunch(w, next(iter(of_mode(rank_schedules(w.problem), mode).values())), 1000)


@modes
@each_number
def test_relaunches_with_rings_that_wrap(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill(RANKS_CAPACITY, shared_seed, "skew")
    for schedule in of_mode(rank_schedules(w.problem), mode).values():
        relaunch(w, schedule, 100)


BACK_TO_BACK = 50


@modes
@each_number
def test_launches_back_to_back_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    """A rank enters launch N+1 while others are in N: between launches only the kernel's barriers.

    In `Layer.start` the streams of virtual ranks meet after every launch. Here a rank's launches
    follow each other on its stream. Ranks without tokens leave a launch as soon as all have arrived
    before the sums, of which the others have a thousand: then they list routes and signal again.
    Once as launches, then as a graph.
    """
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([(0, RANKS_CAPACITY, 1, 129)[r % 4] for r in range(num_ranks)], shared_seed, "zipf:0.7")
    for name, schedule in of_mode(rank_schedules(w.problem), mode).items():
        w.check({name: schedule}, launches=1)
        kernel = w.kernel(schedule)
        outputs = {
            rank: out.new_full((BACK_TO_BACK, *out.shape), torch.nan)
            for rank, out in w.outputs().items()
        }

        def launches(
            rank: int, kernel: Any = kernel, outputs: Any = outputs, schedule: Schedule = schedule
        ) -> None:
            buffer, weights = w.ranks.buffers[rank], w.weights[rank]
            for y in outputs[rank]:
                kernel.launch(buffer, weights, y, w.inputs[rank].num_tokens, schedule)

        def compare(how: str, outputs: Any = outputs, name: str = name) -> None:
            w.ranks.barrier()
            reasons = dict.fromkeys(w.ranks.here, "")
            for rank, out in outputs.items():
                expected = w._first[None, True][rank].view(torch.int16)
                wrong = (out.view(torch.int16) != expected).flatten(1).any(1).nonzero().flatten()
                if len(wrong):
                    reasons[rank] = f"{name}, {how}: other bits in launches {wrong.tolist()}"
                elif not counters_are_zero(w.ranks.buffers[rank]):
                    reasons[rank] = f"{name}, {how}: counters are not zero"
                out.fill_(torch.nan)
            w.agree(reasons)

        w.ranks.barrier()
        w.ranks.run(launches)
        compare("launched")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            w.ranks.run(launches)
        for n in range(3):
            w.ranks.barrier()
            graph.replay()
            compare(f"replay {n}")


@modes
def test_hundred_relaunches_full_size(mode: str, shared_seed: int) -> None:
    w = world(FLASH, PRESET_CAPACITY)
    w.fill(1024, shared_seed)
    for schedule in of_mode(preset_schedules(FLASH), mode).values():
        relaunch(w, schedule, 100)


@modes
def test_graph_replay(mode: str, shared_seed: int) -> None:
    """Launches of the op, captured."""
    w = world(SMALL, SMALL_CAPACITY)
    w.fill(400, shared_seed, "zipf:1.0", 0.1)
    for name, schedule in of_mode(variants(SMALL), mode).items():
        w.check({name: schedule}, launches=1)
        y, weights = torch.empty_like(w.y), w.weights[0]
        fp8_mega_moe(y, weights.l1, weights.l2, w.ranks.first, schedule=schedule)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                fp8_mega_moe(y, weights.l1, weights.l2, w.ranks.first, schedule=schedule)
        for _ in range(5):
            y.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, w.y)


@modes
@each_number
def test_graph_replay_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    """The fork to the ranks' streams and the join are part of the graph."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([(129, 0, 300, 65)[r % 4] for r in range(num_ranks)], shared_seed, "zipf:1.0", 0.1)
    for name, schedule in of_mode(rank_schedules(w.problem), mode).items():
        w.check({name: schedule}, launches=1)
        y = w.outputs()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                w.start(schedule, y)
        reasons = dict.fromkeys(w.ranks.here, "")
        for _ in range(5):
            for out in y.values():
                out.fill_(torch.nan)
            graph.replay()
            w.ranks.barrier()
            for rank, out in y.items():
                if not torch.equal(out, w._first[None, True][rank]):
                    reasons[rank] = f"{name}: a replay gives other bits"
        w.agree(reasons)


@modes
@each_number
def test_received_rows_are_counted_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    """Into the caller's counts, and into the buffer's own where there are none."""
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    w.fill([(129, 0, 300, 65)[r % 4] for r in range(num_ranks)], shared_seed, "skew", 0.2)
    local = w.problem.num_local_experts
    for schedule in of_mode(rank_schedules(w.problem), mode).values():
        stats, before = {}, {}
        for rank, buffer in w.ranks.buffers.items():
            stats[rank] = torch.ones(local, dtype=torch.int32, device=buffer.device)
            before[rank] = buffer.recv_stats.clone()
        w.launch(schedule, recv_stats=stats)
        w.launch(schedule, recv_stats=stats)
        w.launch(schedule)
        reasons = dict.fromkeys(w.ranks.here, "")
        for rank, buffer in w.ranks.buffers.items():
            want = list(w.counts(rank))
            if (stats[rank] - 1).tolist() != [2 * n for n in want]:
                reasons[rank] = f"{stats[rank].tolist()} counted of twice {want}"
            if (buffer.recv_stats - before[rank]).tolist() != want:
                reasons[rank] = "the buffer's own counts are off"
        w.agree(reasons)


@modes
def test_changing_tokens_and_schedules_share_a_buffer(mode: str, shared_seed: int) -> None:
    """Counters, barriers and what was dropped from L2 fit the next launch, whatever grid, block_m
    and tokens it has."""
    w = world(SMALL, SMALL_CAPACITY)
    every = list(of_mode(variants(SMALL), mode).values())
    for step in range(30):
        w.fill((step * 37) % 400, shared_seed + step, mask=0.1)
        schedule = replace(every[step % len(every)], evict_first=step // 3 % 2)
        w.check({"step": schedule}, launches=1)


def random_case(draw: random.Random, num_ranks: int, most: int) -> tuple[list[int], str, float]:
    """Tokens of every rank, routing, mask."""
    small = draw.random() < 0.5
    counts = [
        draw.choice([0, 1, draw.randint(0, 130 if small else most)]) for _ in range(num_ranks)
    ]
    routing = draw.choice(["uniform", "zipf:0.7", "zipf:1.5", "skew", "hot1"])
    return counts, routing, draw.choice([0.0, 0.0, 0.2, 0.8, 1.0])


def random_walk(draw: random.Random, schedule: Schedule, w: World) -> Schedule:
    every = list(walks(schedule, w.problem).values())
    return replace(draw.choice(every), prefetch=draw.choice([0, schedule.prefetch]))


@modes
def test_random(mode: str, shared_seed: int) -> None:
    w = world(SMALL, SMALL_CAPACITY)
    draw = random.Random(shared_seed)
    every = list(of_mode(variants(SMALL), mode).values())
    for step in range(60):
        counts, routing, mask = random_case(draw, 1, SMALL_CAPACITY)
        w.fill(counts, shared_seed + step, routing, mask)
        w.check({f"{step}": random_walk(draw, draw.choice(every), w)}, pools=True)


@modes
@each_number
def test_random_on_ranks(num_ranks: int, mode: str, shared_seed: int) -> None:
    w = world(ON_RANKS[num_ranks], RANKS_CAPACITY)
    draw = random.Random(shared_seed)
    every = list(of_mode(rank_schedules(w.problem), mode).values())
    for step in range(25):
        counts, routing, mask = random_case(draw, num_ranks, RANKS_CAPACITY)
        w.fill(counts, shared_seed + step, routing, mask)
        w.check({f"{step}": random_walk(draw, draw.choice(every), w)}, pools=True)
