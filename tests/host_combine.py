"""The end of a launch in the host model: the twin of phases/combine.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from host_scheduler import Agent, check

if TYPE_CHECKING:
    from host_block import Block


def combine(block: Block, wg: int) -> Agent:
    """Tokens of this rank, a share of the grid's a warpgroup."""
    plan, rank = block.plan, block.rank
    problem, sms = plan.problem, plan.schedule.num_sms
    yield None
    for token in range(block.number * 2 + wg, len(rank.topk_idx), sms * 2):
        for slot, expert in enumerate(rank.topk_idx[token]):
            if not 0 <= expert < problem.num_experts:
                continue
            for column in range(problem.hidden // 128):
                row = slot * plan.layout.capacity + token
                found = rank.combine_acts.get((row, column))
                wanted = (rank.launch, rank.rank, token, expert)
                check(found == wanted, f"slot {slot} of token {token}: {found}, not {wanted}")


def reset(block: Block, warp: int) -> Agent:
    """Zero the counters, while the math warpgroups combine."""
    plan, rank = block.plan, block.rank
    first, step = block.number * block.movers + warp, plan.schedule.num_sms * block.movers
    yield None
    targets = {
        "l1_arrival_count": 0 if block.gathers else plan.l1_arrival_target,
        "l2_arrival": plan.l2_arrival_target,
        "l2_done": plan.l2_done_target if plan.ring_wraps else 0,
    }
    for pool_block in range(first, block.first_block[-1], step):
        for counter, target in targets.items():
            at = plan.counter(counter) + pool_block
            check(rank.workspace[at] == target, f"{counter}[{pool_block}] ends below {target}")
            rank.workspace[at] = 0
    if first == 0:
        rank.workspace[plan.counter("next_task")] = 0
    for expert in range(first, plan.problem.num_experts, step):
        rank.workspace[plan.counter("expert_send_count") + expert] = 0
