"""Many ranks on the host: whole launches in random order, the walk over a ring, the layout."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from host_launches import order_of, random_problem, random_routing, random_schedule, small_ring
from host_model import Rules, World, make_plan
from host_scheduler import STYLES, DeadlockError, ModelError

from tl_megamoe.device.walk import LINEAR1_BIT, WALK_CUDA, Task, first_blocks, walk, walk_order
from tl_megamoe.layout import ALIGNMENT, GUARD_BYTES, LINE, MAX_RANKS, make_layout
from tl_megamoe.problem import PRESETS, Problem, divisors_of
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import COUNTER_BITS, Schedule

RANKS = (1, 2, 3, 4, 8, 16)
MIB = 2**20

# ---- whole launches


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", RANKS)
def test_launches_of_all_ranks(ranks: int, style: str, seed: int) -> None:
    """Every route comes back once, every tile runs once, nothing is overwritten or hangs."""
    rng = random.Random(seed)
    wrapped = half_blocks = 0
    for _ in range({8: 25, 16: 15}.get(ranks, 60)):
        problem = random_problem(rng, ranks)
        schedule = random_schedule(rng, problem)
        capacity = rng.choice((1, 24, 192 // ranks + 64))
        plan = make_plan(problem, schedule, capacity)
        if rng.random() < 0.8:
            plan = make_plan(problem, schedule, capacity, small_ring(rng, plan))
        launches = [random_routing(rng, problem, capacity) for _ in range(2)]
        rules = Rules(most_counted=rng.choice((None, 0, 20)))
        world = World(plan, launches, order_of(schedule), rng, style, rules)
        wrapped += world.run()
        half_blocks += world.half_blocks
    assert wrapped >= 3  # launches of a rank that reused rows
    assert half_blocks >= 20  # by linear


def test_a_row_in_several_chunks(seed: int) -> None:
    """With rows in flight that leave little shared memory, a row comes in pieces."""
    rng = random.Random(seed)
    problem = Problem(
        name="chunks", hidden=512, intermediate=128, num_experts=4, num_topk=2, num_ranks=2
    )
    schedule = Schedule(
        stages=2, dispatch_warps=3, load_warps=1, rows_in_flight=32, num_sms=2, experts_per_wave=2
    )
    while schedule.row_chunk(problem) == problem.hidden:
        schedule = replace(schedule, stages=schedule.stages + 1)
    plan = make_plan(problem, schedule, 200, 3)
    assert plan.chunks_per_row > 1
    launches = [random_routing(rng, problem, 200) for _ in range(4)]
    launches += [[[[0, 1]] * 200, [[1, 0]] * 150]]
    assert World(plan, launches, (False, 2), rng, "bursts").run()


# ---- the model can fail


def breaks(
    rules: Rules,
    *,
    seed: int,
    ring_blocks: int = 3,
    order: tuple[bool, int] = (True, 2),
    num_sms: int = 2,
    rows_in_flight: int = 1,
    block_rows: int = 64,
    math_mode: str = "cooperative",
    runs: int = 3,
) -> list[ModelError]:
    """What goes wrong in random launches with many blocks on rank 0 under these rules; `runs` of
    each style."""
    rng = random.Random(seed)
    local = 8
    problem = Problem(
        name="broken", hidden=256, intermediate=256, num_experts=2 * local, num_topk=1, num_ranks=2
    )
    schedule = Schedule(
        math_mode=math_mode,
        block_m=64,
        stages=2,
        num_sms=num_sms,
        rows_in_flight=rows_in_flight,
        experts_per_wave=local,
    )
    plan = make_plan(problem, schedule, 8 * block_rows, ring_blocks)
    routing = [[[token % local] for token in range(4 * block_rows)] for _ in range(2)]
    found = []
    for style in STYLES * runs:
        try:
            World(plan, [routing], order, rng, style, rules).run()
        except ModelError as error:
            found.append(error)
    return found


def test_right_rules_hold_where_wrong_ones_break(seed: int) -> None:
    assert not breaks(Rules(), seed=seed)
    assert not breaks(Rules(), seed=seed, order=(True, 10**6), num_sms=1)
    assert not breaks(Rules(), seed=seed, order=(False, 8), num_sms=1)
    assert not breaks(Rules(task_slots=2), seed=seed, num_sms=3)
    assert not breaks(Rules(task_slots=3), seed=seed, num_sms=3, math_mode="pingpong")
    assert not breaks(Rules(task_slots=2), seed=seed, num_sms=6, math_mode="swapped")


def test_few_routes_need_one_order(seed: int) -> None:
    """Blocks that count alone pull each row once only if all have an expert's rows in one order."""
    problem = Problem(
        name="few", hidden=256, intermediate=128, num_experts=2, num_topk=1, num_ranks=1
    )
    schedule = Schedule(block_m=64, stages=2, num_sms=2, rows_in_flight=1, experts_per_wave=2)
    plan = make_plan(problem, schedule, 40)
    rng = random.Random(seed)
    launches = [[[[token % 2] for token in range(40)]]]
    for style in STYLES:
        World(plan, launches, (False, 2), rng, style, Rules()).run()
        with pytest.raises(ModelError):
            World(plan, launches, (False, 2), rng, style, Rules(few_in_order=False)).run()


@pytest.mark.parametrize("lag", [3, 4, 8])
def test_a_lag_of_the_ring_or_more_hangs(lag: int, seed: int) -> None:
    found = breaks(Rules(bounded_lag=False), seed=seed, order=(True, lag), num_sms=1)
    assert len(found) == 3 * len(STYLES)
    assert all(isinstance(error, DeadlockError) for error in found)
    assert "intermediate ring: linear2 of block 0" in str(found[0])


def test_the_wave_order_over_a_ring_hangs(seed: int) -> None:
    found = breaks(Rules(bounded_lag=False), seed=seed, order=(False, 8))
    assert all(isinstance(error, DeadlockError) for error in found)
    assert len(found) == 3 * len(STYLES)


@pytest.mark.parametrize(
    ("rules", "order", "message"),
    [
        (Rules(pool_wait=False), (True, 2), "rows of pool block .* before they are read"),
        (Rules(intermediate_wait=False), (True, 2), "intermediate rows .* before they are read"),
        (
            Rules(intermediate_wait=False, bounded_lag=False),
            (True, 4),
            "intermediate rows .* before they are read",
        ),
        (Rules(token_wait=False), (True, 2), "linear1 of block .* reads row"),
        (Rules(linear1_wait=False), (True, 2), "linear2 of block .* reads row"),
    ],
)
def test_a_missing_wait_is_seen(
    rules: Rules, order: tuple[bool, int], message: str, seed: int
) -> None:
    found = breaks(rules, seed=seed, order=order, num_sms=6, runs=8)
    assert found
    assert any(re.search(message, str(error)) for error in found), found


@pytest.mark.parametrize(
    ("rules", "mode", "error", "message"),
    [
        (Rules(task_slots=1), "cooperative", ModelError, "entry .* before .* has read it"),
        (Rules(task_slots=2), "pingpong", ModelError, "entry .* before math . has read it"),
        (Rules(pay_if_empty=False), "cooperative", DeadlockError, "roles wait: .* linear1"),
        (Rules(pay_at_end=False), "cooperative", DeadlockError, "roles wait: .* linear1"),
        (Rules(report_first=False), "cooperative", DeadlockError, "roles wait: .* linear1"),
        (Rules(report_at_end=False), "cooperative", DeadlockError, "roles wait: .* linear1"),
        (Rules(stores_wait=False), "cooperative", ModelError, "linear2 of block .* reads row"),
        (Rules(stores_wait=False), "pingpong", ModelError, "linear2 of block .* reads row"),
        (Rules(stores_wait=False), "swapped", ModelError, "linear2 of block .* reads row"),
        (Rules(maxima_turns=False), "cooperative", ModelError, "row maxima of another tile"),
        (Rules(maxima_turns=False), "swapped", ModelError, "row maxima of another tile"),
    ],
)
def test_a_broken_handover_is_seen(
    rules: Rules, mode: str, error: type[ModelError], message: str, seed: int
) -> None:
    found = breaks(rules, seed=seed, num_sms=6, math_mode=mode, runs=8)
    assert found
    assert all(isinstance(e, error) for e in found)
    assert any(re.search(message, str(e)) for e in found), found


def test_a_claim_past_the_end_outlives_the_launch(seed: int) -> None:
    """Nobody waits for a load warp that has found the end: what it adds then may stay."""

    def run(rules: Rules) -> list[str]:
        rng, found = random.Random(seed), []
        problem = Problem(
            name="few", hidden=256, intermediate=128, num_experts=2, num_topk=1, num_ranks=1
        )
        plan = make_plan(problem, Schedule(stages=1, num_sms=2, experts_per_wave=2), 20)
        for style in STYLES * 150:
            try:
                World(plan, [[[]], [[[0]] * 20]], (False, 2), rng, style, rules).run()
            except ModelError as error:
                found.append(str(error))
        return found

    assert not run(Rules())
    assert {*run(Rules(claim_past_end=True))} == {"next_task is not cleared"}


def test_rows_in_flight_need_their_blocks_in_the_ring(seed: int) -> None:
    """Why the ring holds a block an expert: a warp would wait for rows that it has itself."""

    def run(ring_blocks: int) -> list[ModelError]:
        return breaks(
            Rules(),
            seed=seed,
            ring_blocks=ring_blocks,
            block_rows=2,
            rows_in_flight=8,
            num_sms=1,
        )

    assert not run(9)
    found = run(2)
    assert found
    assert all(isinstance(error, DeadlockError) for error in found)
    assert "pool ring: linear1 of block 0" in str(found[0])


@pytest.mark.parametrize("rows_in_flight", [3, 5, 8])
@pytest.mark.parametrize("order", [(True, 3), (True, 6), (False, 5)])
def test_rows_of_many_blocks_wait_for_none_of_their_group(
    rows_in_flight: int, order: tuple[bool, int], seed: int
) -> None:
    """A warp holds the last row of an expert's third block and those of the experts behind it,
    whose memory the expert's first blocks had: those must be done before the third is begun."""
    problem = Problem(
        name="held", hidden=256, intermediate=512, num_experts=40, num_topk=2, num_ranks=8
    )
    lag_order, step = order
    schedule = Schedule(
        stages=2,
        num_sms=1,
        rows_in_flight=rows_in_flight,
        dispatch_warps=1,
        order="lag" if lag_order else "wave",
        lag=step if lag_order else 0,
        experts_per_wave=5,
    )
    plan = make_plan(problem, schedule, 32)
    assert plan.ring_blocks == 6
    most = next(n for n in range(257, 385) if (n - 1) % rows_in_flight == 0)
    routes = [0] * most + [1, 2, 3, 4]
    routes += [39] * (512 - len(routes))
    idx = [[routes[n : n + 2] for n in range(64 * rank, 64 * rank + 64, 2)] for rank in range(8)]
    for style in STYLES:
        World(plan, [idx], order, random.Random(seed), style).run()


# ---- the walk over a ring


def random_walks(seed: int, number: int) -> Iterator[tuple[list[int], int, bool, int, int, int]]:
    """(first_block, ring_blocks, lag_order, step, n1, n2), most with more blocks than the ring."""
    rng = random.Random(seed)
    for _ in range(number):
        ranks = rng.choice(RANKS)
        local = rng.choice((1, 2, 3, 8, 31, 32, 33, 48))
        capacity, topk = rng.choice((1, 64, 512)), rng.choice((1, 6))
        problem = Problem(
            name="walk",
            hidden=128,
            intermediate=128,
            num_experts=ranks * local,
            num_topk=topk,
            num_ranks=ranks,
        )
        routes = rng.choice((ranks * capacity * topk, rng.randrange(ranks * capacity * topk + 1)))
        weights = [rng.choice((0.0, 1.0, 1.0, 30.0)) + 1e-9 for _ in range(local)]
        counts = [0] * local
        for expert in rng.choices(range(local), weights, k=routes):
            counts[expert] += 1
        block_m = rng.choice((64, 128))
        ring = make_layout(problem, capacity).ring_blocks(block_m)
        if rng.random() < 0.5:
            ring = rng.randrange(1, 20)
        lag_order = rng.random() < 0.5
        step = rng.choice((1, 2, 16, 10**6)) if lag_order else rng.choice(divisors_of(local))
        first_block = first_blocks(counts, block_m)
        yield first_block, ring, lag_order, step, rng.randrange(1, 5), rng.randrange(1, 5)


def test_walk_over_a_ring(seed: int) -> None:
    """Each tile once; linear2 behind its linear1, and linear1 behind the linear2 it waits for."""
    wraps = 0
    for first_block, ring, lag_order, step, n1, n2 in random_walks(seed, 400):
        blocks = first_block[-1]
        experts = len(first_block) - 1
        used = walk_order(blocks, experts, ring, lag_order, step)
        if blocks <= ring:
            assert used == (lag_order, step)
        else:
            wraps += 1
            assert used[0]
            most = min(max(1, ring - experts), ring // 2)
            assert used[1] <= most
            assert not lag_order or used[1] == min(step, most)
        done = {1: [0] * blocks, 2: [0] * blocks}
        for task in walk(first_block, *used, n1, n2):
            if task.phase == 2:
                assert done[1][task.block] == n1
            elif task.block >= ring:
                assert done[1][task.block - ring] == n1
                assert done[2][task.block - ring] == n2
            # A dispatch warp's rows may be of this block and of as many behind it as there are
            # experts; it writes none before linear1 of all that had their memory is done.
            if task.phase == 1 and blocks > ring > experts:
                held = min(task.block + experts, blocks - 1)
                assert done[1][: max(0, held - ring + 1)] == [n1] * max(0, held - ring + 1)
            done[task.phase][task.block] += 1
        assert done == {1: [n1] * blocks, 2: [n2] * blocks}
    assert wraps > 100


@pytest.fixture(scope="module")
def device_walk(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """WALK_CUDA compiled for the host."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is a requirement of tilelang too"
    text = tmp_path_factory.mktemp("walk") / "walk.cpp"
    text.write_text('#define TLMM_DEV extern "C"\n' + WALK_CUDA, encoding="utf-8")
    library = text.with_suffix(".so")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, text], check=True)
    return ctypes.CDLL(str(library))


def test_device_text_walks_the_ring_alike(device_walk: ctypes.CDLL, seed: int) -> None:
    """The same tasks as the Python twin, whatever lies behind the last expert."""
    for first_block, ring, lag_order, step, n1, n2 in random_walks(seed, 300):
        used = walk_order(first_block[-1], len(first_block) - 1, ring, lag_order, step)
        tasks: list[Task | None] = [*walk(first_block, *used, n1, n2), None]
        picked = {
            0,
            len(tasks) - 1,
            *random.Random(seed).sample(range(len(tasks)), len(tasks) // 9),
        }
        experts = len(first_block) - 1
        for poison in (0, -(2**31), 2**31 - 1):
            array = (ctypes.c_int * (len(first_block) + 8))(*first_block, *[poison] * 8)
            for index in picked:
                code = device_walk.tlmm_task(
                    index, array, experts, int(lag_order), step, ring, n1, n2
                )
                task = Task(1 if code & LINEAR1_BIT else 2, (code >> 8) & 0x3FFFFF, code & 255)
                assert (None if code < 0 else task) == tasks[index]


# ---- the layout


def many(ranks: int, **sizes: int) -> Problem:
    values = {"hidden": 512, "intermediate": 256, "num_experts": 4 * ranks, "num_topk": 2, **sizes}
    return Problem(name="many", num_ranks=ranks, **values)


@pytest.mark.parametrize("ranks", RANKS)
def test_ring_rule(ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        local, topk = rng.randrange(1, 60), rng.randrange(1, 9)
        problem = many(ranks, num_experts=ranks * local, num_topk=topk)
        capacity = rng.choice((1, 7, 64, rng.randrange(1, 9000)))
        layout = make_layout(problem, capacity)
        routes = ceil(Fraction(7, 16) * capacity * topk / 128) * 128
        bound = layout.pool_rows if ranks == 1 else 128 * local + routes
        assert layout.ring_rows == min(layout.pool_rows, bound)
        assert layout.sections["l1_acts"].shape[0] == layout.ring_rows
        assert layout.sections["l2_acts"].shape[0] * 64 == layout.ring_rows
        for name in ("l1_acts_sf", "l2_acts_sf"):
            assert layout.sections[name].shape[1] == layout.ring_rows
        for name in ("l1_topk_weights", "token_src_metadata"):
            assert layout.sections[name].shape == (layout.pool_rows,)
        for block_m in (64, 128):
            # More than the blocks that 32 rows in flight may touch: see the test above.
            assert layout.ring_rows % block_m == 0
            assert layout.ring_blocks(block_m) > local or layout.ring_rows == layout.pool_rows


def test_rows_in_flight_touch_few_blocks(seed: int) -> None:
    """32 neighbouring rows lie in at most num_local_experts + 1 blocks, which any ring holds."""
    rng = random.Random(seed)
    for _ in range(300):
        local = rng.randrange(1, 50)
        counts = [rng.choice((0, 1, 2, 63, 64, 65, rng.randrange(300))) for _ in range(local)]
        block_m = rng.choice((64, 128))
        first_block = first_blocks(counts, block_m)
        blocks = [first_block[e] + row // block_m for e, n in enumerate(counts) for row in range(n)]
        for first, last in zip(blocks, blocks[31:], strict=False):
            assert last - first <= local


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
@pytest.mark.parametrize(
    ("name", "bound"), [("deepseek-v4-flash", 700 * MIB), ("deepseek-v4-pro", 1113 * MIB)]
)
def test_memory_of_eight_ranks(name: str, bound: int, recipe: Recipe) -> None:
    layout = make_layout(PRESETS[name], 8192, recipe)
    assert PRESETS[name].num_ranks == 8
    assert layout.num_bytes <= bound
    assert layout.ring_rows < layout.pool_rows


@pytest.mark.parametrize("ranks", RANKS)
def test_description_adds_up(ranks: int) -> None:
    for capacity in (1, 100, 8192):
        layout = make_layout(many(ranks), capacity)
        text = layout.describe()
        reached = {
            name: (int(size.replace(",", "")), int(at.replace(",", "")), reach == "symmetric")
            for name, size, at, reach in re.findall(
                r"^  (\w+) +([\d,]+)  at +([\d,]+)  (symmetric|local) ", text, re.MULTILINE
            )
        }
        assert reached == {
            s.name: (s.num_bytes, s.offset, s.peer_access) for s in layout.sections.values()
        }
        total = re.search(
            r"symmetric ([\d,]+) \+ local ([\d,]+) \+ alignment and guards ([\d,]+) = "
            r"([\d,]+) bytes",
            text,
        )
        assert total
        symmetric, local, padding, everything = (int(n.replace(",", "")) for n in total.groups())
        assert symmetric == sum(size for size, _, peer in reached.values() if peer)
        assert local == sum(size for size, _, peer in reached.values() if not peer)
        assert symmetric + local + padding == everything == layout.num_bytes
        guards = len(reached) + 1
        assert GUARD_BYTES * guards <= padding < (GUARD_BYTES + ALIGNMENT) * guards
        ends = [(at, at + size) for size, at, _ in reached.values()]
        assert all(end <= at for (_, end), (at, _) in zip(ends, ends[1:], strict=False))


def test_what_other_ranks_reach() -> None:
    layout = make_layout(many(4), 64)
    reached = {s.name for s in layout.sections.values() if s.peer_access}
    assert reached == {"x", "x_sf", "topk_weights", "src_routes", "combine_acts", "workspace"}


@pytest.mark.parametrize("ranks", RANKS)
def test_words_that_peers_write(ranks: int) -> None:
    """A signal word a peer on a line of its barrier's own; counts apart from what is sent."""
    problem = many(ranks)
    layout = make_layout(problem, 64)
    at = layout.workspace_offsets
    lines = ("dispatch_sync", "combine_sync", "dispatch_signal", "combine_signal", "next_task")
    assert ranks <= MAX_RANKS <= LINE
    assert [at[name] for name in lines] == [i * LINE for i in range(len(lines))]
    sent = set(range(at["expert_send_count"], at["expert_send_count"] + problem.num_experts))
    received = set(range(at["expert_recv_count"], at["expert_recv_count"] + problem.num_experts))
    assert sent == received if ranks == 1 else not sent & received
    assert min(sent | received) >= len(lines) * LINE


@pytest.mark.parametrize("ranks", RANKS)
def test_source_metadata_names_every_route(ranks: int) -> None:
    problem = many(ranks, num_topk=6)
    capacity = 2**COUNTER_BITS // 6 - 1000  # at 16 ranks a little more has too many pool blocks
    make_layout(problem, capacity)
    for rank in range(ranks):
        for slot, token in ((0, 0), (5, capacity - 1), (3, 12345)):
            word = rank << COUNTER_BITS | slot * capacity + token
            assert word < 2**31
            assert word >> COUNTER_BITS == rank
            assert divmod(word & (1 << COUNTER_BITS) - 1, capacity) == (slot, token)


def test_more_ranks_than_a_launch_spans() -> None:
    make_layout(many(MAX_RANKS), 8)
    with pytest.raises(ValueError, match=r"num_ranks=17 of problem 'many' exceeds 16"):
        make_layout(many(17), 8)
