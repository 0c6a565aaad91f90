"""Launches of all ranks on the host: what runs when, which memory is reused, what waits for what.

Every role of every block of every rank is a generator that follows the kernel's rules (phases/*.py,
device/*.py; see host_block.py) over the real layout, counters, walk and plan, and gives way between
any two of its accesses to what others see. A scheduler runs them in random order. Numbers are
replaced by where they come from: a row carries (launch, source rank, token), so that a row that is
overwritten too early, lost or doubled is seen by whoever reads it.

What it does not show: memory ordering, which the scheduler makes sequential.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from host_block import Block
from host_cluster import Cluster
from host_scheduler import Agent, Scheduler, Wait, check

from tl_megamoe.device.plan import Plan
from tl_megamoe.device.walk import Task, first_blocks
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule


@dataclass(frozen=True)
class Rules:
    """The kernel's rules; a test that breaks one shows that the model sees it.

    Attributes:
        bounded_lag: a launch that wraps the ring walks as `walk_order` says.
        pool_wait: dispatch waits for linear1 of the block that had its rows.
        intermediate_wait: linear1 waits for linear2 of the block that had its rows.
        token_wait, linear1_wait: a tile waits for its rows, for all linear1 tiles of its block.
        task_slots: entries of the ring of published tiles; the schedule's when None.
        claim_past_end: a warp that has found the end of the walk claims once more.
        pay_if_empty: a tile is counted at once where the next one's first stage is not full.
        pay_at_end: a tile is counted when a warpgroup leaves the walk.
        report_first: a load warp that waits for other blocks reports the tile before meanwhile.
        report_at_end: a load warp reports its last tile.
        stores_wait: a tile is counted, or reported, behind its stores.
        maxima_turns: row maxima go to the other of two buffers after every exchange.
        most_counted: routes that are few: with more, the blocks of one rank count them together.
            The schedule's threads when None.
        few_in_order: every block has few routes in the same order.
        same_stage: a cluster shares tiles only where both blocks' next stage is the same.
        meet: half of a shared tile's weights is sent when both blocks' stages are free.
    """

    bounded_lag: bool = True
    pool_wait: bool = True
    intermediate_wait: bool = True
    token_wait: bool = True
    linear1_wait: bool = True
    task_slots: int | None = None
    claim_past_end: bool = False
    pay_if_empty: bool = True
    pay_at_end: bool = True
    report_first: bool = True
    report_at_end: bool = True
    stores_wait: bool = True
    maxima_turns: bool = True
    most_counted: int | None = None
    few_in_order: bool = True
    same_stage: bool = True
    meet: bool = True


def make_plan(
    problem: Problem, schedule: Schedule, capacity: int, ring_blocks: int | None = None
) -> Plan:
    """The fused plan, its pools cut down to `ring_blocks` blocks unless None."""
    plan = Plan.make("fused", problem, schedule, Recipe(), capacity, False, True, False)
    if ring_blocks is None:
        return plan
    rows = min(ring_blocks * schedule.block_m, plan.layout.pool_rows)
    return replace(plan, layout=replace(plan.layout, ring_rows=rows))


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
        # K blocks read, and rows in them, by phase and pool block.
        self.reads: Counter[tuple[int, int]] = Counter()
        self.rows_read: Counter[tuple[int, int]] = Counter()
        self.pulled: set[tuple[int, int]] = set()  # (pool row, chunk)

    def begin(self, topk_idx: list[list[int]]) -> None:
        self.launch += 1
        self.topk_idx = topk_idx
        self.tiles.clear()
        self.reads.clear()
        self.rows_read.clear()
        self.pulled.clear()

    def add(self, counter: str, index: int, value: int, target: int) -> None:
        at = self.plan.counter(counter) + index
        self.workspace[at] += value
        check(self.workspace[at] <= target, f"{counter}[{index}] passes {target}")

    def claim(self) -> int:
        """The next number of `next_task`."""
        at = self.plan.counter("next_task")
        self.workspace[at] += 1
        return self.workspace[at] - 1

    def equal(self, counter: str, index: int, target: int, label: str) -> Wait:
        at = self.plan.counter(counter) + index
        return f"{label} of block {index}", lambda: self.workspace[at] == target


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
        self.rng = rng
        self.scheduler = Scheduler(rng, style)
        self.wrapped = 0
        self.half_blocks = 0
        self.shared_tiles = 0

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
            if self.plan.schedule.cluster_size == 2:
                for first in range(0, grid, 2):
                    Cluster(self, blocks[first], blocks[first + 1])
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
        pulled = 0 if blocks[0].gathers else sum(wanted) * plan.chunks_per_row
        check(len(rank.pulled) == pulled, "not every row came")
        tiles = {
            Task(phase, block, tile): 1
            for phase, count in ((1, s.linear1_tiles(problem)), (2, s.linear2_tiles(problem)))
            for block in range(number)
            for tile in range(count)
        }
        check(rank.tiles == tiles, "a tile did not run exactly once")
        self._check_rows_read(rank, blocks[0])
        for name in ("next_task", "expert_send_count", "l1_arrival_count", "l2_arrival", "l2_done"):
            begin = plan.counter(name)
            length = {"next_task": 1, "expert_send_count": problem.num_experts}.get(
                name, plan.layout.max_pool_blocks
            )
            check(not any(rank.workspace[begin : begin + length]), f"{name} is not cleared")

    def _check_rows_read(self, rank: Rank, block: Block) -> None:
        """Half the rows of the blocks that have no others, where block_n is 256; with swapped
        operands at most 15 more than there are."""
        problem, s = self.plan.problem, self.plan.schedule
        widths, tiles = (s.linear1_block_n, s.linear2_block_n), (s.linear1_tiles, s.linear2_tiles)
        for phase in (1, 2):
            for number in range(block.first_block[-1]):
                rows = min(block.rows_of(Task(phase, number, 0)), s.block_m)
                low = s.block_m == 128 and widths[phase - 1] == 256 and rows <= 64
                if s.swapped:
                    rows += -rows % 16
                else:
                    rows = 64 if low else s.block_m
                wanted = block.k_blocks(Task(phase, number, 0)) * rows
                found = rank.rows_read[phase, number]
                check(found == wanted * tiles[phase - 1](problem), f"{found} rows are read")
                self.half_blocks += low
