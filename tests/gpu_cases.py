"""Problems and schedules of the sm90 tests; gpu_kernels.py builds their kernels."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tl_megamoe.layout import num_ring_rows
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

NUM_SMS = 132
RESERVE = 16
"""SMs that something else holds in tests of contention."""
PRESET_CAPACITY = 8192
SMALL_CAPACITY = 1024
TOKENS = (0, 1, 7, 63, 64, 65, 129, 512, 1024, 4096, 8192)
SMALL_TOKENS = (0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 260, 819, 1024)
"""For `SMALL`, whose routes are few up to 256 tokens (`Schedule.few_routes`)."""
FROZEN_TOKENS = (16, 512, 4096)
"""Where the op is tested with the frozen schedules of deepseek-v4-flash."""
MODES = ("pingpong", "swapped", "cooperative")


def real_ranks() -> int:
    """Ranks of the torchrun job that this process belongs to; 0 outside of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return size if size > 1 else 0


# ---- problems


def small(name: str = "small", **sizes: int) -> Problem:
    """A problem of a few K blocks, on one rank unless `num_ranks` says otherwise."""
    values = {"hidden": 512, "intermediate": 256, "num_experts": 8, "num_topk": 3, "num_ranks": 1}
    return Problem(name=name, **{**values, **sizes})


SMALL = small()
LOCAL_EXPERTS = (1, 3, 8, 31, 32, 33, 48)
MORE_LOCAL_EXPERTS = (5, 6, 7, 9, 36, 50, 96)
"""Numbers at which a divisor or a 32-lane scan may go wrong; a schedule each is enough. 12 and 24
are `topk10` and `topk8`."""
EXPERTS = {
    n: small(f"experts{n}", num_experts=n, num_topk=min(n, 6))
    for n in LOCAL_EXPERTS + MORE_LOCAL_EXPERTS
}
ODD = {
    p.name: p
    for p in (
        small("one-k-block", hidden=128, intermediate=128),
        small("hidden384", hidden=384, intermediate=384),
        small("odd-tiles", hidden=768, intermediate=384),
        small("topk1", num_topk=1),
        small("topk8", num_experts=24, num_topk=8, hidden=256),
        small("topk10", num_experts=12, num_topk=10),
        small("topk28", num_experts=30, num_topk=28),
        small("duplicates", num_experts=3, num_topk=6),
        small("wide-intermediate", hidden=256, intermediate=4224, num_experts=4, num_topk=2),
        small("experts500", hidden=256, intermediate=128, num_experts=500, num_topk=6),
    )
}
"""Sizes at the edges of the rules; `duplicates` routes a token to one expert several times."""
MANY_ROUTES = small("many-routes", hidden=256, num_experts=4, num_topk=4)
MANY_ROUTES_CAPACITY = 2048
"""8192 routes: three rounds for the one block of `many_routes_schedules`."""
HUGE = Problem(
    name="huge", hidden=7168, intermediate=3072, num_experts=100, num_topk=8, num_ranks=1
)
HUGE_CAPACITY = 53248
"""Pool and rows that come back have more than 3e9 elements, W1 more than 2**32."""
ONE_RANK = {name: problem.one_rank() for name, problem in PRESETS.items()}
FLASH = ONE_RANK["deepseek-v4-flash"]

RANKS = (2, 3, 4, 8)


def over_ranks(num_ranks: int) -> Problem:
    """A small problem over that many ranks; 24 experts where they divide."""
    experts = 24 if 24 % num_ranks == 0 else 3 * num_ranks
    return small(f"ranks{num_ranks}", num_experts=experts, num_topk=3, num_ranks=num_ranks)


ON_RANKS = {n: over_ranks(n) for n in (*RANKS, *filter(None, [real_ranks()]))}
RANKS_CAPACITY = 1024
"""With all routes on one of four ranks 12,288 rows share a ring of 2,176."""
WRAPS = ON_RANKS[4]
"""The ranks of tests that run on one number of virtual ranks."""
WRAPS_RECIPE = Recipe(scale="pow2", intermediate_group=64)


def duplicates_on(num_ranks: int) -> Problem:
    """An expert a rank and one route more: every token routes to one of them at least twice."""
    return small(
        f"duplicates{num_ranks}",
        num_experts=num_ranks,
        num_topk=num_ranks + 1,
        num_ranks=num_ranks,
    )


def rank_mode(problem: Problem) -> str:
    """How the ranks of a problem run in this session."""
    if problem.num_ranks == 1:
        return "one"
    return "real" if real_ranks() else "virtual"


def each_rank_count(counts: Iterable[int] = RANKS) -> list[Any]:
    """Parameters for `num_ranks`: virtual ranks of every number, or under torchrun its own."""
    if real_ranks():
        return [pytest.param(real_ranks(), marks=pytest.mark.multi_gpu(real_ranks()))]
    return list(counts)


# ---- schedules


def fit(problem: Problem, **fields: object) -> Schedule:
    """A schedule with these fields, the rest chosen so that it is valid for the problem."""
    k_blocks = min(problem.hidden, problem.intermediate) // 128
    share = problem.num_ranks if rank_mode(problem) == "virtual" else 1
    base = Schedule(
        stages=max(2, min(4, k_blocks)),
        linear2_block_n=256 if problem.hidden % 256 == 0 else 128,
        experts_per_wave=problem.num_local_experts,
        prefetch=min(4, problem.hidden // 128),
        num_sms=NUM_SMS // share,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


PINGPONG: dict[str, object] = {"math_mode": "pingpong", "block_m": 64}
SWAPPED: dict[str, object] = {"math_mode": "swapped", "block_m": 64}
CLUSTER: dict[str, object] = {"cluster_size": 2, "dispatch_warps": 1}
VARIANTS: dict[str, dict[str, object]] = {
    "wide128": {},
    "wide64": {"block_m": 64},
    "rows": {"linear1_block_n": 128, "linear2_block_n": 128},
    "rows1": {"linear1_block_n": 128, "dispatch_warps": 3, "load_warps": 1},
    "classic": {"linear2_block_n": 128, "load_registers": 48, "math_registers": 224},
    "few_sms": {"num_sms": 7, "rows_in_flight": 5, "dispatch_warps": 1},
    "pingpong": PINGPONG,
    "pingpong1": {**PINGPONG, "dispatch_warps": 3, "load_warps": 1},
    "pingpong_few": {**PINGPONG, "num_sms": 7, "rows_in_flight": 5, "dispatch_warps": 1},
    "swapped": SWAPPED,
    "swapped1": {**SWAPPED, "dispatch_warps": 3, "load_warps": 1},
    "cluster": CLUSTER,
    "cluster_few": {**CLUSTER, "num_sms": 6, "rows_in_flight": 5},
}
"""Compile-time choices: every value of every field, not every combination."""
SPLITS = ("pingpong", "swapped", "wide64", "wide128", "rows", "cluster")
"""Each math mode, split, block_m and cluster_size once."""
Schedules = dict[str, Schedule]


def schedules(problem: Problem, names: Iterable[str], recipe: Recipe | None = None) -> Schedules:
    """Those of the named variants that are valid for a problem."""
    named = {name: fit(problem, **VARIANTS[name]) for name in names}
    return {name: s for name, s in named.items() if not s.violations(problem, recipe)}


def of_mode(named: Schedules, mode: str) -> Schedules:
    """The schedules of one math mode."""
    return {name: s for name, s in named.items() if s.math_mode == mode}


def variants(problem: Problem) -> Schedules:
    """All variants that are valid for a problem."""
    return schedules(problem, VARIANTS)


def edge_schedules(problem: Problem) -> Schedules:
    """For a problem at the edge of the rules: one of each split, or one where it is about walks."""
    if problem in [EXPERTS[n] for n in MORE_LOCAL_EXPERTS]:
        turn = MORE_LOCAL_EXPERTS.index(problem.num_experts)
        return schedules(problem, [("pingpong", "wide64", "rows", "swapped")[turn % 4]])
    if problem.name == "experts500":  # more than threads
        return schedules(problem, ("wide64",))
    if problem.name == "odd-tiles":  # three of each linear a pool block: a cluster's last has none
        return schedules(problem, ("wide128", "cluster"))
    if problem.name in ("topk8", "wide-intermediate"):
        return schedules(problem, ("pingpong", "rows", "swapped", "cluster"))
    if problem in [EXPERTS[n] for n in (1, 8, 31, 48)]:
        return schedules(problem, ("wide64", "rows", "cluster"))
    return schedules(problem, ("wide64", "rows", "pingpong", "swapped"))


def edge_cases() -> list[Any]:
    """(problem, mode) of every edge problem that has schedules of the mode."""
    return [
        pytest.param(problem, mode, id=f"{problem.name}-{mode}")
        for problem in (*EXPERTS.values(), *ODD.values())
        for mode in MODES
        if of_mode(edge_schedules(problem), mode)
    ]


def preset_schedules(problem: Problem) -> Schedules:
    """Every block_m and mode at full size, with the ring as deep as it goes."""
    return {
        "m128": fit(problem),
        "m64": fit(problem, block_m=64, stages=5, rows_in_flight=2),
        "pingpong": fit(problem, **PINGPONG),
        "swapped": fit(problem, **SWAPPED),
        "cluster": fit(problem, **CLUSTER),
    }


def many_routes_schedules() -> Schedules:
    """One block, so that routing takes several rounds of `Plan.route_batch`."""
    return {
        "one_sm": fit(MANY_ROUTES, num_sms=1),
        "pingpong": fit(MANY_ROUTES, num_sms=1, **PINGPONG),
    }


def rank_schedules(problem: Problem) -> Schedules:
    """For a problem over ranks."""
    return schedules(problem, SPLITS)


RECIPE_SPLITS = ("pingpong", "swapped", "wide128", "rows")
PHASE_SCHEDULES = {
    "dispatch": ("m32", "wide64", "wide128"),
    "linear1": ("pingpong", "swapped", "wide64", "wide128", "rows1", "cluster"),
    "linear2": ("pingpong", "swapped", "wide64", "wide128", "rows1", "cluster"),
    "combine": ("wide128",),
}
"""Schedules whose stand-alone phases are tested; the debug view for DEBUG_SCHEDULES too."""
DEBUG_SCHEDULES = ("pingpong", "swapped", "wide128", "rows1")
RANK_PHASE_SCHEDULES = {
    "dispatch": ("m32", "wide64", "wide128"),
    "linear1": ("pingpong", "swapped", "wide128"),
    "linear2": ("pingpong", "swapped", "wide128"),
    "combine": ("wide128",),
}
FLASH_PHASE_SCHEDULES = {
    "dispatch": ("wide128",),
    "linear1": ("wide128", "pingpong", "swapped"),
    "linear2": ("wide128", "pingpong", "swapped"),
    "combine": ("wide128",),
}


def phase_schedule(problem: Problem, name: str) -> Schedule:
    """A schedule by its name in the tables above; `m32` is for dispatch alone."""
    return fit(problem, block_m=32) if name == "m32" else fit(problem, **VARIANTS[name])


# ---- kernels


CLAMP_CASES = (("wide128", True), ("rows", False), ("pingpong", True), ("swapped", False))
"""(schedule, fast_math) of the launches with a clamp."""


def reserved_schedules() -> Schedules:
    """For `SMALL`, with RESERVE SMs left to others; the first is that of docs/timeouts.md."""
    fewer = NUM_SMS - RESERVE
    return {
        "default": replace(default_schedule(SMALL, 16), num_sms=fewer),
        "wide128": fit(SMALL, num_sms=fewer),
    }


EXACT_MATH = ("pingpong", "swapped", "wide128")
"""Schedules that run without fast_math and clamp."""


TRACED = ("default", "wide128", "rows1", "pingpong1", "swapped", "few_sms", "lag", "cluster")
"""Schedules of `SMALL` whose profiling builds run."""


def trace_schedules() -> Schedules:
    """Those of TRACED."""
    every = variants(SMALL)
    lag = replace(every["pingpong_few"], order="lag", lag=2)
    return {"default": default_schedule(SMALL, 300), "lag": lag} | {
        name: every[name] for name in TRACED if name in every
    }


PRESETS_ON_RANKS_CAPACITY = 1024


def presets_on_ranks(num_ranks: int) -> list[Problem]:
    """All experts of a model over the ranks, and on each as many as one rank of eight has."""
    flash, pro = PRESETS["deepseek-v4-flash"], PRESETS["deepseek-v4-pro"]
    return [
        replace(flash, name="flash-all-experts", num_ranks=num_ranks),
        *(
            replace(
                preset,
                name=f"{name}-{preset.num_experts // 8}-local-experts",
                num_experts=preset.num_experts // 8 * num_ranks,
                num_ranks=num_ranks,
            )
            for name, preset in (("flash", flash), ("pro", pro))
        ),
    ]


def ring_blocks(problem: Problem, block_m: int) -> int:
    """Pool blocks that a rank of a problem over ranks has memory for."""
    return num_ring_rows(problem, RANKS_CAPACITY) // block_m
