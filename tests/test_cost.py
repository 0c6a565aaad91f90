"""The cost model against what was measured on an H200, and its directions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tl_megamoe.explorer.cost import k_block_clocks, predict, uniform_counts
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


def test_pingpong_hides_the_epilogue_of_a_64_row_tile() -> None:
    low = default_schedule(FLASH, 8192, "pingpong")
    found, shared = (
        predict(FLASH, replace(low, math_mode=mode), 8192) for mode in ("pingpong", "cooperative")
    )
    for phase, epilogue in ((1, 1.07), (2, 1.12)):
        ratio = shared.phase_us(f"linear{phase}") / found.phase_us(f"linear{phase}")
        assert ratio == pytest.approx(epilogue, rel=0.01)
    assert found.total_us > predict(FLASH, default_schedule(FLASH, 8192), 8192).total_us


def test_pingpong_rounds_count_two_tiles_a_block() -> None:
    one = Problem(name="o", hidden=256, intermediate=128, num_experts=1, num_topk=1, num_ranks=1)
    pingpong = replace(default_schedule(one, 1, "pingpong"), num_sms=1)
    shared = replace(pingpong, math_mode="cooperative")
    # Two tasks (a tile of each linear): one round of both warpgroups, two of a shared tile.
    times = [predict(one, s, 1, (1,)).linear1_us for s in (pingpong, shared)]
    assert times[0] == pytest.approx(times[1] / 1.07)
    # Three tasks leave a warpgroup idle in the second round.
    wide = replace(one, hidden=512)
    times = [predict(wide, s, 1, (1,)).linear1_us for s in (pingpong, shared)]
    assert times[0] == pytest.approx(times[1] / 1.07 * 4 / 3)


def test_a_group_of_64_promotes_linear2_twice() -> None:
    big = default_schedule(FLASH, 8192)
    for scale in ("exact", "pow2"):
        half = predict(FLASH, big, 8192, recipe=Recipe.parse(f"{scale}-64"))
        whole = predict(FLASH, big, 8192, recipe=Recipe.parse(f"{scale}-128"))
        assert half.linear1_us == whole.linear1_us
        assert half.linear2_us > 1.1 * whole.linear2_us


def test_virtual_ranks_share_the_memory_bandwidth() -> None:
    layer = replace(PRESETS["deepseek-v4-flash"], num_ranks=4)
    schedule = replace(default_schedule(layer, 16), num_sms=33)
    alone = predict(layer, schedule, 16)
    shared = predict(layer, schedule, 16, gpu_ranks=4)
    # 16 tokens a rank are bound by weights: all ranks' weights pass one memory.
    weights_us = 256 * 3 * 4096 * 2048 / 4.589e6
    assert weights_us * 0.7 < shared.linear1_us + shared.linear2_us < weights_us * 1.3
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
    assert us(replace(big, order="lag", lag=1)) > us(replace(big, order="lag", lag=16))
    small = replace(big, block_m=64)
    assert us(replace(small, prefetch=0), 16) > us(small, 16)
    assert us(replace(small, experts_per_wave=1), 16) > us(small, 16)


def test_more_tokens_take_longer() -> None:
    times = [predict(FLASH, default_schedule(FLASH, 8192), 2**n).total_us for n in range(14)]
    assert times == sorted(times)


def test_skewed_counts_are_taken_as_given() -> None:
    hot = (6 * 512,) + (0,) * 31
    schedule = default_schedule(FLASH, 512)
    assert predict(FLASH, schedule, 512, hot).linear1_us < predict(FLASH, schedule, 512).linear1_us


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_part_of_the_layer(phase: str) -> None:
    found = predict(FLASH, default_schedule(FLASH, 4096), 4096)
    assert 0 < found.phase_us(phase) <= found.total_us
