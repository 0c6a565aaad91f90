"""How the roles of a block of the host model hand each other tiles and reports.

The twins of device/tasks.py, device/lookahead.py, device/pingpong.py and device/report.py.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from host_scheduler import Agent, NamedBarrier, Wait, check

from tl_megamoe.device.walk import Task

if TYPE_CHECKING:
    from host_block import Block

Tile = tuple[Task | None, int]
"""What an entry holds: a tile, None at the end, and the rows of its pool block."""
Row = tuple[int, ...]
"""What a row carries, source rank and token among it."""


class Tasks:
    """Tiles on their way from the load warps to the math warpgroups (device/tasks.py)."""

    def __init__(self, slots: int, readers: Iterable[str]):
        self.slots = slots
        self.entries: list[tuple[int, Tile]] = [(-1, (None, 0))] * slots
        self.phases = [0] * slots
        self.last_read = dict.fromkeys(readers, -1)

    def publish(self, number: int, tile: Tile) -> None:
        for reader, last in self.last_read.items():
            check(
                last >= number - self.slots,
                f"entry {number - self.slots} is overwritten before {reader} has read it",
            )
        self.entries[number % self.slots] = number, tile
        self.phases[number % self.slots] += 1

    def look(self, number: int) -> Generator[Wait | None, None, Tile]:
        """Wait for an entry, as a parity wait does."""
        slot, phase = number % self.slots, number // self.slots
        yield f"entry {number}", lambda: bool((self.phases[slot] ^ phase) & 1)
        found, tile = self.entries[slot]
        check(found == number, f"entry {number} is read and holds {found}")
        return tile

    def read(self, number: int, reader: str) -> Generator[Wait | None, None, Tile]:
        """Wait for an entry and be done with it."""
        tile = yield from self.look(number)
        self.last_read[reader] = number
        return tile


class Lookahead:
    """A load warp's place in the walk (device/lookahead.py)."""

    def __init__(self, block: Block, name: str, loads_rows: bool, publishes: bool):
        self.block, self.name = block, name
        self.loads_rows, self.loads_weights = loads_rows, publishes
        self.publishes = publishes and block.cluster is None
        self.shares = False
        self.place = 0
        self.index = block.number - block.plan.schedule.num_sms
        self.task: Task | None = None
        self.rows = 0
        self.ready = self.next_ready = False
        self.reports = loads_rows and not block.plan.schedule.pingpong
        self.owed: int | None = None
        self.reported = 0

    def start(self) -> Agent:
        self.publish()
        yield from self.ask()
        yield from self.advance()

    def advance(self) -> Agent:
        """Go on to the next tile, and claim the one behind it."""
        block = self.block
        if self.reports and self.task is not None and self.task.phase == 1:
            check(self.owed is None, "a report is forgotten")
            self.owed = self.task.block
        self.task, self.rows = yield from block.tasks.read(self.place, self.name)
        if self.loads_weights and block.cluster is not None:
            self.shares = block.cluster.shares[block.side][self.place]
            block.cluster.begun[block.side] += self.task is not None
        self.place += 1
        self.ready = self.next_ready
        if self.publishes and (self.task is not None or block.world.rules.claim_past_end):
            yield None
            self.index = block.rank.claim()

    def publish(self) -> None:
        """Find out the next tile and tell everyone: on the device one K block and a later one, and
        nothing in between depends on it."""
        if self.publishes:
            block = self.block
            task = block.task(self.index + block.plan.schedule.num_sms)
            block.tasks.publish(self.place, (task, block.rows_of(task) if task is not None else 0))

    def ask(self) -> Agent:
        """Find out whether the next tile's rows are there."""
        if self.loads_rows:
            task, _ = yield from self.block.tasks.look(self.place)
            if task is not None:
                yield None
                self.next_ready = self.block.wait_for_rows(task)[1]()

    def report(self) -> Agent:
        """Report the linear1 tile before this one, if that is still to be done."""
        if self.owed is None:
            return
        block, plan = self.block, self.block.plan
        self.reported += 1
        yield "stores of a tile", lambda: min(block.stored) >= self.reported
        yield None
        block.rank.add("l2_arrival", self.owed, plan.warpgroups_a_tile, plan.l2_arrival_target)
        self.owed = None

    def wait_for(self, wait: Wait) -> Agent:
        """Wait for other blocks, and meanwhile report the tile before this one."""
        block, (what, come) = self.block, wait
        if self.owed is not None and block.world.rules.report_first:
            stored = self.reported + 1
            yield f"{what}, or stores of a tile", lambda: come() or min(block.stored) >= stored
            if come():
                return
            yield from self.report()
        yield wait

    def beside(self, k: int, num_k: int) -> Agent:
        """What comes behind the loads of K block `k` of a tile."""
        if k == min(self.block.plan.schedule.stages + 1, num_k - 1):
            yield from self.report()
        if k == num_k // 2:
            self.publish()
        if k == num_k * 3 // 4:
            yield from self.ask()


class Turns:
    """A math warpgroup's place in the walk, and its turns in pingpong mode (device/pingpong.py)."""

    def __init__(self, block: Block, wg: int):
        self.block, self.wg = block, wg
        self.pingpong = block.plan.schedule.pingpong
        self.place = self.step = 0
        self.task: Task | None = None
        self.rows = 0
        self.at_end = self.other_at_end = False

    def read(self) -> Agent:
        if not self.at_end:
            self.task, self.rows = yield from self.block.tasks.read(self.place, f"math {self.wg}")
            self.place += 1
            self.at_end = self.task is None

    def pass_over(self) -> Agent:
        yield from self.read()
        self.other_at_end = self.at_end
        if self.task is not None:
            self.step += self.block.k_blocks(self.task)

    def start(self) -> Agent:
        if self.pingpong and self.wg == 1:
            self.block.multiply_turn[0].arrive(1)
            self.block.finish_turn[0].arrive(1)
            yield from self.pass_over()
        yield from self.read()

    def next_early(self) -> Agent:
        if not self.pingpong:
            yield from self.read()

    def next(self) -> Agent:
        if self.pingpong:
            yield from self.pass_over()
            yield from self.read()

    def begin(self, turn: tuple[NamedBarrier, NamedBarrier]) -> Agent:
        if self.pingpong:
            yield from turn[self.wg].sync(self.wg)

    def end(self, turn: tuple[NamedBarrier, NamedBarrier]) -> None:
        if self.pingpong:
            turn[1 - self.wg].arrive(self.wg)

    def leave(self) -> Agent:
        if self.pingpong and not self.other_at_end:
            yield from self.block.multiply_turn[self.wg].sync(self.wg)
            yield from self.block.finish_turn[self.wg].sync(self.wg)


class Report:
    """What the first thread of a math warpgroup owes (device/report.py).

    Its stores reach memory as late as they may: when it waits for them.
    """

    def __init__(self, block: Block, wg: int):
        self.block, self.wg = block, wg
        self.owed: int | None = None
        self.stores: dict[tuple[int, int], Row] = {}

    def owe(self, pool_block: int, stores: dict[tuple[int, int], Row]) -> Agent:
        check(self.owed is None, "staging is overwritten before its stores have left")
        self.owed, self.stores = pool_block, stores
        if self.block.plan.schedule.pingpong:
            yield from self.pay()

    def pay(self) -> Agent:
        if self.owed is None:
            return
        rank, target = self.block.rank, self.block.plan.l2_arrival_target
        waits = self.block.world.rules.stores_wait
        yield None
        if waits:
            rank.l2.update(self.stores)
            yield None
        if self.block.plan.schedule.pingpong:
            rank.add("l2_arrival", self.owed, 1, target)
        else:
            self.block.stored[self.wg] += 1
        yield None
        if not waits:
            rank.l2.update(self.stores)
        self.owed = None

    def pay_if_empty(self, full: bool) -> Agent:
        if self.block.world.rules.pay_if_empty and not full:
            yield from self.pay()
