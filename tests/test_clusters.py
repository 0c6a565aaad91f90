"""Clusters of two blocks on the host: whole launches in random order, the walk in pairs."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from host_launches import order_of, random_routing, small_ring
from host_model import Rules, World, make_plan
from host_scheduler import STYLES, DeadlockError, ModelError

from tl_megamoe.device.walk import (
    LINEAR1_BIT,
    PAIRS_CUDA,
    WALK_CUDA,
    Task,
    first_blocks,
    pair_task,
    walk,
)
from tl_megamoe.problem import Problem, divisors_of
from tl_megamoe.schedule import Schedule


def draw(rng: random.Random, ranks: int) -> tuple[Problem, Schedule]:
    """A layer, and a schedule of clusters that is valid for it."""
    problem = Problem(
        name="clusters",
        hidden=rng.choice((512, 768)),
        intermediate=rng.choice((128, 256, 384)),
        num_experts=ranks * rng.choice((1, 2, 3, 5)),
        num_topk=rng.choice((1, 2, 4)),
        num_ranks=ranks,
    )
    local = problem.num_local_experts
    while True:
        lag = rng.choice((0, 0, 0, 1, 3))
        schedule = Schedule(
            cluster_size=2,
            dispatch_warps=1,
            stages=rng.choice((2, 3)),
            order="lag" if lag else "wave",
            lag=lag,
            experts_per_wave=local if lag else rng.choice(divisors_of(local)),
            rows_in_flight=rng.choice((1, 2, 5)),
            num_sms=rng.choice((2, 4, 6)),
        )
        if not schedule.violations(problem):
            return problem, schedule


def launches(
    rng: random.Random, style: str, ranks: int, count: int, rules: Rules
) -> tuple[int, list[ModelError]]:
    """Tiles that random launches share, and what goes wrong in them."""
    shared, found = 0, []
    for _ in range(count):
        problem, schedule = draw(rng, ranks)
        capacity = rng.choice((192 // ranks + 64, 320))
        plan = make_plan(problem, schedule, capacity)
        if rng.random() < 0.3:
            plan = make_plan(problem, schedule, capacity, small_ring(rng, plan))
        routes = [random_routing(rng, problem, capacity) for _ in range(2)]
        world = World(plan, routes, order_of(schedule), rng, style, rules)
        try:
            world.run()
        except ModelError as error:
            found.append(error)
        shared += world.shared_tiles
    return shared, found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_launches_in_clusters(ranks: int, seed: int) -> None:
    """Every route comes back once, every tile runs once, both halves of its weights come, nothing
    is overwritten or hangs."""
    rng, shared = random.Random(seed), 0
    for style in STYLES:
        tiles, found = launches(rng, style, ranks, 40, Rules())
        assert not found
        shared += tiles
    assert shared >= 20


@pytest.mark.parametrize("rules", [Rules(same_stage=False), Rules(meet=False)])
def test_a_broken_rule_is_seen(rules: Rules, seed: int) -> None:
    rng, found = random.Random(seed), []
    while not found:
        for style in STYLES:
            found += launches(rng, style, 1, 10, rules)[1]
    wanted = "operands of another tile|stage is filled|roles wait"
    assert all(re.search(wanted, str(error)) for error in found)


def test_a_tile_that_its_neighbour_waits_for(seed: int) -> None:
    """Waves of one block: a block's linear1 tile, its neighbour's linear2 tile that needs it, then
    tiles of two blocks. The reports come all the same."""
    rng, shared = random.Random(seed), 0
    for hidden, intermediate in ((512, 128), (512, 256), (512, 384), (768, 256)):
        problem = needing(hidden, intermediate)
        for stages in (2, 3):
            schedule = needing_schedule(stages)
            if schedule.violations(problem):
                continue
            plan = make_plan(problem, schedule, 600)
            for style in STYLES:
                for rows in ((1, 1, 256, 10, 200, 1), (0, 1, 1, 0, 256, 1), (5, 256, 5, 256, 5, 5)):
                    world = World(plan, [[routes_of(rows)]], (False, 1), rng, style)
                    world.run()
                    shared += world.shared_tiles
    assert shared >= 100


def test_one_linear2_tile_would_hang(seed: int) -> None:
    """A block's linear1 tile, its neighbour's linear2 tile that needs it, and a shared pair right
    behind: the rule is needed."""
    problem, schedule = needing(256, 128), needing_schedule(2)
    (found,) = schedule.violations(problem)
    assert "two linear2 tiles" in found
    plan, rng = make_plan(problem, schedule, 600), random.Random(seed)
    routes = routes_of((0, 1, 1, 0, 256, 1))

    def run() -> None:
        for turn in range(300):
            style = ("speeds", "bursts", "ranked")[turn % 3]
            World(plan, [[routes]], (False, 1), rng, style).run()

    with pytest.raises(DeadlockError):
        run()


def needing(hidden: int, intermediate: int) -> Problem:
    return Problem(
        name="needs",
        hidden=hidden,
        intermediate=intermediate,
        num_experts=6,
        num_topk=1,
        num_ranks=1,
    )


def needing_schedule(stages: int) -> Schedule:
    return Schedule(cluster_size=2, dispatch_warps=1, stages=stages, experts_per_wave=1, num_sms=2)


def routes_of(rows: tuple[int, ...]) -> list[list[int]]:
    """Topk_idx that sends so many tokens to each expert."""
    return [[expert] for expert, count in enumerate(rows) for _ in range(count)]


# ---- the walk


class DevicePairs:
    """WALK_CUDA and PAIRS_CUDA compiled for the host."""

    def __init__(self, folder: Path):
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "a C++ compiler is a requirement of tilelang too"
        text = folder / "pairs.cpp"
        text.write_text('#define TLMM_DEV extern "C"\n' + WALK_CUDA + PAIRS_CUDA, encoding="utf-8")
        library = folder / "pairs.so"
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(text)], check=True
        )
        self.library = ctypes.CDLL(str(library))

    def task(
        self, task: Task, first_block: list[int], totals: list[int], n1: int, n2: int
    ) -> tuple[Task, bool, bool]:
        code = (LINEAR1_BIT if task.phase == 1 else 0) | task.block << 8 | task.tile
        experts, near = len(totals), ctypes.c_int()
        blocks = (ctypes.c_int * (experts + 1))(*first_block)
        rows = (ctypes.c_int * experts)(*totals)
        found = self.library.tlmm_pair_task(code, blocks, rows, experts, n1, n2, ctypes.byref(near))
        phase = 1 if found & LINEAR1_BIT else 2
        return (
            Task(phase, found >> 8 & 0x3FFFFF, found & 255),
            bool(near.value & 2),
            bool(near.value & 1),
        )


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> DevicePairs:
    return DevicePairs(tmp_path_factory.mktemp("pairs"))


def random_walk(rng: random.Random) -> tuple[list[int], list[int], int, int, int]:
    """First blocks, rows of each expert, experts a wave, tiles of linear1 and linear2."""
    experts = rng.choice((1, 2, 3, 8, 32))
    most = rng.choice((1, 64, 130, 400, 5000))
    totals = [rng.choice((0, rng.randrange(most + 1), most)) for _ in range(experts)]
    step = rng.choice(divisors_of(experts))
    return first_blocks(totals, 128), totals, step, rng.choice((1, 2, 3, 16)), rng.choice((1, 2, 7))


def test_device_text_pairs_alike(device: DevicePairs, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        first_block, totals, step, n1, n2 = random_walk(rng)
        for task in walk(first_block, False, step, n1, n2):
            wanted = pair_task(task, first_block, totals, n1, n2)
            assert device.task(task, first_block, totals, n1, n2) == wanted


def test_pairs_are_another_order_of_the_walk(seed: int) -> None:
    """Every task once; neighbours agree on whether they have the same weights, and those have."""
    rng = random.Random(seed)
    near_tiles = 0
    for _ in range(300):
        first_block, totals, step, n1, n2 = random_walk(rng)
        plain = list(walk(first_block, False, step, n1, n2))
        found = [pair_task(task, first_block, totals, n1, n2) for task in plain]
        assert sorted(task for task, _, _ in found) == sorted(plain)
        near_tiles += sum(behind for _, _, behind in found)
        for (task, _, behind), (other, before, _) in zip(found, found[1:], strict=False):
            assert behind == before
            if behind:
                assert (task.phase, task.tile) == (other.phase, other.tile)
                assert other.block == task.block + 1
        assert not found or not (found[0][1] or found[-1][2])
        # A linear2 tile stands behind all linear1 tiles of its wave.
        phases = [task.phase for task, _, _ in found]
        assert phases == [task.phase for task in plain]
    assert near_tiles > 1000


def test_blocks_of_few_rows_come_in_pairs() -> None:
    """Two tiles of the full blocks, then two of the one with at most 64 rows."""
    first_block, totals = first_blocks([300], 128), [300]
    found = [pair_task(t, first_block, totals, 3, 1)[0] for t in walk(first_block, False, 1, 3, 1)]
    assert [(t.block, t.tile) for t in found if t.phase == 1] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1), (0, 2), (1, 2), (2, 2),
    ]  # fmt: skip


def test_a_schedule_keeps_whole_clusters() -> None:
    schedule = Schedule(cluster_size=2, dispatch_warps=1)
    assert schedule.on_sms(66).num_sms == 66
    assert schedule.on_sms(33).num_sms == 32
    assert schedule.on_sms(1).num_sms == 2
    assert replace(schedule, cluster_size=1).on_sms(33).num_sms == 33
