"""Problems, schedules and kernels of the sm90 tests, built on any machine.

`python tests/gpu_cases.py [--jobs N]` compiles every kernel that the sm90 tests launch into
tilelang's disk cache (TILELANG_CACHE_DIR); a GPU machine then loads them in 0.3 s each.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from tl_megamoe.frozen import resolve
from tl_megamoe.kernel import PHASES, KernelSpec, compile_kernel
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.schedule import Schedule

PRESET_CAPACITY = 8192
SMALL_CAPACITY = 1024
TOKENS = (0, 1, 7, 63, 64, 65, 129, 512, 1024, 4096, 8192)
LOCAL_EXPERTS = (1, 3, 8, 31, 32, 33, 48)
FROZEN_TOKENS = (16, 512, 4096)
"""Where the op is tested with the frozen schedules of deepseek-v4-flash."""


def small(name: str = "small", **sizes: int) -> Problem:
    """A problem of a few K blocks on one rank."""
    values = {"hidden": 512, "intermediate": 256, "num_experts": 8, "num_topk": 2, **sizes}
    return Problem(name=name, num_ranks=1, **values)


SMALL = small()
EXPERTS = {n: small(f"experts{n}", num_experts=n, num_topk=min(n, 6)) for n in LOCAL_EXPERTS}
ODD = {
    p.name: p
    for p in (
        small("one-k-block", hidden=128, intermediate=128),
        small("hidden384", hidden=384, intermediate=384),
        small("topk1", num_topk=1),
        small("topk10", num_experts=12, num_topk=10, hidden=256),
        small("duplicates", num_experts=3, num_topk=6),
    )
}
"""Sizes at the edges of the rules; `duplicates` routes a token to one expert several times."""
MANY_ROUTES = small("many-routes", hidden=256, num_experts=4, num_topk=4)
MANY_ROUTES_CAPACITY = 2048
"""8192 routes: three rounds for the one block of `many_routes_schedule`."""
ONE_RANK = {name: problem.one_rank() for name, problem in PRESETS.items()}


def fit(problem: Problem, **fields: object) -> Schedule:
    """A schedule with these fields, the rest chosen so that it is valid for the problem."""
    k_blocks = min(problem.hidden, problem.intermediate) // 128
    base = Schedule(
        stages=max(2, min(4, k_blocks)),
        linear2_block_n=256 if problem.hidden % 256 == 0 else 128,
        experts_per_wave=problem.num_local_experts,
        prefetch=min(4, problem.hidden // 128),
    )
    return replace(base, **fields)  # type: ignore[arg-type]


VARIANTS: dict[str, dict[str, object]] = {
    "wide128": {},
    "wide64": {"block_m": 64},
    "rows": {"linear1_block_n": 128, "linear2_block_n": 128},
    "rows1": {"linear1_block_n": 128, "dispatch_warps": 3, "load_warps": 1},
    "classic": {"linear2_block_n": 128, "load_registers": 48, "math_registers": 224},
    "few_sms": {"num_sms": 7, "rows_in_flight": 5, "dispatch_warps": 1},
}
"""Compile-time choices: every value of every field, not every combination."""


def variants(problem: Problem) -> dict[str, Schedule]:
    """The variants that are valid for a problem."""
    schedules = {name: fit(problem, **fields) for name, fields in VARIANTS.items()}
    return {name: s for name, s in schedules.items() if not s.violations(problem)}


def many_routes_schedule() -> Schedule:
    """One block, so that routing takes several rounds of `Plan.route_batch`."""
    return fit(MANY_ROUTES, num_sms=1)


PHASE_VARIANTS = ("wide128", "wide64", "rows1")
"""Variants whose stand-alone phases are tested too."""


def edge_schedules(problem: Problem) -> dict[str, Schedule]:
    """One schedule of each split for a problem at the edge of the rules."""
    valid = variants(problem)
    return {name: valid[name] for name in ("wide64", "rows") if name in valid}


def preset_schedules(problem: Problem) -> dict[str, Schedule]:
    """Both block_m at full size, with the ring as deep as it goes."""
    return {
        "m128": fit(problem),
        "m64": fit(problem, block_m=64, stages=5, rows_in_flight=2),
    }


def specs() -> list[KernelSpec]:
    """Every kernel the sm90 tests launch."""
    out = []
    for name, schedule in variants(SMALL).items():
        for phase in PHASES if name in PHASE_VARIANTS else ("fused",):
            out.append(_spec(SMALL, schedule, phase))
    for problem in (*EXPERTS.values(), *ODD.values()):
        for schedule in edge_schedules(problem).values():
            out.append(_spec(problem, schedule))
    for problem in ONE_RANK.values():
        for schedule in preset_schedules(problem).values():
            out.append(KernelSpec(problem=problem, schedule=schedule, capacity=PRESET_CAPACITY))
    out.append(
        KernelSpec(
            problem=MANY_ROUTES,
            schedule=many_routes_schedule(),
            capacity=MANY_ROUTES_CAPACITY,
        )
    )
    flash = ONE_RANK["deepseek-v4-flash"]
    for phase in ("dispatch", "linear1", "linear2", "combine"):
        out.append(
            KernelSpec(problem=flash, schedule=fit(flash), capacity=PRESET_CAPACITY, phase=phase)
        )
    for tokens in FROZEN_TOKENS:
        schedule = resolve(flash, "NVIDIA H200", PRESET_CAPACITY, tokens).schedule
        out.append(KernelSpec(problem=flash, schedule=schedule, capacity=PRESET_CAPACITY))
    out.append(_spec(SMALL, variants(SMALL)["wide128"], clamp=True))
    out.append(_spec(SMALL, variants(SMALL)["rows"], clamp=True, fast_math=False))
    return list({spec.key(): spec for spec in out}.values())


def _spec(problem: Problem, schedule: Schedule, phase: str = "fused", **flags: bool) -> KernelSpec:
    return KernelSpec(
        problem=problem, schedule=schedule, capacity=SMALL_CAPACITY, phase=phase, **flags
    )


def _build(spec: KernelSpec) -> str:
    name = f"{spec.problem.name} {spec.phase} {spec.schedule.name}"
    try:
        compile_kernel(spec)
    except Exception as error:  # TVM's errors cannot be pickled
        raise RuntimeError(f"{name}: {str(error)[-2000:]}") from None
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    jobs = parser.parse_args().jobs
    todo = specs()
    with ProcessPoolExecutor(jobs) as pool:
        for done, name in enumerate(pool.map(_build, todo), 1):
            print(f"[{done}/{len(todo)}] {name}", flush=True)


if __name__ == "__main__":
    main()
