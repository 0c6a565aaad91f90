"""Schedule rules: every violation names its field, valid ones hold the hardware limits."""

from __future__ import annotations

import dataclasses
import random

import pytest
from fuzz_cases import draw_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_megamoe import PRESETS, Problem, Recipe, Schedule, ScheduleError
from tl_megamoe.recipe import ALL_RECIPES
from tl_megamoe.schedule import default_schedule
from tl_megamoe.shared_memory import SMEM_LIMIT_BYTES
from tl_megamoe.validity import LAUNCH_REGISTERS

FLASH = PRESETS["deepseek-v4-flash"].one_rank()
FIELDS = {f.name for f in dataclasses.fields(Schedule)}
TOKENS = (1, 16, 64, 256, 512, 1024, 4096, 8192)

schedules = st.builds(
    Schedule,
    math_mode=st.sampled_from(("cooperative", "pingpong", "swapped", "solo")),
    block_m=st.sampled_from((32, 64, 128, 256)),
    linear1_block_n=st.sampled_from((64, 128, 256)),
    linear2_block_n=st.sampled_from((64, 128, 256)),
    stages=st.integers(0, 12),
    experts_per_wave=st.integers(0, 40),
    order=st.sampled_from(("wave", "lag", "spiral")),
    lag=st.integers(-1, 40),
    dispatch_warps=st.integers(0, 4),
    load_warps=st.integers(0, 3),
    load_registers=st.sampled_from((16, 24, 40, 48, 50, 104)),
    math_registers=st.sampled_from((168, 200, 224, 232, 240, 256, 264)),
    rows_in_flight=st.integers(0, 40),
    num_sms=st.integers(0, 132),
    prefetch=st.integers(-1, 60),
    evict_first=st.integers(-1, 2),
    cluster_size=st.integers(0, 3),
)
problems = st.sampled_from([p.one_rank() for p in PRESETS.values()]) | st.builds(
    lambda h, i, e, k: Problem(
        name="small",
        hidden=128 * h,
        intermediate=128 * i,
        num_experts=e,
        num_topk=k,
        num_ranks=1,
    ),
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(1, 50),
    st.integers(1, 10),
)


@st.composite
def valid_cases(draw: st.DrawFn) -> tuple[Problem, Recipe, Schedule]:
    """A problem, a recipe and a schedule that is valid for them."""
    problem, recipe = draw(problems), draw(st.sampled_from(ALL_RECIPES))
    return problem, recipe, draw_schedule(draw(st.randoms()), problem, recipe)


@settings(max_examples=300)
@given(schedules, problems)
def test_violations_name_a_field_and_its_value(schedule: Schedule, problem: Problem) -> None:
    found = schedule.violations(problem)
    for sentence in found:
        field, _, rest = sentence.partition("=")
        assert field in FIELDS
        assert rest.startswith(str(getattr(schedule, field))) or rest.startswith(
            repr(getattr(schedule, field))
        )
    if found:
        with pytest.raises(ScheduleError) as caught:
            schedule.check(problem)
        assert str(caught.value) == "; ".join(found)
    else:
        schedule.check(problem)


@settings(max_examples=300)
@given(valid_cases())
def test_valid_schedules_fit_the_hardware(case: tuple[Problem, Recipe, Schedule]) -> None:
    problem, recipe, schedule = case
    assert schedule.violations(problem, recipe) == []
    assert schedule.threads <= 1024
    assert schedule.smem_bytes(problem, recipe) <= SMEM_LIMIT_BYTES
    registers = 128 * schedule.load_registers + 256 * schedule.math_registers
    assert registers <= schedule.threads * LAUNCH_REGISTERS <= 65536
    assert schedule.load_registers <= LAUNCH_REGISTERS <= schedule.math_registers
    assert problem.num_local_experts % schedule.experts_per_wave == 0
    chunk = schedule.row_chunk(problem, recipe)
    assert chunk > 0
    assert problem.hidden % chunk == 0
    assert chunk % 16 == 0
    assert schedule.linear2_tiles(problem) * schedule.linear2_block_n == problem.hidden
    assert schedule.linear1_tiles(problem) * 128 == problem.intermediate


def test_few_routes_take_no_room_from_row_chunks() -> None:
    few = Schedule(block_m=64)
    most = 2 * few.threads
    assert few.few_routes(FLASH) == most
    assert few.few_routes(PRESETS["deepseek-v4-flash"]) == 0  # its ranks tell each other
    assert Schedule(block_m=128).few_routes(FLASH) == 0  # 1 KiB is left beside the row chunks
    assert Schedule(block_m=128, stages=3).few_routes(FLASH) == most
    assert few.few_routes(dataclasses.replace(FLASH, num_experts=682)) == most
    assert few.few_routes(dataclasses.replace(FLASH, num_experts=683)) == 0  # no scratch for them
    tight = [Schedule(block_m=64, stages=5, dispatch_warps=1, rows_in_flight=n) for n in (2, 3, 4)]
    assert [schedule.few_routes(FLASH) for schedule in tight] == [0, 384, 0]
    for routes, schedule in ((384, tight[1]), (768, few)):
        assert schedule.is_few(FLASH, routes // 6)
        assert not schedule.is_few(FLASH, routes // 6 + 1)
    none = Schedule(block_m=64, stages=6)
    assert not none.row_chunk(FLASH)
    assert none.few_routes(FLASH) == 0
    assert not none.is_few(FLASH, 0)


@given(schedules)
def test_dict_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    assert hash(Schedule.from_dict(schedule.to_dict())) == hash(schedule)


@pytest.mark.parametrize("missing", [("evict_first", "cluster_size"), ("cluster_size",)])
def test_a_schedule_written_before_a_field_reads_as_without(missing: tuple[str, ...]) -> None:
    values = Schedule(stages=3).to_dict()
    for field in missing:
        del values[field]
    assert Schedule.from_dict(values) == Schedule(stages=3)


@settings(max_examples=300)
@given(st.randoms())
def test_names_are_unique(rng: random.Random) -> None:
    a, b = (draw_schedule(rng, FLASH, Recipe()) for _ in range(2))
    assert (a.name == b.name) == (a == b)


def test_names_change_with_every_field() -> None:
    base = Schedule(experts_per_wave=32)
    lag = dataclasses.replace(base, order="lag", lag=4)
    pingpong = dataclasses.replace(base, math_mode="pingpong", block_m=64)
    changes = {
        "block_m": 64,
        "linear1_block_n": 128,
        "linear2_block_n": 128,
        "stages": 3,
        "experts_per_wave": 16,
        "dispatch_warps": 1,
        "load_warps": 1,
        "load_registers": 48,
        "math_registers": 224,
        "rows_in_flight": 2,
        "num_sms": 128,
        "prefetch": 8,
        "evict_first": 1,
        "cluster_size": 2,
    }
    swapped = dataclasses.replace(pingpong, math_mode="swapped")
    names = {base.name, lag.name, dataclasses.replace(lag, lag=8).name, pingpong.name, swapped.name}
    names |= {dataclasses.replace(base, **{k: v}).name for k, v in changes.items()}
    assert len(names) == 5 + len(changes)
    assert set(changes) | {"order", "lag", "math_mode"} == FIELDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": "4"}, "stages='4'"),
        ({"stages": True}, "stages=True"),
        ({"order": 1}, "order=1"),
        ({"colour": 3}, "unknown \\['colour'\\]"),
    ],
)
def test_from_dict_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_dict({**Schedule().to_dict(), **change})
    partial = Schedule().to_dict()
    del partial["lag"]
    with pytest.raises(ScheduleError, match="missing \\['lag'\\]"):
        Schedule.from_dict(partial)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_wave": 5}, "does not divide num_local_experts=32"),
        ({"order": "lag", "lag": 4, "experts_per_wave": 8}, "must be num_local_experts=32"),
        ({"order": "lag"}, "lag=0 with order='lag'"),
        ({"lag": 3}, "lag=3 with order='wave'"),
        ({"block_m": 64, "linear1_block_n": 128}, "linear1_block_n=128 splits rows"),
        ({"dispatch_warps": 3, "load_warps": 2}, "exceeds the 4 warps"),
        ({"load_registers": 104, "math_registers": 240}, "registers a block"),
        ({"stages": 12}, "no room for"),
        ({"stages": 17}, "exceeds the 16 K blocks"),
        ({"prefetch": 33}, "exceeds the 32 K blocks"),
        ({"evict_first": 2}, "evict_first=2 must be one of (0, 1)"),
        ({"cluster_size": 3}, "cluster_size=3 must be one of (1, 2)"),
        ({"cluster_size": 2}, "needs dispatch_warps=1 and load_warps=2"),
        ({"cluster_size": 2, "num_sms": 33}, "num_sms=33 is not a multiple of cluster_size=2"),
        ({"cluster_size": 2, "block_m": 64}, "cooperative tiles of 128 rows"),
        ({"cluster_size": 2, "linear1_block_n": 128}, "load 128 of 256 weight rows"),
        ({"rows_in_flight": 33}, "32 lanes"),
        ({"math_mode": "pingpong"}, "needs block_m=64, found block_m=128"),
        (
            {"math_mode": "pingpong", "block_m": 64, "linear2_block_n": 128},
            "use linear2_block_n=256",
        ),
        ({"math_mode": "swapped"}, "needs block_m=64, found block_m=128"),
        (
            {"math_mode": "swapped", "block_m": 64, "linear1_block_n": 128},
            "linear1_block_n=128 leaves a warpgroup without weights",
        ),
    ],
)
def test_rules(change: dict[str, object], message: str) -> None:
    found = dataclasses.replace(Schedule(), **change).violations(FLASH)
    assert any(message in sentence for sentence in found), found


def test_clusters_need_two_linear2_tiles() -> None:
    narrow = Problem(
        name="narrow", hidden=256, intermediate=256, num_experts=8, num_topk=2, num_ranks=1
    )
    schedule = Schedule(cluster_size=2, dispatch_warps=1, stages=2, experts_per_wave=8)
    (found,) = schedule.violations(narrow)
    assert "cluster_size=2 needs two linear2 tiles" in found
    assert not schedule.violations(dataclasses.replace(narrow, hidden=512))


def test_every_recipe_runs_and_counts_its_scales() -> None:
    for recipe in ALL_RECIPES:
        assert Schedule().violations(FLASH, recipe) == []
        scales = Schedule().smem_buffers(FLASH, recipe)["ring_a_sf"]
        assert scales == 4 * 128 * 4 * recipe.scales_per_k_block


@settings(max_examples=300)
@given(valid_cases())
def test_shared_memory_is_what_the_buffers_take(case: tuple[Problem, Recipe, Schedule]) -> None:
    problem, recipe, schedule = case
    found = schedule.smem_buffers(problem, recipe)
    stages, slots, scales = schedule.stages, schedule.task_slots, recipe.scales_per_k_block
    words = {
        "ring_a_sf": stages * scales * schedule.block_m,
        # Two buffers: of the warpgroups, or of their warps.
        "amax": 2 * (8 if schedule.swapped else 2) * 64,
        "scales": 2 * scales * schedule.block_m,
        # Entries of tiles, tiles stored by warpgroup; counts by source rank; total, first_block and
        # first_row with their ends.
        "tables": 4 * slots
        + 2
        + problem.num_experts
        + 3 * problem.num_local_experts
        + 2
        + schedule.few_routes(problem, recipe),
        # Full and empty, a row chunk each, an entry each: 8 bytes.
        "barriers": 2 * (2 * stages + schedule.row_slots + slots),
    }
    assert ("inverse" in found) == schedule.swapped
    if schedule.swapped:
        words["inverse"] = 2 * schedule.block_m
    for name, number in words.items():
        assert found[name] == -(-4 * number // 1024) * 1024, name
    assert found["ring_a"] == stages * schedule.block_m * 128
    assert found["ring_b"] == stages * schedule.max_block_n * 128


@given(valid_cases(), st.integers(1, 128))
def test_a_block_has_one_tile_size(case: tuple[Problem, Recipe, Schedule], rows: int) -> None:
    """The least that holds its rows, and of swapped operands less than 16 more."""
    _, _, schedule = case
    rows = min(rows, schedule.block_m)
    for linear in (1, 2):
        sizes = schedule.tile_rows(linear)
        assert sizes == tuple(sorted(set(sizes)))
        assert sizes[-1] == schedule.block_m
        assert not schedule.swapped or min(n for n in sizes if n >= rows) - rows < 16


@given(valid_cases())
def test_a_published_tile_is_read_before_its_entry_is_written_again(
    case: tuple[Problem, Recipe, Schedule],
) -> None:
    """The writer is in the tile whose stage the readers have left, or as many ahead as there are
    stages; in pingpong mode a warpgroup may be one tile behind the one that left it."""
    problem, _, schedule = case
    blocks_of_tiles = problem.hidden // 128, problem.intermediate // 128
    tiles_in_the_ring = -(-schedule.stages // min(blocks_of_tiles))
    # The entry that is written is the next tile's.
    assert schedule.task_slots >= 1 + tiles_in_the_ring + (2 if schedule.pingpong else 1)


def test_block_m_32_is_for_dispatch_alone() -> None:
    schedule = Schedule(block_m=32)
    assert schedule.violations(FLASH, None, "dispatch") == []
    for phase in ("fused", "linear1", "linear2", "combine"):
        assert any("block_m=32" in s for s in schedule.violations(FLASH, None, phase))


def test_default_takes_the_mode_of_its_threshold() -> None:
    modes = {t: default_schedule(FLASH, t).math_mode for t in (1, 255, 256, 8192)}
    assert modes == {1: "pingpong", 255: "pingpong", 256: "cooperative", 8192: "cooperative"}
    assert default_schedule(FLASH, 255, cooperative_threshold=100).math_mode == "cooperative"
    assert default_schedule(FLASH, 8192, "pingpong").violations(FLASH) == []
    group64 = default_schedule(FLASH, 1, recipe=Recipe(intermediate_group=64))
    assert group64.math_mode == "cooperative"
    narrow = dataclasses.replace(FLASH, hidden=384, intermediate=384)
    assert default_schedule(narrow, 1).math_mode == "cooperative"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("problem", [p.one_rank() for p in PRESETS.values()], ids=lambda p: p.name)
def test_default_is_valid_for_presets(problem: Problem, tokens: int) -> None:
    assert default_schedule(problem, tokens).violations(problem, Recipe()) == []


@given(problems, st.sampled_from(TOKENS))
def test_default_is_valid_everywhere(problem: Problem, tokens: int) -> None:
    assert default_schedule(problem, tokens).violations(problem, Recipe()) == []


@pytest.mark.parametrize("problem", [p.one_rank() for p in PRESETS.values()], ids=lambda p: p.name)
def test_classic_candidate_is_valid(problem: Problem) -> None:
    classic = Schedule(dispatch_warps=2, load_warps=2, load_registers=48, math_registers=224)
    assert classic.violations(problem) == []
    assert classic.threads == 384


@given(schedules)
def test_kernel_key_drops_runtime_fields_only(schedule: Schedule) -> None:
    key = schedule.kernel_key()
    runtime = {"experts_per_wave", "order", "lag", "prefetch", "evict_first"}
    for field in FIELDS - runtime:
        assert getattr(key, field) == getattr(schedule, field)
    other = dataclasses.replace(
        schedule, experts_per_wave=7, order="lag", lag=9, prefetch=1, evict_first=1
    )
    assert other.kernel_key() == key
