"""Launches of all ranks on the host: what runs when, which memory is reused, what waits for what.

Every role of every block of every rank is a generator that follows the kernel's rules (phases/*.py,
device/barriers.py, device/pingpong.py) over the real layout, counters, walk and plan, and gives way
between any two of its accesses to what others see. A scheduler runs them in random order. Numbers
are replaced by where they come from: a row carries (launch, source rank, token), so that a row that
is overwritten too early, lost or doubled is seen by whoever reads it.

What it does not show: memory ordering, which the scheduler makes sequential.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from tl_megamoe.device.plan import Plan
from tl_megamoe.device.walk import Task, expert_of, first_blocks, task_at, walk_order
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import COUNTER_BITS, Schedule

Wait = tuple[str, Callable[[], bool]]
Agent = Generator[Wait | None, None, None]
STYLES = ("uniform", "bursts", "ranked")


class ModelError(AssertionError):
    """A launch broke a rule."""


class DeadlockError(ModelError):
    """Every role that is left waits."""


@dataclass(frozen=True)
class Rules:
    """The kernel's rules; a test that breaks one shows that the model sees it.

    Attributes:
        bounded_lag: a launch that wraps the ring walks as `walk_order` says.
        pool_wait: dispatch waits for linear1 of the block that had its rows.
        intermediate_wait: linear1 waits for linear2 of the block that had its rows.
        token_wait, linear1_wait: a tile waits for its rows, for all linear1 tiles of its block.
    """

    bounded_lag: bool = True
    pool_wait: bool = True
    intermediate_wait: bool = True
    token_wait: bool = True
    linear1_wait: bool = True


def make_plan(
    problem: Problem, schedule: Schedule, capacity: int, ring_blocks: int | None = None
) -> Plan:
    """The fused plan, its pools cut down to `ring_blocks` blocks unless None."""
    plan = Plan.make("fused", problem, schedule, Recipe(), capacity, False, True, False)
    if ring_blocks is None:
        return plan
    rows = min(ring_blocks * schedule.block_m, plan.layout.pool_rows)
    return replace(plan, layout=replace(plan.layout, ring_rows=rows))


def check(holds: bool, message: str) -> None:
    if not holds:
        raise ModelError(message)


# ---- the scheduler


class Scheduler:
    """Runs agents until all are done.

    uniform: a random ready one takes one step. bursts: it takes several. ranked: the ready one of
    highest priority runs until it waits, so that some wait as long as they can.
    """

    def __init__(self, rng: random.Random, style: str):
        self.rng, self.style = rng, style
        self.agents: list[tuple[str, Agent]] = []
        self.waits: dict[Agent, Wait | None] = {}

    def start(self, name: str, agent: Agent) -> None:
        self.agents.insert(self.rng.randrange(len(self.agents) + 1), (name, agent))
        self.waits[agent] = None

    def _ready(self, index: int) -> bool:
        wait = self.waits[self.agents[index][1]]
        return wait is None or wait[1]()

    def _pick(self) -> int:
        count, first = len(self.agents), 0
        if self.style != "ranked":
            for _ in range(8):
                index = self.rng.randrange(count)
                if self._ready(index):
                    return index
            first = self.rng.randrange(count)
        for offset in range(count):
            index = (first + offset) % count
            if self._ready(index):
                return index
        waits = [f"{name}: {(self.waits[agent] or ('',))[0]}" for name, agent in self.agents]
        raise DeadlockError(f"{count} roles wait: {'; '.join(sorted(waits)[:20])}")

    def run(self) -> None:
        while self.agents:
            index = self._pick()
            name, agent = self.agents[index]
            steps = {"uniform": 1, "bursts": self.rng.choice((1, 3, 50)), "ranked": 10**9}
            for _ in range(steps[self.style]):
                try:
                    self.waits[agent] = wait = next(agent)
                except StopIteration:
                    self.agents.remove((name, agent))
                    break
                if wait is not None and not wait[1]():
                    break


class NamedBarrier:
    """A `bar.sync` id of one block, warpgroups (or roles) as its parties."""

    def __init__(self, parties: int):
        self.parties = parties
        self.arrived: set[int] = set()
        self.rounds = 0

    def arrive(self, who: int) -> None:
        check(who not in self.arrived, f"{who} arrives twice at a barrier")
        self.arrived.add(who)
        if len(self.arrived) == self.parties:
            self.arrived, self.rounds = set(), self.rounds + 1

    def sync(self, who: int) -> Iterator[Wait]:
        rounds = self.rounds
        self.arrive(who)
        yield "named barrier", lambda: self.rounds > rounds


# ---- ranks


class Rank:
    """A rank's buffer. Rows are what they came from."""

    def __init__(self, plan: Plan, rank: int):
        layout, problem = plan.layout, plan.problem
        self.plan, self.rank, self.launch = plan, rank, -1
        self.workspace = [0] * layout.workspace_offsets["end"]
        places = layout.capacity * problem.num_topk
        local, ranks = problem.num_local_experts, problem.num_ranks
        check(layout.sections["src_routes"].shape == (local, ranks, places), "src_routes")
        self.src_routes = [[[(-1, -1)] * places for _ in range(ranks)] for _ in range(local)]
        self.metadata = [-1] * layout.pool_rows
        self.l1: dict[tuple[int, int], tuple[int, ...]] = {}  # (ring row, chunk)
        self.l2: dict[tuple[int, int], tuple[int, ...]] = {}  # (ring row, 64 columns)
        self.combine_acts: dict[tuple[int, int], tuple[int, ...]] = {}  # (row, 128 columns)
        self.recv_stats = [0] * local
        self.topk_idx: list[list[int]] = []
        self.tiles: Counter[Task] = Counter()
        self.reads: Counter[tuple[int, int]] = Counter()  # K blocks read, by phase and pool block
        self.pulled: set[tuple[int, int]] = set()  # (pool row, chunk)

    def begin(self, topk_idx: list[list[int]]) -> None:
        self.launch += 1
        self.topk_idx = topk_idx
        self.tiles.clear()
        self.reads.clear()
        self.pulled.clear()

    def add(self, counter: str, index: int, value: int, target: int) -> None:
        at = self.plan.counter(counter) + index
        self.workspace[at] += value
        check(self.workspace[at] <= target, f"{counter}[{index}] passes {target}")

    def equal(self, counter: str, index: int, target: int, label: str) -> Wait:
        at = self.plan.counter(counter) + index
        return f"{label} of block {index}", lambda: self.workspace[at] == target


class Block:
    """One block of one rank's grid, in one launch."""

    def __init__(self, world: World, rank: Rank, number: int):
        plan = world.plan
        s = plan.schedule
        self.world, self.plan, self.rank, self.number = world, plan, rank, number
        self.known = False
        self.first_block: list[int] = []
        self.counts: list[list[int]] = []
        self.order = (world.lag_order, world.order_step)
        self.loaded: list[list[tuple[int, ...]]] = []  # a ring stage's rows, by step
        self.released: dict[int, int] = defaultdict(int)
        self.multiply_turn = (NamedBarrier(2), NamedBarrier(2))
        self.finish_turn = (NamedBarrier(2), NamedBarrier(2))
        self.amax, self.math_barrier = NamedBarrier(2), NamedBarrier(2)
        self.done = 0
        self.roles = s.dispatch_warps + 4

    def agents(self) -> Iterator[tuple[str, Agent]]:
        where = f"rank {self.rank.rank} block {self.number}"
        yield f"{where} start", self._role(self.start())
        yield f"{where} load", self._role(self.load())
        for warp in range(self.plan.schedule.dispatch_warps):
            yield f"{where} dispatch {warp}", self._role(self.dispatch(warp))
        for wg in (0, 1):
            yield f"{where} math {wg}", self._role(self.math(wg))

    def _role(self, agent: Agent) -> Agent:
        yield from agent
        self.done += 1

    def wait_known(self) -> Wait:
        return "counts", lambda: self.known

    def task(self, index: int) -> Task | None:
        s, problem = self.plan.schedule, self.plan.problem
        n1, n2 = s.linear1_tiles(problem), s.linear2_tiles(problem)
        return task_at(index, self.first_block, *self.order, n1, n2)

    def k_blocks(self, task: Task) -> int:
        """Ring stages that a tile takes."""
        if task.phase == 2:
            return self.plan.groups2
        return self.plan.groups1 * (256 // self.plan.schedule.linear1_block_n)

    def valid_rows(self, block: int) -> int:
        expert = expert_of(self.first_block, block)
        rows = sum(counts[expert] for counts in self.counts)
        left = rows - (block - self.first_block[expert]) * self.plan.schedule.block_m
        return min(left, self.plan.schedule.block_m)

    # ---- routing and counts (dispatch.route, dispatch.learn_counts, tlmm_rank_sync)

    def start(self) -> Agent:
        plan, rank = self.plan, self.rank
        problem, s = plan.problem, plan.schedule
        local, topk = problem.num_local_experts, problem.num_topk
        routes = len(rank.topk_idx) * topk
        for first in range(0, routes, plan.route_batch):
            mine: dict[int, list[int]] = defaultdict(list)
            for step in range(plan.route_steps):
                begin = first + (step * s.num_sms + self.number) * s.threads
                for i in range(begin, min(begin + s.threads, routes)):
                    expert = rank.topk_idx[i // topk][i % topk]
                    if 0 <= expert < problem.num_experts:
                        mine[expert].append(i)
            for expert, listed in mine.items():
                at = plan.counter("expert_send_count") + expert
                place = rank.workspace[at]
                rank.workspace[at] += len(listed)
                yield None
                peer = self.world.ranks[expert // local]
                for i in listed:
                    peer.src_routes[expert % local][rank.rank][place] = (rank.launch, i)
                    place += 1
        yield from self.sync_ranks("dispatch", send_counts=True)
        recv = plan.counter("expert_recv_count")
        self.counts = [
            rank.workspace[recv + r * local : recv + (r + 1) * local]
            for r in range(problem.num_ranks)
        ]
        totals = [sum(column) for column in zip(*self.counts, strict=True)]
        self.first_block = first_blocks(totals, s.block_m)
        if self.world.rules.bounded_lag:
            self.order = walk_order(self.first_block[-1], plan.ring_blocks, *self.order)
        if self.number == 0:
            for e, total in enumerate(totals):
                rank.workspace[plan.counter("expert_recv_count_sum") + e] = total
                rank.recv_stats[e] += total
        self.known = True

    def sync_ranks(self, name: str, *, send_counts: bool) -> Iterator[Wait | None]:
        """Barrier of all blocks of all ranks; of one rank, a grid barrier."""
        plan, rank, ranks = self.plan, self.rank, self.world.ranks
        space, local = rank.workspace, plan.problem.num_local_experts
        signal, sync = plan.counter(f"{name}_signal"), plan.counter(f"{name}_sync")
        want = space[signal + rank.rank] + 1
        yield None
        grid = plan.schedule.num_sms
        old = space[sync]
        now = space[sync] = (old + (2**31 - (grid - 1) if self.number == 0 else 1)) % 2**32
        if len(ranks) == 1:
            yield f"{name} grid", lambda: bool((space[sync] ^ old) >> 31)
            return
        if (now ^ old) >> 31:  # the last block of the grid
            for peer in ranks if send_counts else ():
                for e in range(local):
                    count = space[plan.counter("expert_send_count") + peer.rank * local + e]
                    to = plan.counter("expert_recv_count") + rank.rank * local + e
                    peer.workspace[to] = count
                yield None
            for peer in ranks:
                peer.workspace[signal + rank.rank] += 1
                yield None
        for peer in ranks:
            at = signal + peer.rank
            yield f"{name} of rank {peer.rank}", lambda at=at: space[at] - want >= 0  # type: ignore[misc]

    # ---- dispatch (dispatch.pull_rows)

    def dispatch(self, warp: int) -> Agent:
        plan, rank = self.plan, self.rank
        problem, s, ring = plan.problem, plan.schedule, plan.ring_blocks
        yield self.wait_known()
        totals = [sum(column) for column in zip(*self.counts, strict=True)]
        first_row = [0, *accumulate(totals)]
        chunks, lanes = plan.chunks_per_row, s.rows_in_flight
        expert = 0
        end = first_row[-1] * chunks
        first = self.number * s.row_slots + warp * lanes
        while first < end:
            pulled = []
            for item in range(first, min(first + lanes, end)):
                row, chunk = divmod(item, chunks)
                while first_row[expert + 1] <= row:
                    expert += 1
                within = row - first_row[expert]
                block = self.first_block[expert] + within // s.block_m
                last = within + 1 == totals[expert]
                arrivals = s.block_m - within % s.block_m if last else 1
                place, source = within, rank.rank
                while place >= self.counts[source][expert]:
                    place -= self.counts[source][expert]
                    source = (source + 1) % problem.num_ranks
                launch, route = rank.src_routes[expert][source][place]
                check(launch == rank.launch, "a route of another launch is read")
                peer = self.world.ranks[source]
                check(peer.launch == rank.launch, "a token of another launch is read")
                token, slot = divmod(route, problem.num_topk)
                if chunk == 0:
                    pool_row = self.first_block[expert] * s.block_m + within
                    rank.metadata[pool_row] = (
                        source << COUNTER_BITS | slot * plan.layout.capacity + token
                    )
                pulled.append((block, within % s.block_m, chunk, arrivals, source, token))
            for block, *_ in pulled:  # each lane for itself; then the warp goes on together
                if plan.ring_wraps and block >= ring and self.world.rules.pool_wait:
                    target = plan.l2_arrival_target
                    yield rank.equal("l2_arrival", block - ring, target, "pool ring: linear1")
            yield None
            for block, row, chunk, arrivals, source, token in pulled:
                if plan.ring_wraps and block >= ring:
                    wanted = s.linear1_tiles(problem) * self.k_blocks(Task(1, 0, 0))
                    check(
                        rank.reads[1, block - ring] == wanted,
                        f"rows of pool block {block - ring} are overwritten before they are read",
                    )
                at = plan.ring_row(block) + row
                check(at < plan.layout.ring_rows, f"row {at} lies behind the pool")
                pool_row = block * s.block_m + row
                check((pool_row, chunk) not in rank.pulled, f"pool row {pool_row} comes twice")
                rank.pulled.add((pool_row, chunk))
                rank.l1[at, chunk] = (rank.launch, pool_row, source, token)
                yield None
                rank.add("l1_arrival_count", block, arrivals, plan.l1_arrival_target)
            first += s.num_sms * s.row_slots

    # ---- load (linear1.load, linear2.load): K blocks into a ring of stages

    def load(self) -> Agent:
        plan, rank, rules = self.plan, self.rank, self.world.rules
        s, ring = plan.schedule, plan.ring_blocks
        yield self.wait_known()
        index = self.number
        while (task := self.task(index)) is not None:
            block = task.block
            if task.phase == 1:
                if rules.token_wait:
                    yield rank.equal("l1_arrival_count", block, plan.l1_arrival_target, "tokens")
                if plan.ring_wraps and block >= ring and rules.intermediate_wait:
                    target = plan.l2_done_target
                    yield rank.equal("l2_done", block - ring, target, "intermediate ring: linear2")
            elif rules.linear1_wait:
                yield rank.equal("l2_arrival", block, plan.l2_arrival_target, "linear1")
            for k in range(self.k_blocks(task)):
                step = len(self.loaded) - s.stages
                yield (
                    "a free stage",
                    lambda step=step: (  # type: ignore[misc]
                        step < 0 or self.released[step] == s.tile_warps // 4
                    ),
                )
                self.loaded.append(list(self._rows(task, k)))
                rank.reads[task.phase, block] += 1
            index += s.num_sms

    def _rows(self, task: Task, k: int) -> Iterator[tuple[int, ...]]:
        """(source rank, token) of a tile's valid rows in K block k, checked."""
        plan, rank = self.plan, self.rank
        first_pool, first = task.block * plan.schedule.block_m, plan.ring_row(task.block)
        for row in range(self.valid_rows(task.block)):
            if task.phase == 1:
                keys = [k % plan.groups1 * 128 // plan.row_chunk]
            else:
                keys = [2 * k, 2 * k + 1]
            memory = rank.l1 if task.phase == 1 else rank.l2
            for key in keys:
                launch, pool_row, source, token, *rest = memory.get((first + row, key), (-1,) * 4)
                check(
                    (launch, pool_row) == (rank.launch, first_pool + row),
                    f"linear{task.phase} of block {task.block} reads row {row} of pool row "
                    f"{pool_row}, launch {launch}",
                )
                check(rest in ([], [self._expert(task.block)]), "a row of another expert is read")
            yield source, token

    def _expert(self, block: int) -> int:
        """The global expert of a pool block."""
        local = self.plan.problem.num_local_experts
        return self.rank.rank * local + expert_of(self.first_block, block)

    # ---- math (program.math_role, pingpong.Turns), then combine

    def math(self, wg: int) -> Agent:
        plan, s = self.plan, self.plan.schedule
        pingpong, stride = s.pingpong, s.num_sms * (2 if s.pingpong else 1)
        yield self.wait_known()
        step, index = 0, self.number
        if pingpong and wg == 1:
            self.multiply_turn[0].arrive(1)
            self.finish_turn[0].arrive(1)
            if (other := self.task(index)) is not None:
                step += self.k_blocks(other)
            index += s.num_sms
        while (task := self.task(index)) is not None:
            if pingpong:
                yield from self.multiply_turn[wg].sync(wg)
            rows: list[tuple[int, ...]] = []
            for _ in range(self.k_blocks(task)):
                yield "a full stage", lambda step=step: len(self.loaded) > step  # type: ignore[misc]
                check(not rows or rows == self.loaded[step], "K blocks of different rows")
                rows = self.loaded[step]
                self.released[step] += 1
                step += 1
            if task.phase == 2 and plan.ring_wraps and (pingpong or wg == 0):
                self.rank.add("l2_done", task.block, 1, plan.l2_done_target)
            yield None
            if pingpong:
                self.multiply_turn[1 - wg].arrive(wg)
                yield from self.finish_turn[wg].sync(wg)
            yield from (
                self.finish(task, wg, rows) if task.phase == 1 else self.scatter(task, wg, rows)
            )
            if pingpong:
                self.finish_turn[1 - wg].arrive(wg)
                if (other := self.task(index + s.num_sms)) is not None:
                    step += self.k_blocks(other)
            index += stride
            if pingpong or wg == 0:
                self.rank.tiles[task] += 1
        if pingpong and (index < s.num_sms or self.task(index - s.num_sms) is not None):
            yield from self.multiply_turn[wg].sync(wg)
            yield from self.finish_turn[wg].sync(wg)
        yield from self.math_barrier.sync(wg)
        if wg == 0:
            yield from self.sync_ranks("combine", send_counts=False)
        yield from self.math_barrier.sync(wg)
        yield from self.combine(wg)

    def share(self, wg: int, block_n: int) -> tuple[tuple[int, ...], range]:
        """Halves of a tile's columns and rows of its block that a warpgroup computes."""
        s = self.plan.schedule
        if s.pingpong:
            return (0, 1), range(s.block_m)
        if block_n == 256:
            return (wg,), range(s.block_m)
        return (0, 1), range(64 * wg, 64 * wg + 64)

    def finish(self, task: Task, wg: int, sources: list[tuple[int, ...]]) -> Agent:
        plan, rank, ring = self.plan, self.rank, self.plan.ring_blocks
        s, block = plan.schedule, task.block
        halves, rows = self.share(wg, s.linear1_block_n)
        if len(halves) == 1:
            yield from self.amax.sync(wg)
        if plan.ring_wraps and block >= ring:
            wanted = s.linear2_tiles(plan.problem) * plan.groups2
            check(
                rank.reads[2, block - ring] == wanted,
                f"intermediate rows of block {block - ring} are overwritten before they are read",
            )
        for row in rows[: max(0, len(sources) - rows.start)]:
            for half in halves:
                rank.l2[plan.ring_row(block) + row, 2 * task.tile + half] = (
                    rank.launch,
                    block * s.block_m + row,
                    *sources[row],
                    self._expert(block),
                )
        yield None
        rank.add("l2_arrival", block, 1, plan.l2_arrival_target)

    def scatter(self, task: Task, wg: int, sources: list[tuple[int, ...]]) -> Agent:
        rank, s = self.rank, self.plan.schedule
        halves, rows = self.share(wg, s.linear2_block_n)
        if s.linear2_block_n == 128:
            halves = (0,)
        for row in rows[: max(0, len(sources) - rows.start)]:
            word = rank.metadata[task.block * s.block_m + row]
            peer = self.world.ranks[word >> COUNTER_BITS]
            check(peer.launch == rank.launch, "rows go to a rank that is in another launch")
            for half in halves:
                at = word & (1 << COUNTER_BITS) - 1, task.tile * s.linear2_block_n // 128 + half
                check(peer.combine_acts.get(at, (-1,))[0] < rank.launch, "a row comes back twice")
                peer.combine_acts[at] = (rank.launch, *sources[row], self._expert(task.block))
        yield None

    def combine(self, wg: int) -> Agent:
        """Tokens of this rank, an eighth of the grid a warp; then the counters."""
        plan, rank = self.plan, self.rank
        problem, sms = plan.problem, plan.schedule.num_sms
        yield None
        for token in range(self.number * 2 + wg, len(rank.topk_idx), sms * 2):
            for slot, expert in enumerate(rank.topk_idx[token]):
                if not 0 <= expert < problem.num_experts:
                    continue
                for column in range(problem.hidden // 128):
                    row = slot * plan.layout.capacity + token
                    found = rank.combine_acts.get((row, column))
                    wanted = (rank.launch, rank.rank, token, expert)
                    check(found == wanted, f"slot {slot} of token {token}: {found}, not {wanted}")
        yield None
        targets = {
            "l1_arrival_count": plan.l1_arrival_target,
            "l2_arrival": plan.l2_arrival_target,
            "l2_done": plan.l2_done_target if plan.ring_wraps else 0,
        }
        for block in range(self.number * 2 + wg, self.first_block[-1], sms * 2):
            for counter, target in targets.items():
                at = plan.counter(counter) + block
                check(rank.workspace[at] == target, f"{counter}[{block}] ends below {target}")
                rank.workspace[at] = 0
        for expert in range(self.number * 2 + wg, problem.num_experts, sms * 2):
            rank.workspace[plan.counter("expert_send_count") + expert] = 0


class World:
    """All ranks, launch after launch."""

    def __init__(
        self,
        plan: Plan,
        launches: list[list[list[list[int]]]],
        order: tuple[bool, int],
        rng: random.Random,
        style: str,
        rules: Rules = Rules(),
    ):
        """Args:
        plan: from `make_plan`.
        launches: topk_idx of each rank, launch by launch.
        order: (lag_order, order_step), the launch arguments.
        """
        self.plan, self.launches, self.rules = plan, launches, rules
        self.lag_order, self.order_step = order
        self.ranks = [Rank(plan, r) for r in range(plan.problem.num_ranks)]
        self.scheduler = Scheduler(rng, style)
        self.wrapped = 0

    def run(self) -> int:
        """Run all launches; returns how many of them reused rows on some rank."""
        for rank in self.ranks:
            self.scheduler.start(f"rank {rank.rank}", self._stream(rank))
        self.scheduler.run()
        return self.wrapped

    def _stream(self, rank: Rank) -> Agent:
        """Launches of a rank, one behind the other."""
        grid = self.plan.schedule.num_sms
        for topk_idx in (launch[rank.rank] for launch in self.launches):
            rank.begin(topk_idx)
            blocks = [Block(self, rank, number) for number in range(grid)]
            for block in blocks:
                for name, agent in block.agents():
                    self.scheduler.start(name, agent)
            yield "its launch", lambda blocks=blocks: all(b.done == b.roles for b in blocks)  # type: ignore[misc]
            self._check_launch(rank, blocks)

    def _check_launch(self, rank: Rank, blocks: list[Block]) -> None:
        plan = self.plan
        problem, s = plan.problem, plan.schedule
        number, local = blocks[0].first_block[-1], problem.num_local_experts
        self.wrapped += plan.ring_wraps and number > plan.ring_blocks
        totals = Counter(
            expert
            for topk_idx in self.launches[rank.launch]
            for token in topk_idx
            for expert in token
            if expert // local == rank.rank and 0 <= expert < problem.num_experts
        )
        wanted = [totals[rank.rank * local + e] for e in range(local)]
        check(blocks[0].first_block == first_blocks(wanted, s.block_m), "counts")
        check(len(rank.pulled) == sum(wanted) * plan.chunks_per_row, "not every row came")
        tiles = {
            Task(phase, block, tile): 1
            for phase, count in ((1, s.linear1_tiles(problem)), (2, s.linear2_tiles(problem)))
            for block in range(number)
            for tile in range(count)
        }
        check(rank.tiles == tiles, "a tile did not run exactly once")
        for name in ("expert_send_count", "l1_arrival_count", "l2_arrival", "l2_done"):
            begin = plan.counter(name)
            length = problem.num_experts if name[0] == "e" else plan.layout.max_pool_blocks
            check(not any(rank.workspace[begin : begin + length]), f"{name} is not cleared")
