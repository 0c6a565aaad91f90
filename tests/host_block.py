"""A block of the host model: its roles, which follow program.py and phases/*.py.

host_tasks.py has what they hand each other, host_combine.py the end of a launch, host_model.py what
blocks share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from host_cluster import Cluster, Weights, load_weights, schedule, weights_of
from host_combine import combine, reset
from host_scheduler import Agent, NamedBarrier, Wait, check
from host_tasks import Lookahead, Report, Row, Tasks, Turns

from tl_megamoe.device.matmul import Share
from tl_megamoe.device.walk import Task, expert_of, first_blocks, task_at, walk_order
from tl_megamoe.schedule import COUNTER_BITS

if TYPE_CHECKING:
    from host_model import Rank, World


class Block:
    """One block of one rank's grid, in one launch."""

    def __init__(self, world: World, rank: Rank, number: int):
        plan = world.plan
        s = plan.schedule
        self.world, self.plan, self.rank, self.number = world, plan, rank, number
        self.known = False
        self.first_block: list[int] = []
        self.total: list[int] = []
        self.counts: list[list[int]] = []
        # Of few routes: (expert, route) of each received row.
        self.entries: list[tuple[int, int]] = []
        self.order = (world.lag_order, world.order_step)
        # A ring stage's rows and weights, by step: of which tile, and where its rows came from.
        self.rows_loaded: list[tuple[Task, list[Row]]] = []
        # Of weights, the stages that this block has begun to fill, and by stage both halves: of
        # what tile's weights, and which K block.
        self.weights_begun = 0
        self.halves: list[list[Weights]] = [[] for _ in range(s.stages)]
        self.side = number % s.cluster_size
        self.cluster: Cluster | None = None
        self.released: dict[int, int] = defaultdict(int)
        self.stored = [0, 0]
        self.multiply_turn = (NamedBarrier(2), NamedBarrier(2))
        self.finish_turn = (NamedBarrier(2), NamedBarrier(2))
        self.amax, self.math_barrier = NamedBarrier(2), NamedBarrier(2)
        # Row maxima, two buffers: of which tile each warpgroup has written its own.
        self.maxima: tuple[list[Task | None], ...] = ([None, None], [None, None])
        self.done = 0
        self.loads = {"load rows": (True, False), "load weights": (False, True)}
        if s.load_warps == 1:
            self.loads = {"load": (True, True)}
        slots = world.rules.task_slots or s.task_slots
        self.tasks = Tasks(slots, (*self.loads, "math 0", "math 1"))
        self.movers = s.dispatch_warps + s.load_warps
        self.roles = self.movers + 3 + (s.cluster_size == 2)
        self.meeting = NamedBarrier(self.movers + 2)

    def agents(self) -> Iterator[tuple[str, Agent]]:
        where = f"rank {self.rank.rank} block {self.number}"
        yield f"{where} start", self._role(self.start())
        for warp, (name, what) in enumerate(self.loads.items()):
            load = self.load(Lookahead(self, name, *what))
            yield f"{where} {name}", self._role(self.moves(load, warp))
        for warp in range(self.plan.schedule.dispatch_warps):
            dispatch = self.moves(self.dispatch(warp), len(self.loads) + warp)
            yield f"{where} dispatch {warp}", self._role(dispatch)
        for wg in (0, 1):
            yield f"{where} math {wg}", self._role(self.math(wg))
        if self.cluster is not None:
            yield f"{where} schedule", self._role(schedule(self))

    def _role(self, agent: Agent) -> Agent:
        yield from agent
        self.done += 1

    def moves(self, agent: Agent, warp: int) -> Agent:
        """A load or dispatch warp, which zeroes counters when all tiles are done."""
        yield from agent
        yield from self.meeting.sync(2 + warp)
        yield from reset(self, warp)

    def wait_known(self) -> Wait:
        return "counts", lambda: self.known

    def task(self, index: int) -> Task | None:
        s, problem = self.plan.schedule, self.plan.problem
        n1, n2 = s.linear1_tiles(problem), s.linear2_tiles(problem)
        return task_at(index, self.first_block, *self.order, n1, n2)

    def k_blocks(self, task: Task) -> int:
        """Ring stages that a tile takes."""
        passes, groups = self.loops(task)
        return passes * groups

    def loops(self, task: Task) -> tuple[int, int]:
        """Loops over a tile's K blocks, and how many those are."""
        if task.phase == 2:
            return 1, self.plan.groups2
        return 256 // self.plan.schedule.linear1_block_n, self.plan.groups1

    def rows_of(self, task: Task) -> int:
        """Rows that the tile's expert has from its pool block on."""
        expert = expert_of(self.first_block, task.block)
        rows: int = self.plan.valid_rows(self, task.block, expert)
        return rows

    def tile_rows(self, task: Task, valid: int) -> int:
        """Rows of A that the tile is loaded and multiplied with."""
        plan = self.plan
        taken = [n for n in plan.tile_rows(task.phase) if plan.takes(task.phase, n, valid)]
        check(len(taken) == 1, f"a block of {valid} rows is multiplied {len(taken)} times")
        check(min(valid, plan.schedule.block_m) <= taken[0], f"{taken[0]} of {valid} rows are read")
        return taken[0]

    # ---- routing and counts (dispatch.route, dispatch.learn_counts, tlmm_rank_sync)

    def start(self) -> Agent:
        plan, rank, most = self.plan, self.rank, self.world.rules.most_counted
        most = plan.few_routes if most is None else most
        if plan.counts_few and len(rank.topk_idx) * plan.problem.num_topk <= most:
            yield from self.count_few()
        else:
            yield from self.exchange_counts()
        self.total = [sum(column) for column in zip(*self.counts, strict=True)]
        self.first_block = first_blocks(self.total, plan.schedule.block_m)
        if self.world.rules.bounded_lag:
            sizes = self.first_block[-1], len(self.total), plan.ring_blocks
            self.order = walk_order(*sizes, *self.order)
        if self.number == 0:
            for e, total in enumerate(self.total):
                rank.workspace[plan.counter("expert_recv_count_sum") + e] = total
                rank.recv_stats[e] += total
        self.known = True

    def count_few(self) -> Iterator[Wait | None]:
        """Every block counts all routes of the one rank."""
        experts = [expert for token in self.rank.topk_idx for expert in token]
        num_experts = self.plan.problem.num_experts
        known = ((e, i) for i, e in enumerate(experts) if 0 <= e < num_experts)
        self.entries = sorted(known)
        if not self.world.rules.few_in_order:
            self.entries.sort(key=lambda entry: (entry[0], self.world.rng.random()))
        self.counts = [[experts.count(e) for e in range(num_experts)]]
        yield None

    def exchange_counts(self) -> Iterator[Wait | None]:
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
        if self.gathers:
            return
        first_row = [0, *accumulate(self.total)]
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
                if plan.ring_wraps and block >= ring and self.world.rules.pool_wait:
                    target = plan.l2_arrival_target
                    yield rank.equal("l2_arrival", block - ring, target, "pool ring: linear1")
                last = within + 1 == self.total[expert]
                arrivals = s.block_m - within % s.block_m if last else 1
                place, source = within, rank.rank
                while place >= self.counts[source][expert]:
                    place -= self.counts[source][expert]
                    source = (source + 1) % problem.num_ranks
                if self.entries:
                    found, route = self.entries[row]
                    check(found == expert, "an entry of another expert is read")
                else:
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

    def wait_for_rows(self, task: Task) -> Wait:
        plan, rank = self.plan, self.rank
        if task.phase == 1:
            return rank.equal("l1_arrival_count", task.block, plan.l1_arrival_target, "tokens")
        return rank.equal("l2_arrival", task.block, plan.l2_arrival_target, "linear1")

    def load(self, ahead: Lookahead) -> Agent:
        plan, rank, rules = self.plan, self.rank, self.world.rules
        s, ring = plan.schedule, plan.ring_blocks
        yield self.wait_known()
        yield from ahead.start()
        step = 0
        while (task := ahead.task) is not None:
            block, num_rows = task.block, self.tile_rows(task, ahead.rows)
            if ahead.loads_rows:
                if self.gathers and task.phase == 1:
                    pass  # from the tokens, which are there
                elif not ahead.ready and (
                    rules.token_wait if task.phase == 1 else rules.linear1_wait
                ):
                    yield from ahead.wait_for(self.wait_for_rows(task))
                if task.phase == 1 and plan.ring_wraps and block >= ring:
                    if rules.intermediate_wait:
                        target, label = plan.l2_done_target, "intermediate ring: linear2"
                        yield from ahead.wait_for(
                            rank.equal("l2_done", block - ring, target, label)
                        )
            passes, groups = self.loops(task)
            for part in range(passes):
                for k in range(groups):
                    yield "a free stage", lambda step=step - s.stages: self.is_free(step)  # type: ignore[misc]
                    if ahead.loads_rows:
                        self.rows_loaded.append((task, list(self._rows(task, k, num_rows))))
                        rank.reads[task.phase, block] += 1
                        rank.rows_read[task.phase, block] += num_rows
                    if ahead.loads_weights:
                        yield from load_weights(self, ahead, weights_of(self, task, part, k), step)
                    if part == 0:
                        yield from ahead.beside(k, groups)
                    step += 1
            yield from ahead.advance()
        if rules.report_at_end:
            yield from ahead.report()

    def is_free(self, step: int) -> bool:
        """Whether the stage of an earlier step has been read."""
        return step < 0 or self.released[step] == self.plan.schedule.tile_warps // 4

    def is_full(self, step: int) -> bool:
        weights = self.halves[step % len(self.halves)] if self.weights_begun > step else []
        return len(self.rows_loaded) > step and len(weights) == 2

    @property
    def gathers(self) -> bool:
        """Whether linear1 loads its rows from their tokens (phases/gather.py)."""
        return self.plan.gathers and bool(self.entries)

    def route_of(self, task: Task, row: int) -> int:
        """The route of a row of a tile, where rows are gathered."""
        expert = expert_of(self.first_block, task.block)
        within = (task.block - self.first_block[expert]) * self.plan.schedule.block_m + row
        found, route = self.entries[sum(self.total[:expert]) + within]
        check(found == expert, "an entry of another expert is read")
        return route

    def _rows(self, task: Task, k: int, num_rows: int) -> Iterator[Row]:
        """Valid rows among a tile's first `num_rows` in K block k, checked."""
        plan, rank = self.plan, self.rank
        if task.phase == 1 and self.gathers:
            for row in range(min(self.rows_of(task), num_rows)):
                yield rank.rank, self.route_of(task, row) // plan.problem.num_topk
            return
        first_pool, first = task.block * plan.schedule.block_m, plan.ring_row(task.block)
        for row in range(min(self.rows_of(task), num_rows)):
            if task.phase == 1:
                keys = [k * 128 // plan.row_chunk]
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

    # ---- math (program.math_role, linear1.py, linear2.py); its end is in host_combine.py

    def math(self, wg: int) -> Agent:
        rank = self.rank
        report, turns, turn = Report(self, wg), Turns(self, wg), 0
        yield self.wait_known()
        yield from turns.start()
        while (task := turns.task) is not None:
            yield from turns.begin(self.multiply_turn)
            rows = yield from self.multiply(task, turns, report)
            one = self.plan.schedule.pingpong or wg == 0
            if task.phase == 2 and self.plan.ring_wraps and one:
                rank.add("l2_done", task.block, 1, self.plan.l2_done_target)
            yield None
            turns.end(self.multiply_turn)
            units = self.units(task, wg, turns.rows)
            exchanges = self.exchanges(task, wg, turns.rows)
            yield from turns.next_early()
            yield from turns.begin(self.finish_turn)
            if task.phase == 1:
                if exchanges:
                    yield from self.exchange(task, wg, turn)
                    turn ^= self.world.rules.maxima_turns
                yield from self.finish(task, units, rows, report)
            else:
                yield from self.scatter(task, units, rows)
            turns.end(self.finish_turn)
            yield from turns.next()
            if one:
                rank.tiles[task] += 1
        if self.world.rules.pay_at_end:
            yield from report.pay()
        yield from turns.leave()
        yield from self.math_barrier.sync(wg)
        if wg == 0:
            yield from self.sync_ranks("combine", send_counts=False)
        yield from self.meeting.sync(wg)
        yield from combine(self, wg)

    def multiply(
        self, task: Task, turns: Turns, report: Report
    ) -> Generator[Wait | None, None, list[Row]]:
        """The K loops of a tile; returns its rows."""
        rows: list[Row] = []
        passes, groups = self.loops(task)
        yield from report.pay_if_empty(self.is_full(turns.step))
        for part in range(passes):
            for k in range(groups):
                yield "a full stage", lambda step=turns.step: self.is_full(step)  # type: ignore[misc]
                loaded, found = self.rows_loaded[turns.step]
                wanted = weights_of(self, task, part, k)
                halves = self.halves[turns.step % len(self.halves)]
                check(loaded == task and halves == [wanted] * 2, "operands of another tile")
                check((part, k) == (0, 0) or rows == found, "K blocks of different rows")
                rows = found
                if k == min(1, groups - 1):
                    yield from report.pay()
                self.released[turns.step] += 1
                turns.step += 1
        return rows

    def units(self, task: Task, wg: int, valid: int) -> list[tuple[int, range]]:
        """What a warpgroup multiplies of a tile: (half of the columns, rows of the block)."""
        num_rows = self.tile_rows(task, valid)
        if self.plan.schedule.swapped:
            return [(wg, range(num_rows))]
        share = Share.of(self.plan.schedule, task.phase, wg, num_rows)
        return [(share.half[q], range(share.a_row, share.a_row + 64)) for q in share.units]

    def exchanges(self, task: Task, wg: int, valid: int) -> bool:
        """Whether the warpgroups exchange row maxima of a tile."""
        if task.phase == 2 or self.plan.recipe.intermediate_group != 128:
            return False
        if self.plan.schedule.swapped:
            return True
        num_rows = self.tile_rows(task, valid)
        return Share.of(self.plan.schedule, 1, wg, num_rows).splits_columns

    def exchange(self, task: Task, wg: int, turn: int) -> Agent:
        """Row maxima of a tile whose columns the warpgroups share."""
        self.maxima[turn][wg] = task
        yield from self.amax.sync(wg)
        yield None
        check(self.maxima[turn][1 - wg] == task, "row maxima of another tile")

    def finish(
        self,
        task: Task,
        units: list[tuple[int, range]],
        sources: list[Row],
        report: Report,
    ) -> Agent:
        """Store the rows of `units`: (half of the columns, rows of the block)."""
        plan, rank, ring = self.plan, self.rank, self.plan.ring_blocks
        s, block = plan.schedule, task.block
        if plan.ring_wraps and block >= ring:
            wanted = s.linear2_tiles(plan.problem) * plan.groups2
            check(
                rank.reads[2, block - ring] == wanted,
                f"intermediate rows of block {block - ring} are overwritten before they are read",
            )
        stores = {
            (plan.ring_row(block) + row, 2 * task.tile + half): (
                rank.launch,
                block * s.block_m + row,
                *sources[row],
                self._expert(block),
            )
            for half, rows in units
            for row in rows
            if row < len(sources)
        }
        yield from report.owe(block, stores)

    def scatter(self, task: Task, units: list[tuple[int, range]], sources: list[Row]) -> Agent:
        rank, s = self.rank, self.plan.schedule
        expert, columns = self._expert(task.block), s.linear2_block_n // 128
        for half, rows in units:
            for row in rows[: max(0, len(sources) - rows.start)]:
                if self.gathers:
                    token, slot = divmod(self.route_of(task, row), self.plan.problem.num_topk)
                    word = slot * self.plan.layout.capacity + token
                else:
                    word = rank.metadata[task.block * s.block_m + row]
                peer = self.world.ranks[word >> COUNTER_BITS]
                check(peer.launch == rank.launch, "rows go to a rank that is in another launch")
                at = word & (1 << COUNTER_BITS) - 1, task.tile * columns + half
                check(peer.combine_acts.get(at, (-1,))[0] < rank.launch, "a row comes back twice")
                peer.combine_acts[at] = (rank.launch, *sources[row], expert)
        yield None
