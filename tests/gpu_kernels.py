"""The kernels of the sm90 tests, built on any machine.

`python tests/gpu_kernels.py [--jobs N]` compiles every kernel that the sm90 tests launch on one GPU
into tilelang's disk cache (TILELANG_CACHE_DIR); a GPU machine then loads them in 0.3 s each.
`--real N` compiles those of `torchrun --nproc_per_node=N -m pytest` instead.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from gpu_cases import (
    CLAMP_CASES,
    DEBUG_SCHEDULES,
    EXACT_MATH,
    EXPERTS,
    FLASH,
    FLASH_PHASE_SCHEDULES,
    FROZEN_TOKENS,
    HUGE,
    HUGE_CAPACITY,
    MANY_ROUTES,
    MANY_ROUTES_CAPACITY,
    MODES,
    NUM_SMS,
    ODD,
    ON_RANKS,
    ONE_RANK,
    PHASE_SCHEDULES,
    PRESET_CAPACITY,
    PRESETS_ON_RANKS_CAPACITY,
    RANK_PHASE_SCHEDULES,
    RANKS,
    RANKS_CAPACITY,
    RECIPE_SPLITS,
    SMALL,
    SMALL_CAPACITY,
    WRAPS,
    WRAPS_RECIPE,
    duplicates_on,
    edge_schedules,
    many_routes_schedules,
    over_ranks,
    phase_schedule,
    preset_schedules,
    presets_on_ranks,
    rank_schedules,
    real_ranks,
    reserved_schedules,
    schedules,
    small,
    trace_schedules,
    variants,
)
from gpu_hold import hold_kernel
from gpu_waits import wait_kernel
from test_sm90_quantize import specs as quantize_cases

from tl_megamoe.frozen import resolve
from tl_megamoe.kernel import KernelSpec, compile_kernel
from tl_megamoe.problem import Problem
from tl_megamoe.quantize import QuantizeSpec, compile_quantize
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule, default_schedule
from tl_megamoe.selection import schedule_intervals
from tl_megamoe.shared_experts import with_shared


def _spec(problem: Problem, schedule: Schedule, phase: str = "fused", **options: Any) -> KernelSpec:
    capacity = RANKS_CAPACITY if problem.num_ranks > 1 else SMALL_CAPACITY
    values = {"capacity": capacity, "phase": phase, **options}
    return KernelSpec(problem=problem, schedule=schedule, **values)


def _phases(
    problem: Problem, names: dict[str, Sequence[str]], **options: Any
) -> Iterable[KernelSpec]:
    for phase, chosen in names.items():
        for name in chosen:
            yield _spec(problem, phase_schedule(problem, name), phase, **options)


def small_specs() -> Iterable[KernelSpec]:
    """Kernels of `SMALL`."""
    every = variants(SMALL)
    yield from (_spec(SMALL, s) for s in every.values())
    yield from _phases(SMALL, PHASE_SCHEDULES)
    for name in DEBUG_SCHEDULES:
        yield _spec(SMALL, every[name], "linear1", debug=True)
    for recipe in ALL_RECIPES:
        for schedule in schedules(SMALL, RECIPE_SPLITS, recipe).values():
            yield _spec(SMALL, schedule, recipe=recipe)
    for name, fast_math in CLAMP_CASES:
        yield _spec(SMALL, every[name], clamp=True, fast_math=fast_math)
    for name in EXACT_MATH:
        yield _spec(SMALL, every[name], fast_math=False)
    yield from (_spec(SMALL, s) for s in reserved_schedules().values())
    for mode in MODES:
        for tokens in (1, SMALL_CAPACITY):
            yield _spec(SMALL, default_schedule(SMALL, tokens, mode))


def trace_specs() -> Iterable[KernelSpec]:
    """Profiling builds, and the kernels beside them."""
    for schedule in trace_schedules().values():
        for profile in (False, True):
            yield _spec(SMALL, schedule, profile=profile)


def preset_specs() -> Iterable[KernelSpec]:
    """Kernels of the published models' sizes."""
    for problem in ONE_RANK.values():
        for schedule in preset_schedules(problem).values():
            yield _spec(problem, schedule, capacity=PRESET_CAPACITY)
    yield from _phases(FLASH, FLASH_PHASE_SCHEDULES, capacity=PRESET_CAPACITY)
    for tokens in FROZEN_TOKENS:
        schedule = resolve(FLASH, "NVIDIA H200", PRESET_CAPACITY, tokens).schedule
        yield _spec(FLASH, schedule, capacity=PRESET_CAPACITY)


def edge_specs() -> Iterable[KernelSpec]:
    """Kernels of sizes at the edge of the rules."""
    for problem in (*EXPERTS.values(), *ODD.values()):
        yield from (_spec(problem, s) for s in edge_schedules(problem).values())
    for schedule in many_routes_schedules().values():
        yield _spec(MANY_ROUTES, schedule, capacity=MANY_ROUTES_CAPACITY)
    for schedule in schedules(HUGE, ("pingpong", "swapped", "wide128")).values():
        yield _spec(HUGE, schedule, capacity=HUGE_CAPACITY)


def rank_specs(problem: Problem) -> Iterable[KernelSpec]:
    """Kernels of a problem over ranks that every number of ranks launches."""
    yield from (_spec(problem, s) for s in rank_schedules(problem).values())


def many_rank_specs(problem: Problem, duplicates: Problem) -> Iterable[KernelSpec]:
    """Kernels over ranks that one number of ranks launches."""
    yield from _phases(problem, RANK_PHASE_SCHEDULES)
    for schedule in schedules(problem, ("pingpong", "swapped", "wide128"), WRAPS_RECIPE).values():
        yield _spec(problem, schedule, recipe=WRAPS_RECIPE)
    for schedule in schedules(duplicates, ("pingpong", "swapped", "wide128")).values():
        yield _spec(duplicates, schedule)


MODEL_CASES = (
    (SMALL, SMALL_CAPACITY, 0),
    (FLASH, PRESET_CAPACITY, 0),
    (SMALL, 128, 0),  # exported
    *((small("model", hidden=256, intermediate=128), capacity, 0) for capacity in (64, 1024)),
    *(
        (small("example", hidden=256, intermediate=128, num_experts=16, num_topk=4), 512, n)
        for n in (0, 1, 2)
    ),
    (small("readme", hidden=256, intermediate=128, num_experts=16, num_topk=4), 4096, 0),
    (small("shared", num_experts=7, num_topk=1), SMALL_CAPACITY, 1),
)


"""(routed layer, capacity, shared experts) of the tests that call it from model code or docs."""


def model_specs() -> Iterable[KernelSpec]:
    """Kernels that a module loads when it is made."""
    for problem, capacity, num_shared in MODEL_CASES:
        whole = with_shared(problem, num_shared)
        intervals = schedule_intervals(
            whole, "NVIDIA H200", capacity, rank_mode="one", recipe=Recipe()
        )
        for _, schedule in intervals:
            yield _spec(whole, schedule, capacity=capacity)
    on_ranks = small(num_ranks=4)  # docs/multi-gpu.md
    schedule = replace(default_schedule(on_ranks, 256), num_sms=NUM_SMS // 4)
    yield _spec(on_ranks, schedule, capacity=256)


def model_rank_cases(num_ranks: int) -> list[tuple[Problem, int]]:
    """(layer, capacity) of the modules over ranks with a GPU each, in docs and examples."""
    sizes = {"hidden": 256, "intermediate": 128, "num_topk": 4, "num_ranks": num_ranks}
    return [
        (small(num_ranks=num_ranks), SMALL_CAPACITY),
        *((small("example", num_experts=n, **sizes), 512) for n in (16, 8 * num_ranks)),
    ]


def model_rank_specs(num_ranks: int) -> Iterable[KernelSpec]:
    """Kernels that those modules load."""
    for problem, capacity in model_rank_cases(num_ranks):
        intervals = schedule_intervals(
            problem, "NVIDIA H200", capacity, rank_mode="real", recipe=Recipe()
        )
        for _, schedule in intervals:
            yield _spec(problem, schedule, capacity=capacity)


def quantize_specs() -> list[QuantizeSpec]:
    """Kernels that quantise activations, of the same layers."""
    cases: list[tuple[Problem, int, int]] = [
        (with_shared(problem, num_shared), capacity, num_shared)
        for problem, capacity, num_shared in MODEL_CASES
    ]
    if real_ranks():
        cases = [(*case, 0) for case in model_rank_cases(real_ranks())]
    return [QuantizeSpec.of(p, capacity, Recipe(), n) for p, capacity, n in cases]


def specs() -> list[KernelSpec]:
    """Every kernel that the sm90 tests of this session launch."""
    found: list[KernelSpec] = []
    if real_ranks():
        problem = ON_RANKS[real_ranks()]
        found += rank_specs(problem)
        found += many_rank_specs(problem, duplicates_on(real_ranks()))
        found += [*preset_rank_specs(real_ranks()), *model_rank_specs(real_ranks())]
    else:
        found += [*small_specs(), *edge_specs(), *preset_specs(), *model_specs(), *trace_specs()]
        for number in RANKS:
            found += rank_specs(ON_RANKS[number])
        found += many_rank_specs(WRAPS, duplicates_on(2))
    return list({spec.key(): spec for spec in found}.values())


def preset_rank_specs(num_ranks: int) -> Iterable[KernelSpec]:
    """Kernels of published sizes over ranks with a GPU each."""
    for problem in presets_on_ranks(num_ranks):
        for mode in MODES:
            schedule = default_schedule(problem, 64, mode)
            yield _spec(problem, schedule, capacity=PRESETS_ON_RANKS_CAPACITY)


def _build(spec: KernelSpec | QuantizeSpec) -> str:
    if isinstance(spec, QuantizeSpec):
        compile_quantize(spec)
        return f"quantize {spec.hidden} {spec.scale} shared {spec.num_shared}"
    name = f"{spec.problem.name} {spec.phase} {spec.recipe} {spec.schedule.name}"
    try:
        compile_kernel(spec)
    except Exception as error:  # TVM's errors cannot be pickled
        raise RuntimeError(f"{name}: {str(error)[-2000:]}") from None
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--real", type=int, metavar="N", help="of a torchrun job of N ranks")
    parser.add_argument("--list", action="store_true", help="print the kernels, compile nothing")
    args = parser.parse_args()
    if args.real:
        os.environ["WORLD_SIZE"] = str(args.real)
        ON_RANKS[args.real] = over_ranks(args.real)
    todo = specs()
    if args.list:
        for spec in todo:
            print(spec.problem.name, spec.phase, spec.recipe, spec.schedule.name)
        print(len(todo))
        return
    every = [*todo, *quantize_specs(), *([] if args.real else quantize_cases())]
    if not args.real:
        hold_kernel()
        wait_kernel()
    with ProcessPoolExecutor(args.jobs) as pool:
        for done, name in enumerate(pool.map(_build, every), 1):
            print(f"[{done}/{len(every)}] {name}", flush=True)


if __name__ == "__main__":
    main()
