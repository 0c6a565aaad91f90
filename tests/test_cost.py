"""The cost model against what was measured on an H200, its directions, and its constants."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tl_megamoe.device.walk import first_blocks, group_of, walk
from tl_megamoe.explorer.constants import BUILT_IN, Constants, constants_path, load_constants
from tl_megamoe.explorer.cost import k_block_clocks, predict, uniform_counts
from tl_megamoe.explorer.space import enumerate_candidates, load_space
from tl_megamoe.explorer.walk_time import walk_time
from tl_megamoe.kernel import PHASES
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

FLASH = PRESETS["deepseek-v4-flash"].one_rank()


@pytest.mark.parametrize(
    ("tokens", "measured_us"),
    [(16, 209), (64, 213), (256, 224), (512, 274), (1024, 495), (4096, 1504), (8192, 2863)],
)
def test_close_to_a_prototype(tokens: int, measured_us: float) -> None:
    """A fused prototype under the protocol, V4-Flash, one rank of eight; within 12 %."""
    us = predict(FLASH, default_schedule(FLASH, tokens, "cooperative"), tokens).total_us
    assert us == pytest.approx(measured_us, rel=0.12)


# ---- the walk


def slow_walk_time(
    counts: list[int],
    schedule: Schedule,
    tiles: tuple[int, int],
    costs: list[tuple[float, float]],
    arrivals: list[float],
    publish: float,
) -> float:
    """`walk_time` one task after the other, over the tasks that the kernel's own walk names."""
    lag = schedule.order == "lag"
    first = first_blocks(counts, schedule.block_m)
    free = [0.0] * schedule.num_sms
    done: dict[int, float] = {}
    step = schedule.lag if lag else schedule.experts_per_wave
    for task in walk(first, lag, step, *tiles):
        block = free.index(min(free))
        ready = arrivals[task.block] if task.phase == 1 else done[task.block]
        free[block] = max(free[block], ready) + costs[task.block][task.phase - 1]
        if task.phase == 1:
            done[task.block] = max(done.get(task.block, 0.0), free[block] + publish)
    return max(free)


@pytest.mark.parametrize("publish", [0.0, 2.5])
@pytest.mark.parametrize(
    ("order", "step"), [("wave", 1), ("wave", 2), ("wave", 6), ("lag", 1), ("lag", 3), ("lag", 99)]
)
@pytest.mark.parametrize("sms", [1, 7, 16])
def test_the_walk_is_that_of_the_kernel(order: Any, step: int, sms: int, publish: float) -> None:
    counts = [130, 0, 1, 64, 300, 65]
    lag = step if order == "lag" else 0
    schedule = Schedule(
        block_m=64,
        order=order,
        lag=lag,
        experts_per_wave=6 if lag else step,
        num_sms=sms,
    )
    first = first_blocks(counts, 64)
    # The blocks of a group count alike (walk_time.py).
    alike = [group_of(first, b).start for b in range(first[-1])]
    arrivals = [3.0 * b for b in alike]
    for tiles, (long1, long2) in (((4, 3), (10.0, 6.0)), ((2, 5), (1.0, 9.0))):
        costs = [(long1 * f, long2 * f) for f in (1.0 - 0.5 * (b % 3 == 2) for b in alike)]
        by_linear = (np.array([c[0] for c in costs]), np.array([c[1] for c in costs]))
        found = walk_time(
            tuple(first),
            schedule.experts_per_wave,
            lag,
            tiles,
            sms,
            by_linear,
            np.array(arrivals),
            publish,
        )
        slow = slow_walk_time(counts, schedule, tiles, costs, arrivals, publish)
        # A group's blocks are done together in the model, a tile apart at most in the kernel.
        assert found == pytest.approx(slow, rel=0.05)


@pytest.mark.parametrize("step", [1, 2, 4, 16])
@pytest.mark.parametrize("rows", [60, 200, 1500])
def test_a_last_block_with_fewer_rows_is_close(rows: int, step: int) -> None:
    schedule = Schedule(block_m=128, experts_per_wave=step)
    counts = [rows + 7 * e for e in range(16)]
    first = first_blocks(counts, 128)
    last = set(first[1:])
    costs = [(8.0, 4.0) if b + 1 in last else (16.0, 8.0) for b in range(first[-1])]
    arrivals = [0.5 * b for b in range(first[-1])]
    by_linear = (np.array([c[0] for c in costs]), np.array([c[1] for c in costs]))
    found = walk_time(tuple(first), step, 0, (16, 16), 132, by_linear, np.array(arrivals))
    slow = slow_walk_time(counts, schedule, (16, 16), costs, arrivals, 0.0)
    assert found == pytest.approx(slow, rel=0.05)


def test_an_empty_launch_walks_nothing() -> None:
    nothing = np.zeros(0)
    assert walk_time((0, 0, 0), 1, 0, (4, 4), 132, (nothing, nothing), nothing) == 0.0


# ---- the terms


def test_pingpong_hides_the_epilogue_and_promotes_alone() -> None:
    low = default_schedule(FLASH, 8192, "pingpong")
    shared = replace(low, math_mode="cooperative")
    slow = replace(BUILT_IN, epilogue1_clocks=3400.0, epilogue2_clocks=2900.0)
    for phase in ("linear1", "linear2"):
        times = [
            [predict(FLASH, s, 8192, constants=c).phase_us(phase) for c in (BUILT_IN, slow)]
            for s in (low, shared)
        ]
        assert times[0][1] == pytest.approx(times[0][0], rel=0.01)
        assert times[1][1] > 1.01 * times[1][0]
    alone = k_block_clocks(64, 256, pingpong=True) - k_block_clocks(64, 256)
    assert alone == pytest.approx(BUILT_IN.promote_clocks)
    assert predict(FLASH, low, 8192).total_us > predict(FLASH, shared, 8192).total_us


def test_a_round_that_is_not_full_counts_whole() -> None:
    one = Problem(name="o", hidden=256, intermediate=128, num_experts=1, num_topk=1, num_ranks=1)
    schedule = replace(default_schedule(one, 1, "cooperative"), block_m=128)
    at_once = replace(BUILT_IN, pull_latency_us=1e-6)

    def tiles_us(rows: int, num_sms: int) -> float:
        found = predict(one, replace(schedule, num_sms=num_sms), 1, (rows,), constants=at_once)
        return found.linear1_us + found.linear2_us + found.idle_us

    # Two tiles a pool block, one of each linear.
    assert tiles_us(128, 1) == pytest.approx(tiles_us(65, 1), rel=0.01)
    assert tiles_us(193, 1) == pytest.approx(2 * tiles_us(128, 1), rel=0.01)
    assert tiles_us(193, 2) == pytest.approx(tiles_us(128, 2), rel=0.05)


def test_a_low_block_is_multiplied_as_one_of_64_rows() -> None:
    at_once = replace(BUILT_IN, pull_latency_us=1e-6)
    high = default_schedule(FLASH, 512, "cooperative")
    split = {"linear1_block_n": 128, "linear2_block_n": 128}  # rows, not columns

    def linear_us(rows: int, **changes: int) -> list[float]:
        counts = (rows,) * FLASH.num_local_experts
        found = predict(FLASH, replace(high, **changes), 512, counts, constants=at_once)
        return [found.linear1_us, found.linear2_us]

    assert high.block_m == 128
    assert linear_us(64) == pytest.approx(linear_us(64, block_m=64), rel=0.01)
    assert linear_us(64, **split) == pytest.approx(linear_us(65, **split), rel=0.01)
    for linear in (0, 1):
        assert linear_us(65)[linear] > 1.5 * linear_us(64)[linear]
        # A second block of few rows.
        assert linear_us(192)[linear] > 1.4 * linear_us(128)[linear]
        assert linear_us(193)[linear] == pytest.approx(linear_us(256)[linear], rel=0.02)


def test_a_group_of_64_promotes_linear2_twice() -> None:
    big = default_schedule(FLASH, 8192)
    for scale in ("exact", "pow2"):
        half = predict(FLASH, big, 8192, recipe=Recipe.parse(f"{scale}-64"))
        whole = predict(FLASH, big, 8192, recipe=Recipe.parse(f"{scale}-128"))
        # The clock rises a little when the tensor cores wait for the promotion.
        assert half.linear1_us == pytest.approx(whole.linear1_us, rel=0.03)
        assert half.linear2_us > 1.1 * whole.linear2_us


def test_virtual_ranks_share_the_memory_bandwidth() -> None:
    layer = replace(PRESETS["deepseek-v4-flash"], num_ranks=4)
    schedule = replace(default_schedule(layer, 16), num_sms=33)
    alone = predict(layer, schedule, 16)
    shared = predict(layer, schedule, 16, gpu_ranks=4)
    # 16 tokens a rank are bound by weights: all ranks' weights pass one memory.
    weights_us = 256 * 3 * 4096 * 2048 / 4.589e6
    assert weights_us * 0.7 < shared.total_us < weights_us * 1.4
    assert shared.total_us > 1.3 * alone.total_us


@pytest.mark.parametrize("problem", PRESETS.values(), ids=lambda p: p.name)
def test_counts_are_those_of_uniform_routing(problem: Problem) -> None:
    for tokens in (64, 512, 8192):
        view = problem.one_rank()
        counts = uniform_counts(view, tokens)
        assert len(counts) == view.num_local_experts
        assert sum(counts) == tokens * problem.num_topk
        assert max(counts) > min(counts)


def test_few_tokens_touch_few_experts() -> None:
    counts = uniform_counts(FLASH, 1)
    assert 1 <= sum(c > 0 for c in counts) <= 6
    assert sum(uniform_counts(FLASH, 0)) == 0
    nothing = predict(FLASH, Schedule(), 0)
    assert nothing.linear1_us == nothing.linear2_us == nothing.combine_us == 0.0
    assert nothing.idle_us == nothing.memory_us == 0.0


def test_shared_memory_bounds_a_k_block() -> None:
    wide, square, low = k_block_clocks(128, 256), k_block_clocks(128, 128), k_block_clocks(64, 256)
    assert wide < 2 * square  # the same products in one tile
    assert wide < 2 * low


def test_directions() -> None:
    big = default_schedule(FLASH, 8192)

    def us(schedule: Schedule, tokens: int = 8192) -> float:
        return predict(FLASH, schedule, tokens).total_us

    assert us(replace(big, block_m=64)) > us(big)
    assert us(replace(big, linear1_block_n=128)) > us(big)
    assert us(replace(big, linear2_block_n=128)) > us(big)
    assert us(replace(big, num_sms=66)) > 1.5 * us(big)
    assert us(replace(big, rows_in_flight=2)) > us(big)
    assert us(replace(big, stages=3)) > us(big)
    lag = replace(big, order="lag", experts_per_wave=32)
    assert us(replace(lag, lag=1)) > us(replace(lag, lag=16))
    small = replace(big, block_m=64)
    assert us(replace(small, experts_per_wave=1), 16) > us(small, 16)


def test_a_free_block_takes_the_next_tile() -> None:
    """With 16 + 16 tiles a pool block, a grid of 128 that dealt them out by turns would give every
    block tiles of one linear alone: 15 % more than with 132 blocks."""
    lag = replace(default_schedule(FLASH, 8192), order="lag", lag=16, experts_per_wave=32)
    more, fewer = (predict(FLASH, replace(lag, num_sms=n), 8192).total_us for n in (132, 128))
    assert 1.0 < fewer / more < 1.05


def test_more_tokens_take_longer() -> None:
    times = [predict(FLASH, default_schedule(FLASH, 8192), 2**n).total_us for n in range(14)]
    assert times == sorted(times)


def test_skewed_counts_are_taken_as_given() -> None:
    hot = (6 * 512,) + (0,) * 31
    schedule = default_schedule(FLASH, 512)
    assert predict(FLASH, schedule, 512, hot).total_us < predict(FLASH, schedule, 512).total_us


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_part_of_the_layer(phase: str) -> None:
    found = predict(FLASH, default_schedule(FLASH, 4096), 4096)
    assert 0 < found.phase_us(phase) <= found.total_us


@pytest.mark.parametrize("tokens", [16, 8192])
def test_a_prediction_takes_about_a_millisecond_and_repeats(tokens: int) -> None:
    schedules = enumerate_candidates(FLASH, tokens, load_space("screen")).schedules
    first = [predict(FLASH, s, tokens).total_us for s in schedules]
    began = time.process_time()
    assert [predict(FLASH, s, tokens).total_us for s in schedules] == first
    mean_s = (time.process_time() - began) / len(schedules)
    assert mean_s < 5e-3  # 0.1 to 1.5 ms


# ---- constants


def constants_file(root: Path, **changes: Any) -> Path:
    path = constants_path("NVIDIA H200", root)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema": 1, "device": "nvidia-h200", "constants": asdict(BUILT_IN), "provenance": {}}
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_every_constant_has_a_meaning_and_bounds_around_it() -> None:
    assert all(text for _, text in Constants.describe().values())
    for name, (low, high) in Constants.bounds().items():
        assert 0 < low < getattr(BUILT_IN, name) < high, name


@pytest.mark.parametrize("name", [f.name for f in fields(Constants)])
def test_every_constant_moves_some_prediction(name: str) -> None:
    changed = replace(BUILT_IN, **{name: 0.8 * getattr(BUILT_IN, name)})
    cells = [
        (replace(default_schedule(FLASH, t, mode), prefetch=32), t)
        for t in (64, 512, 8192)
        for mode in ("pingpong", "cooperative")
    ]
    before, after = (
        [predict(FLASH, s, t, constants=c).total_us for s, t in cells] for c in (BUILT_IN, changed)
    )
    assert before != after


def test_fitted_constants_are_read_and_used(tmp_path: Path) -> None:
    assert load_constants("nvidia-h200", tmp_path) == BUILT_IN
    constants_file(tmp_path, constants={**asdict(BUILT_IN), "tail_us": 21.5})
    found = load_constants(None, tmp_path)
    assert found == load_constants("NVIDIA H200", tmp_path) == replace(BUILT_IN, tail_us=21.5)
    assert load_constants("nvidia-h100", tmp_path) == BUILT_IN
    schedule = default_schedule(FLASH, 64)
    times = [predict(FLASH, schedule, 64, constants=c).total_us for c in (None, found)]
    assert times[1] - times[0] == pytest.approx(21.5 - BUILT_IN.tail_us)


def test_the_shipped_constants_are_within_their_bounds() -> None:
    found = load_constants()
    for name, (low, high) in Constants.bounds().items():
        assert low <= getattr(found, name) <= high, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 7}, "schema=7 must be 1"),
        ({"device": "nvidia-h100"}, "device='nvidia-h100' must be that of its name, 'nvidia-h200'"),
        ({"constants": {"tail_us": 1.0}}, "must hold exactly the constants"),
        ({"constants": [1]}, "must hold exactly the constants"),
        (
            {"constants": {**asdict(BUILT_IN), "tail_us": "long"}},
            "constants.tail_us='long' must be a positive number",
        ),
        (
            {"constants": {**asdict(BUILT_IN), "tail_us": -1.0}},
            "constants.tail_us=-1.0 must be a positive number",
        ),
    ],
)
def test_a_corrupt_file_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = constants_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as raised:
        load_constants(None, tmp_path)
    assert str(path) in str(raised.value)
    path.write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        load_constants(None, tmp_path)
