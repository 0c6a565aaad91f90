"""`tl-megamoe check`: every phase of a layer against the reference on the GPU at hand.

On one GPU the checks of a phase run in a child process of their own, each under a time limit: a
kernel that hangs or breaks the CUDA context costs its check and no other. Under torchrun every
process is a rank; a check that hangs there ends the job, since no rank can go on without the
others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tl_megamoe.frozen import MATH_MODES, RANK_MODES
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.layout import num_ring_rows
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule, default_schedule

from .args import seconds
from .checker import Case, CheckConfig, Row, run_in_children, run_in_place
from .doctor import find_gpu

PHASES = ("dispatch", "linear1", "linear2", "combine", "fused")
TOKENS = (0, 8, 48, 192)
DISPATCH_BLOCKS = (32, 64, 128)
NUM_SMS = 132
"""Multiprocessors to compile for where there is no GPU: those of an H100 or H200 (SXM)."""
HEADER = ("check", "schedule", "tokens", "block_m", "ranks", "max error", "bound", "status")


# ---- what is checked


def check_schedules(
    problem: Problem, num_sms: int, recipe: Recipe, math_mode: str | None = None
) -> dict[str, tuple[Schedule, ...]]:
    """The schedules that the checks of each phase run: every math mode, split and block_m.

    Args:
        problem: the layer as it runs.
        num_sms: multiprocessors of a rank.
        recipe: of the kernels.
        math_mode: only this one; all when None.

    Raises:
        ValueError: no schedule of the math mode is valid for the problem.
    """
    base = replace(default_schedule(problem, 1, "cooperative", recipe=recipe), num_sms=num_sms)
    wide = replace(base, linear1_block_n=256, linear2_block_n=256)
    linears = [
        replace(default_schedule(problem, 1, "pingpong", recipe=recipe), num_sms=num_sms),
        replace(default_schedule(problem, 1, "swapped", recipe=recipe), num_sms=num_sms),
        replace(wide, block_m=64),
        replace(wide, block_m=128),
        replace(wide, block_m=128, dispatch_warps=1, cluster_size=2).on_sms(num_sms),
        replace(base, block_m=128, linear1_block_n=128, linear2_block_n=128),
    ]
    valid = [
        s for s in linears if math_mode in (None, s.math_mode) and not s.violations(problem, recipe)
    ]
    if not valid:
        rules = [s for s in linears if s.math_mode == math_mode][-1].violations(problem, recipe)
        raise ValueError(
            f"--math-mode {math_mode}: no such schedule is valid for {problem.name}: "
            f"{'; '.join(rules)}"
        )
    # The math warps idle in dispatch: any tile will do that allows the block_m.
    dispatch: dict[int, Schedule] = {}
    for block_m in DISPATCH_BLOCKS:
        for tile in (wide, linears[-1]):
            schedule = replace(tile, block_m=block_m)
            if not schedule.violations(problem, recipe, "dispatch"):
                dispatch.setdefault(block_m, schedule)
    every = tuple(valid)
    return {
        "dispatch": tuple(dispatch.values()),
        "linear1": every,
        "linear2": every,
        "combine": every[:1],
        "fused": every,
    }


def plan_cases(
    phase: str,
    schedules: dict[str, tuple[Schedule, ...]],
    tokens: Sequence[int],
    num_ranks: int,
    ring_tokens: int = 0,
) -> dict[str, list[Case]]:
    """The cases of a run by phase, `interface` first.

    Args:
        phase: one of PHASES, or `all`.
        schedules: from `check_schedules`.
        tokens: token counts; every rank has that many. With more than one rank there is one more
            case, in which their counts differ and some have none.
        num_ranks: ranks that run.
        ring_tokens: from `tokens_round_the_ring`; with so many tokens a rank, all on one expert,
            the whole layer is checked once more. Not when 0.
    """
    from .checks import PHASE_CHECKS

    counts = [(n,) * num_ranks for n in tokens]
    if num_ranks > 1:
        most = max(tokens)
        counts.append(tuple((0, most, most // 3, 1)[r % 4] for r in range(num_ranks)))
    out = {"interface": [Case("interface", "interface", None, counts[0])]}
    for name in PHASES if phase == "all" else (phase,):
        out[name] = [
            Case(name, check, schedule, count)
            for count in counts  # outermost: cases of one count share their reference
            for check in PHASE_CHECKS[name]
            for schedule in schedules[name]
        ]
    if ring_tokens and "fused" in out:
        count = (ring_tokens,) * num_ranks
        out["fused"] += [
            Case("fused", check, schedule, count, "hot1")
            for check in PHASE_CHECKS["fused"]
            for schedule in schedules["fused"]
        ]
    return out


def tokens_round_the_ring(problem: Problem, capacity: int) -> int:
    """Tokens of every rank that need more rows than the ring has, with all routes on one expert.

    Returns:
        The capacity, or 0 where even that many fit (layout.py), as on one rank.
    """
    rows = problem.num_ranks * capacity * problem.num_topk
    return capacity if rows > num_ring_rows(problem, capacity) else 0


def check_capacity(problem: Problem, most: int) -> int:
    """The tokens of a buffer for checks with at most `most`, and for one that wraps the ring."""
    capacity = max(4 * most, 256)
    if problem.num_ranks > 1:  # the ring is less than half of a rank's own routes, and a constant
        while not tokens_round_the_ring(problem, capacity):
            capacity += 128
    return capacity


def specs_of(config: CheckConfig, cases: dict[str, list[Case]]) -> list[KernelSpec]:
    """Every kernel that the cases launch."""
    from .checks import ACCUMULATORS

    out = {}
    for case in (case for group in cases.values() for case in group):
        if case.schedule is not None:
            spec = KernelSpec(
                problem=config.problem,
                schedule=case.schedule,
                capacity=config.capacity,
                phase=case.phase,
                recipe=config.recipe,
                debug=case.check == ACCUMULATORS,
            )
            out[spec.key()] = spec
    return list(out.values())


# ---- command line


def add_parser(add: Callable[..., Any], add_problem: Callable[[Any], None]) -> None:
    """Register the verb.

    Args:
        add: makes a sub-parser from a name, a function and a text.
        add_problem: adds the arguments that name a problem.
    """
    parser = add("check", run_check, "Check each phase against the reference on this GPU.")
    add_problem(parser)
    parser.add_argument("--phase", choices=(*PHASES, "all"), default="all", help="(all)")
    parser.add_argument(
        "--ranks", type=_at_least(1), help="ranks that run (1; under torchrun, its processes)"
    )
    parser.add_argument(
        "--rank-mode",
        choices=RANK_MODES,
        help="virtual: all ranks on this GPU; real: a torchrun process a rank (by --ranks)",
    )
    parser.add_argument("--tokens", type=_counts, default=TOKENS, help="as 0,8,48,192")
    parser.add_argument(
        "--capacity",
        type=_at_least(1),
        help="buffer tokens (4x the most tokens, and on many ranks enough to wrap the ring)",
    )
    parser.add_argument(
        "--recipe",
        choices=[str(recipe) for recipe in ALL_RECIPES],
        default=str(Recipe()),
        help="recipe that the kernels run (exact-128)",
    )
    parser.add_argument("--math-mode", choices=MATH_MODES, help="only this one (all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, help="seconds a check may take (120)"
    )
    parser.add_argument("--jobs", type=_at_least(1), help="compile processes (CPUs)")
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the kernel cache, check nothing"
    )


def run_check(args: argparse.Namespace) -> int:
    """The verb; 0 when every check passed, 1 when one did not."""
    from tl_megamoe.handshake import disable_multicast
    from tl_megamoe.virtual import CONNECTIONS, MIN_CONNECTIONS

    os.environ.setdefault(CONNECTIONS, str(MIN_CONNECTIONS))  # before CUDA starts
    disable_multicast()
    config = _config(args)
    _take_gpu()
    gpu = None if args.compile_only else find_gpu()
    if gpu is None and not args.compile_only:
        raise ValueError(
            "no SM90 GPU here: check runs kernels. --compile-only fills the kernel cache for a "
            "machine that has one"
        )
    num_sms = _num_sms() // (config.problem.num_ranks if config.rank_mode == "virtual" else 1)
    schedules = check_schedules(config.problem, num_sms, config.recipe, args.math_mode)
    ring_tokens = tokens_round_the_ring(config.problem, config.capacity)
    ranks = config.problem.num_ranks
    cases = plan_cases(args.phase, schedules, args.tokens, ranks, ring_tokens)
    if args.compile_only:
        return 0 if _build(specs_of(config, cases), args.jobs) else 1
    if config.rank_mode == "real":
        return _run_rank(config, cases, args)
    if not _build(specs_of(config, cases), args.jobs):
        return 1
    rows: list[Row] = []
    try:
        for row in run_in_children(config, cases, args.timeout):
            _say(row)
            rows.append(row)
    finally:  # interrupted: what was checked is told
        print(render(rows))
    return 1 if failed(rows) else 0


def _run_rank(config: CheckConfig, cases: dict[str, list[Case]], args: argparse.Namespace) -> int:
    """The run as one process of a torchrun job; the process of rank 0 speaks."""
    import torch.distributed as dist

    from .ranks import exchange, join_job, leads_host, own_rank

    speaks = own_rank() == 0
    rows: list[Row] = []

    def give_up(row: Row) -> None:
        print(f"rank {own_rank()}: {row.cells[0]}: {row.reason}", file=sys.stderr, flush=True)
        if speaks:
            print(render([*rows, row]), flush=True)
        os._exit(1)  # the launcher ends the other ranks

    join_job()
    built = True
    if leads_host(own_rank()):
        built = _build(specs_of(config, cases), args.jobs)
    if not all(exchange(built)):
        return 1
    for row in run_in_place(config, cases, args.timeout, give_up=give_up):
        if speaks:
            _say(row)
        rows.append(row)
    if speaks:
        print(render(rows))
    if failed(rows):
        return 1
    dist.destroy_process_group()  # not after a failure, when the GPU may not answer any more
    return 0


def failed(rows: Sequence[Row]) -> list[Row]:
    """Rows that make the run fail; a check that does not apply does not."""
    return [row for row in rows if row.status not in ("ok", "skipped")]


def render(rows: Sequence[Row]) -> str:
    """The table, then the reasons of rows that are not ok, then how many there are of each."""
    cells = [HEADER, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    reasons = dict.fromkeys(
        f"{row.status}: {row.cells[0]} {row.cells[1]} {row.cells[2]} tokens: {row.reason}"
        for row in rows
        if row.status != "ok"
    )
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    return "\n".join([*lines, *reasons, summary])


def _config(args: argparse.Namespace) -> CheckConfig:
    """What to check, from the arguments.

    Raises:
        ValueError: arguments that contradict each other or the torchrun job.
    """
    from .args import running_problem
    from .ranks import world_size

    size = world_size()
    ranks = args.ranks or (size if size > 1 else None)
    mode = args.rank_mode
    if mode is None:
        mode = "one" if ranks in (None, 1) else "real" if size > 1 else "virtual"
    if mode == "real" and (ranks != size or size == 1):
        raise ValueError(
            f"--rank-mode real{f' with --ranks {ranks}' if ranks else ''}: a process a rank, and "
            f"this job has {size}. "
            f"Start it with: torchrun --nproc_per_node={ranks or 'N'} -m tl_megamoe.explorer check"
        )
    if mode != "real" and size > 1:
        raise ValueError(
            f"--rank-mode {mode} under torchrun: each of its {size} processes would run all of it. "
            "Start it without torchrun, or leave --ranks and --rank-mode away"
        )
    chosen = argparse.Namespace(**{**vars(args), "ranks": ranks, "rank_mode": mode})
    problem, mode = running_problem(chosen)
    most = max(args.tokens)
    capacity = args.capacity or check_capacity(problem, most)
    if capacity < most:
        raise ValueError(f"--capacity {capacity} is below the {most} of --tokens")
    return CheckConfig(
        problem=problem,
        rank_mode=mode,
        capacity=capacity,
        recipe=Recipe.parse(args.recipe),
        seed=args.seed,
    )


def _build(specs: Sequence[KernelSpec], jobs: int | None) -> bool:
    """Compile what is not compiled yet, in parallel; whether all of it did."""
    from .farm import BuildResult, Farm

    done = 0
    good = True

    def on_done(spec: KernelSpec, result: BuildResult) -> None:
        nonlocal done, good
        done += 1
        text = f"[{done}/{len(specs)}] kernel {spec.phase} {spec.schedule.name}: {result.status}"
        print(f"{text} {result.reason}".rstrip(), file=sys.stderr)
        good = good and result.report is not None

    Farm(jobs=jobs).run(specs, on_done)
    return good


def _num_sms() -> int:
    import torch

    if not torch.cuda.is_available():
        return NUM_SMS
    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)


def _take_gpu() -> None:
    """Under torchrun: this rank's GPU, before anything asks what the current one is."""
    import torch

    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _say(row: Row) -> None:
    check, schedule, tokens, block_m, *_, status = row.cells
    where = " ".join(part for part in (schedule, block_m and f"m{block_m}") if part)
    print(f"{check} {where}, {tokens} tokens: {status} {row.reason}".rstrip(), file=sys.stderr)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
        return int(text)

    return parse


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_at_least(0)(part) for part in text.split(",")}))
