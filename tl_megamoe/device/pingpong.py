"""Whose tile comes next: the math warpgroups' place in the walk, and their turns in pingpong mode.

cooperative   both warpgroups compute every tile of the block; nothing here is emitted but the step
pingpong      warpgroup 0 takes the tiles at even positions of the block's walk, 1 those at odd ones

In pingpong mode the tensor cores belong to one warpgroup at a time, and so does the epilogue: a
warpgroup multiplies its whole tile, hands the products on, finishes the tile while the other
multiplies, and waits for its next turn. Barriers `MULTIPLY + wg` and `FINISH + wg` are where `wg`
waits; the other one arrives there without waiting. Warpgroup 0 has the first turn.
"""

from __future__ import annotations

import tilelang.language as T

from . import barriers
from .plan import Plan
from .ring import Cursor
from .walk import LINEAR1_BIT


@T.meta_class
class Turns:
    """A math warpgroup's place in the walk; `cursor` passes over the other one's K blocks.

    Attributes:
        code: of the tile whose turn it is (`walk.task_expression`), negative past the end. Behind
            `next_early` that is the next one: who finishes a tile has copies.
        expert: its expert.
        rows: rows that its pool block holds.
    """

    def __init__(self, plan: Plan, shared, cursor, wg):
        self.plan = plan
        self.tasks = shared.tasks
        self.cursor = cursor
        self.wg = wg
        self.pingpong = plan.schedule.pingpong
        self.place = Cursor(plan.schedule.task_slots, 0)
        self.code = T.alloc_var("int32", init=0)
        self.expert = T.alloc_var("int32", init=0)
        self.rows = T.alloc_var("int32", init=0)
        if self.pingpong:
            # Of the tile before, the other warpgroup's; the first tile of all has none, as good as
            # one.
            self.other = T.alloc_var("int32", init=0)

    @T.inline
    def read(self):
        """The next tile, unless the last one has been read: then the code stays negative."""
        if self.code[0] >= 0:
            self.tasks.read(self.place, self.code, self.expert, self.rows)
            self.place.advance()

    @T.inline
    def pass_over(self):
        """Step over one tile of the other warpgroup."""
        self.read()
        self.other[0] = self.code[0]
        if self.other[0] >= LINEAR1_BIT:
            self.cursor.skip(self.plan.groups1)
        if (self.other[0] >> 30) == 0:
            self.cursor.skip(self.plan.groups2)

    @T.inline
    def start(self):
        if self.pingpong:
            if self.wg == 1:
                barriers.arrive(barriers.MULTIPLY, 256)
                barriers.arrive(barriers.FINISH, 256)
                self.pass_over()
        self.read()

    @T.inline
    def next_early(self):
        """The next tile, before this one is finished, where that does not wait: cooperative tiles
        are known since halfway through the loads of the one before."""
        if not self.pingpong:
            self.read()

    @T.inline
    def next(self):
        """The next tile, if it is not read yet."""
        if self.pingpong:
            self.pass_over()
            self.read()

    @T.inline
    def begin_multiply(self):
        if self.pingpong:
            barriers.sync(barriers.MULTIPLY + self.wg, 256)

    @T.inline
    def end_multiply(self):
        if self.pingpong:
            barriers.arrive(barriers.MULTIPLY + 1 - self.wg, 256)

    @T.inline
    def begin_finish(self):
        if self.pingpong:
            barriers.sync(barriers.FINISH + self.wg, 256)

    @T.inline
    def end_finish(self):
        if self.pingpong:
            barriers.arrive(barriers.FINISH + 1 - self.wg, 256)

    @T.inline
    def end(self):
        """Take the turn that is left over, so that no barrier stays half full: it belongs to the
        warpgroup behind the last tile of the block, to warpgroup 0 when there was none."""
        if self.pingpong:
            if self.other[0] >= 0:
                barriers.sync(barriers.MULTIPLY + self.wg, 256)
                barriers.sync(barriers.FINISH + self.wg, 256)
