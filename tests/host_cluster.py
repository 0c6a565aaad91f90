"""Two blocks of the host model that share weights: the twin of device/cluster.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from host_scheduler import Agent, check

from tl_megamoe.device.walk import Task, expert_of, pair_task, task_at

if TYPE_CHECKING:
    from host_block import Block
    from host_model import World
    from host_tasks import Lookahead

Weights = tuple[int, int, int, int, int]
"""Phase, expert, tile, and of a tile's K blocks which."""
CLAIM_SLOTS = 4


def weights_of(block: Block, task: Task, part: int, k: int) -> Weights:
    """What a tile multiplies in K block `k` of one of its loops."""
    return task.phase, expert_of(block.first_block, task.block), task.tile, part, k


class Cluster:
    """What the blocks of a cluster tell each other."""

    def __init__(self, world: World, *blocks: Block):
        self.blocks = blocks
        for block in blocks:
            block.cluster = self
        self.world = world
        self.claims: list[int] = []
        self.received = 0
        self.begun = [0, 0]
        self.met = [0, 0]
        # Of a block, by number of its tile.
        self.shares: tuple[list[bool], list[bool]] = ([], [])


def schedule(block: Block) -> Agent:
    """The warp that finds out one tile after the other."""
    cluster, plan, side = block.cluster, block.plan, block.side
    assert cluster is not None
    n1, n2 = plan.schedule.linear1_tiles(plan.problem), plan.schedule.linear2_tiles(plan.problem)
    yield block.wait_known()
    index, ahead, number = block.number - side, 0, 0
    while True:
        task, near = block.task(index + side), False
        if task is not None and not block.order[0]:
            other = task_at(index + 1 - side, block.first_block, *block.order, n1, n2)
            task, before, behind = pair_task(task, block.first_block, block.total, n1, n2)
            near = behind if side == 0 else before
            same = ahead % plan.schedule.stages == 0 or not cluster.world.rules.same_stage
            near = near and same
            if other is not None and other.phase != task.phase:
                ahead += block.k_blocks(task) - block.k_blocks(other)
        cluster.shares[side].append(near)
        cluster.world.shared_tiles += near
        block.tasks.publish(number, (task, block.rows_of(task) if task is not None else 0))
        number += 1
        if task is None:
            return
        yield "a tile begun", lambda number=number: cluster.begun[side] >= number  # type: ignore[misc]
        if side == 0:
            index = block.rank.claim() + plan.schedule.num_sms
            check(block.rank.claim() + plan.schedule.num_sms == index + 1, "claims of two")
            sent = len(cluster.claims)
            yield "a claim's slot", lambda sent=sent: cluster.received > sent - CLAIM_SLOTS  # type: ignore[misc]
            cluster.claims.append(index)
        else:
            yield "a claim", lambda number=number: len(cluster.claims) >= number  # type: ignore[misc]
            index = cluster.claims[number - 1]
            cluster.received += 1


def load_weights(block: Block, ahead: Lookahead, weights: Weights, step: int) -> Agent:
    """K block of a tile into the stage of a step, which is free: of a shared tile one half, into
    both blocks."""
    stage, cluster = step % len(block.halves), block.cluster
    block.halves[stage] = []
    block.weights_begun = step + 1
    if not ahead.shares:
        block.halves[stage] = [weights] * 2
        return
    assert cluster is not None
    cluster.met[block.side] += 1
    met = cluster.met[block.side]
    if cluster.world.rules.meet:
        yield "the other block", lambda: cluster.met[1 - block.side] >= met
    for each in cluster.blocks:
        check(len(each.halves[stage]) < 2, "a stage is filled that is not free")
        each.halves[stage].append(weights)
        yield None
