"""Random launches of many ranks for the host model (host_model.py): layers, schedules, routes."""

from __future__ import annotations

import random

from tl_megamoe.device.plan import Plan
from tl_megamoe.problem import Problem, divisors_of
from tl_megamoe.schedule import Schedule


def random_problem(rng: random.Random, ranks: int) -> Problem:
    return Problem(
        name="model",
        hidden=rng.choice((128, 256, 384, 512)),
        intermediate=rng.choice((128, 256, 384)),
        num_experts=ranks * rng.choice((1, 2, 3, 5)),
        num_topk=rng.choice((1, 2, 4)),
        num_ranks=ranks,
    )


def random_schedule(rng: random.Random, problem: Problem) -> Schedule:
    """A valid one: all math modes, both splits, both orders."""
    local = problem.num_local_experts
    while True:
        lag = rng.choice((0, 0, 1, 2, 3, 50))
        schedule = Schedule(
            math_mode=rng.choice(("cooperative", "pingpong")),
            block_m=rng.choice((64, 128)),
            linear1_block_n=rng.choice((128, 256)),
            linear2_block_n=rng.choice((128, 256)),
            stages=rng.choice((2, 3)),
            order="lag" if lag else "wave",
            lag=lag,
            experts_per_wave=local if lag else rng.choice(divisors_of(local)),
            dispatch_warps=rng.choice((1, 2)),
            load_warps=rng.choice((1, 2)),
            rows_in_flight=rng.choice((1, 1, 2, 5)),
            num_sms=rng.choice((1, 2, 3)),
        )
        if not schedule.violations(problem):
            return schedule


def random_routing(rng: random.Random, problem: Problem, capacity: int) -> list[list[list[int]]]:
    """topk_idx of every rank: uneven and zero tokens, masked routes, duplicates, hot experts."""
    experts, topk = range(problem.num_experts), problem.num_topk
    style = rng.choice(("uniform", "duplicates", "one expert", "one rank", "sparse"))
    hot = rng.randrange(problem.num_experts)
    masked = rng.choice((0.0, 0.0, 0.3))
    unused = (-1, problem.num_experts, 2**31, 2**40)
    out = []
    for _ in range(problem.num_ranks):
        tokens = rng.choice((0, 1, capacity, rng.randrange(capacity + 1)))
        topk_idx = []
        for _ in range(tokens):
            if style == "one expert":
                token = [hot] * topk
            elif style == "one rank":
                first = hot // problem.num_local_experts * problem.num_local_experts
                token = [first + rng.randrange(problem.num_local_experts) for _ in range(topk)]
            elif style == "uniform" and len(experts) >= topk:
                token = rng.sample(experts, topk)
            else:
                token = rng.choices(experts, k=topk)
            share = 0.9 if style == "sparse" else masked
            topk_idx.append([rng.choice(unused) if rng.random() < share else e for e in token])
        out.append(topk_idx)
    return out


def order_of(schedule: Schedule) -> tuple[bool, int]:
    """The launch arguments of the order (kernel.CompiledKernel.launch)."""
    lag_order = schedule.order == "lag"
    return lag_order, schedule.lag if lag_order else schedule.experts_per_wave


def small_ring(rng: random.Random, plan: Plan) -> int:
    """Ring blocks, from 2 up, that hold the blocks a dispatch warp has in flight at once."""
    lanes, local = plan.schedule.rows_in_flight, plan.problem.num_local_experts
    return max(rng.choice((2, 2, 3, 4, 6)), min(lanes - 1, local) + 1)
