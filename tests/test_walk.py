"""The tile walk: the Python twin's properties, and that the device text computes the same."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tl_megamoe.device.walk import (
    GROUP_BLOCKS,
    LINEAR1_BIT,
    WALK_CUDA,
    Task,
    expert_of,
    first_blocks,
    first_tile,
    group_of,
    task_at,
    walk,
)
from tl_megamoe.problem import divisors_of

NUM_CASES = 3000
NO_RING = 2**31 - 1
"""A ring that holds every block; smaller ones are in test_model_ranks.py."""


class DeviceWalk:
    """WALK_CUDA compiled for the host."""

    def __init__(self, folder: Path):
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "a C++ compiler is a requirement of tilelang too"
        text = folder / "walk.cpp"
        text.write_text('#define TLMM_DEV extern "C"\n' + WALK_CUDA, encoding="utf-8")
        library = folder / "walk.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))

    def task(
        self, index: int, first_block: list[int], lag_order: bool, step: int, n1: int, n2: int
    ) -> Task | None:
        array = (ctypes.c_int * len(first_block))(*first_block)
        experts = len(first_block) - 1
        code = self.library.tlmm_task(index, array, experts, int(lag_order), step, NO_RING, n1, n2)
        if code < 0:
            return None
        return Task(1 if code & LINEAR1_BIT else 2, (code >> 8) & 0x3FFFFF, code & 255)

    def expert(self, first_block: list[int], block: int) -> int:
        array = (ctypes.c_int * len(first_block))(*first_block)
        return int(self.library.tlmm_expert_of(array, len(first_block) - 1, block))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> DeviceWalk:
    return DeviceWalk(tmp_path_factory.mktemp("walk"))


def random_cases(seed: int) -> Iterator[tuple[list[int], bool, int, int, int]]:
    """(first_block, lag_order, step, n1, n2) over random expert counts, many of them empty."""
    rng = random.Random(seed)
    for _ in range(NUM_CASES):
        experts = rng.choice([1, 2, 3, 5, 8, 12, 31, 32, 33, 48, 64, 65])
        shape = rng.random()
        counts = [
            0
            if rng.random() < shape
            else rng.choice([1, 63, 64, 65, 128, rng.randrange(700), rng.randrange(5000)])
            for _ in range(experts)
        ]
        block_m = rng.choice([64, 128])
        lag_order = rng.random() < 0.5
        step = rng.choice([1, 2, 7, 16, 10**6]) if lag_order else rng.choice(divisors_of(experts))
        yield (
            first_blocks(counts, block_m),
            lag_order,
            step,
            rng.randrange(1, 9),
            rng.randrange(1, 9),
        )


def test_every_tile_once_and_linear2_behind_its_linear1(seed: int) -> None:
    for first_block, lag_order, step, n1, n2 in random_cases(seed):
        tasks = list(walk(first_block, lag_order, step, n1, n2))
        blocks = first_block[-1]
        assert len(tasks) == len(set(tasks)) == blocks * (n1 + n2)
        last_linear1 = {t.block: i for i, t in enumerate(tasks) if t.phase == 1}
        for i, t in enumerate(tasks):
            assert 0 <= t.block < blocks
            assert 0 <= t.tile < (n1 if t.phase == 1 else n2)
            if t.phase == 2:
                assert i > last_linear1[t.block]


def test_waves_come_in_order(seed: int) -> None:
    for first_block, lag_order, step, n1, n2 in random_cases(seed):
        if lag_order:
            continue
        stages = [
            (
                expert_of(first_block, t.block) // step,
                t.phase,
                group_of(first_block, t.block).start,
                t.tile,
                t.block,
            )
            for t in walk(first_block, False, step, n1, n2)
        ]
        assert stages == sorted(stages)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 1000])
def test_groups_are_few_and_alike(count: int) -> None:
    first_block = [0, 3, 3, 3 + count, 5 + count]
    groups = []
    for block in range(3, 3 + count):
        group = group_of(first_block, block)
        assert block in group
        if group not in groups:
            groups.append(group)
    assert [block for group in groups for block in group] == list(range(3, 3 + count))
    assert len(groups) <= -(-count // GROUP_BLOCKS)
    sizes = {len(group) for group in groups}
    assert max(sizes, default=0) <= GROUP_BLOCKS
    assert len({len(group) for group in groups[:-1]}) <= 1


def test_a_group_reads_each_weight_tile_once() -> None:
    """Linear1 of an expert of three pool blocks and of one of one, then their linear2."""
    assert list(walk([0, 3, 4], False, 2, 2, 1)) == [
        *(Task(1, block, tile) for tile in (0, 1) for block in (0, 1, 2)),
        *(Task(1, 3, tile) for tile in (0, 1)),
        *(Task(2, block, 0) for block in (0, 1, 2, 3)),
    ]


def test_in_lag_order_groups_end_with_the_turn() -> None:
    """Two blocks, then two in turn: the third of the expert is alone."""
    assert list(walk([0, 3, 4], True, 2, 2, 1)) == [
        *(Task(1, block, tile) for tile in (0, 1) for block in (0, 1)),
        *(Task(1, block, tile) for block in (2, 3) for tile in (0, 1)),
        *(Task(2, block, 0) for block in (0, 1, 2, 3)),
    ]


@pytest.mark.parametrize("lag_order", [False, True])
def test_the_first_tiles_of_equal_experts_are_known(lag_order: bool) -> None:
    """What dispatch asks for before it knows the counts."""
    for blocks_each in range(1, GROUP_BLOCKS + 1):
        for tiles in (1, 2, 16, 24):
            first_block = [blocks_each * expert for expert in range(33)]
            for index in range(min(132, first_block[-1] * tiles)):
                task = task_at(index, first_block, lag_order, 10**6 if lag_order else 32, tiles, 7)
                assert task is not None
                if task.phase == 1:
                    assert task.tile == first_tile(index, blocks_each, tiles)
                    assert expert_of(first_block, task.block) == index // tiles // blocks_each


def test_lag_is_kept(seed: int) -> None:
    for first_block, lag_order, step, n1, n2 in random_cases(seed):
        if not lag_order:
            continue
        ahead = 0
        for t in walk(first_block, True, step, n1, n2):
            if t.phase == 1:
                ahead = t.block
            else:
                assert ahead >= min(t.block + step, first_block[-1] - 1)


def test_experts_own_their_blocks(device: DeviceWalk, seed: int) -> None:
    for first_block, *_ in random_cases(seed):
        for block in range(first_block[-1]):
            expert = expert_of(first_block, block)
            assert first_block[expert] <= block < first_block[expert + 1]
            assert device.expert(first_block, block) == expert


def test_device_text_is_the_twin(device: DeviceWalk, seed: int) -> None:
    rng = random.Random(seed)
    for first_block, lag_order, step, n1, n2 in random_cases(seed):
        end = first_block[-1] * (n1 + n2)
        for index in {0, end - 1, end, *(rng.randrange(end + 1) for _ in range(20))} - {-1}:
            arguments = (index, first_block, lag_order, step, n1, n2)
            assert device.task(*arguments) == task_at(*arguments)
        for only in ((n1, 0), (0, n2)):
            end = first_block[-1] * sum(only)
            for index in {0, end - 1, end, *(rng.randrange(end + 1) for _ in range(5))} - {-1}:
                arguments = (index, first_block, lag_order, step, *only)
                assert device.task(*arguments) == task_at(*arguments)


def test_a_linear_alone_walks_every_tile_once_in_one_wave(seed: int) -> None:
    for number, (first_block, lag_order, step, n1, n2) in enumerate(random_cases(seed)):
        if number % 10:
            continue
        for phase, only in ((1, (n1, 0)), (2, (0, n2))):
            tasks = list(walk(first_block, lag_order, step, *only))
            assert len(set(tasks)) == len(tasks) == first_block[-1] * sum(only)
            assert {t.phase for t in tasks} <= {phase}
            stages = [(group_of(first_block, t.block).start, t.tile, t.block) for t in tasks]
            assert stages == sorted(stages)


def test_static_striding_cannot_deadlock(seed: int) -> None:
    """Blocks that run their tasks in order, waiting for linear1, finish whatever their speeds."""
    rng = random.Random(seed)
    for number, (first_block, lag_order, step, n1, n2) in enumerate(random_cases(seed)):
        if number % 30:
            continue
        grid = rng.choice([1, 3, 16, 132])
        tasks = list(walk(first_block, lag_order, step, n1, n2))
        position = list(range(min(grid, len(tasks))))
        arrived = [0] * first_block[-1]
        running = set(range(len(position)))
        while running:
            ready = [
                b for b in running if (t := tasks[position[b]]).phase == 1 or arrived[t.block] == n1
            ]
            assert ready
            b = rng.choice(ready)
            t = tasks[position[b]]
            if t.phase == 1:
                arrived[t.block] += 1
            position[b] += grid
            if position[b] >= len(tasks):
                running.remove(b)
