"""`tl-megamoe bench`: the schedule of a problem beside other ways to run the layer, in one run.

One rank alone, or all ranks with a GPU each (`--rank-mode real`): a process a GPU as in a search,
and times that are the maximum over the ranks of the median of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_megamoe.frozen import device_key
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe

from . import doctor
from .args import (
    DEFAULT_RESULTS,
    add_problem,
    add_ranks,
    add_recipe,
    check_gpus,
    counts,
    current_commit,
    device_of,
    one_count,
    recipe_of,
    running_problem,
    seconds,
)

if TYPE_CHECKING:
    from .baselines import Baseline
    from .baselines.beside import BenchOptions, CellResult

HEADER = (
    "name",
    "version",
    "us (p10-p90)",
    "ratio",
    "TFLOP/s",
    "HBM GB/s",
    "NVLink GB/s",
    "/ floor",
)
LIST_HEADER = ("baseline", "here", "version", "tested")


def add_parser(add: Callable[..., Any]) -> None:
    """Declare the command."""
    parser = add("bench", run, "Time our schedule beside baselines, interleaved; append rows.")
    add_problem(parser)
    add_ranks(parser)
    add_recipe(parser, "recipe that the kernels run")
    parser.add_argument("--tokens", type=counts, help="tokens a rank contributes, as 16,512,8192")
    parser.add_argument(
        "--schedule",
        default="frozen",
        help="ours: frozen (the built-in default where nothing is), default, or a name that list "
        "--names prints (frozen)",
    )
    parser.add_argument(
        "--baseline", type=_names, metavar="NAME,...", help="beside ours (all that run here)"
    )
    parser.add_argument(
        "--list", action="store_true", help="say of each baseline whether it runs here, and end"
    )
    parser.add_argument(
        "--routing", default="uniform", help="uniform, zipf:<e>, skew, hot1, file:<path> (uniform)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and order (0)")
    parser.add_argument("--capacity", type=one_count, help="buffer tokens (largest of --tokens)")
    parser.add_argument("--device", help="whose frozen schedules (this machine's GPU)")
    parser.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    parser.add_argument("--commit", help="recorded with the rows (from git)")
    parser.add_argument("--jobs", type=one_count, help="compile processes (CPUs)")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=300.0,
        help="seconds that preparing or timing one of them may take (300)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--compile-only", action="store_true", help="fill the kernel cache, write no rows"
    )
    mode.add_argument(
        "--prebuilt", action="store_true", help="compile nothing of ours: kernels in the cache"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.list:
        from .baselines import BASELINES

        print(render([LIST_HEADER, *(list_line(baseline) for baseline in BASELINES)]))
        return 0
    from .baselines import BASELINES, named
    from .farm import Farm
    from .measure import GpuUnusable

    for name in args.baseline or ():
        named(name, BASELINES)  # a wrong name is said before a GPU that is not here
    options = options_of(args)
    farm = Farm(jobs=args.jobs, timeout_s=args.timeout, prebuilt=args.prebuilt)
    if args.compile_only:
        return _compile_only(options, args.baseline, farm)
    gpu = doctor.find_gpu()
    if gpu is None:
        raise ValueError("bench times on an SM90 GPU, and there is none here. --list says more")
    if options.rank_mode == "real":
        check_gpus(options.problem.num_ranks, "Bench fewer --ranks")
    baselines = chosen_baselines(options.problem, options.recipe, args.baseline)
    try:
        return _run_on_gpu(options, baselines, farm, gpu, args.timeout)
    except GpuUnusable as error:
        print(f"tl-megamoe: {error}", file=sys.stderr)
        return 1


def options_of(args: argparse.Namespace) -> BenchOptions:
    """What the flags ask for.

    Raises:
        ValueError: a flag that does not fit the others, or virtual ranks.
    """
    from .baselines.beside import BenchOptions, choose
    from .search_command import check_routing

    problem, mode = running_problem(args)
    if mode == "virtual":
        raise ValueError(
            "--rank-mode virtual: bench times one rank alone, or ranks with a GPU each: times of "
            "ranks that share a GPU say nothing about either. Add --rank-mode real, or leave "
            "--ranks and --rank-mode away"
        )
    if args.tokens is None:
        raise ValueError("bench needs --tokens, as --tokens 16,512,8192")
    most = max(args.tokens)
    capacity = args.capacity or most
    if capacity < most:
        raise ValueError(f"--capacity {capacity} is below the {most} of --tokens")
    check_routing(problem, args.routing, most)
    recipe = recipe_of(args)
    device = device_of(args) if args.schedule == "frozen" else ""
    return BenchOptions(
        problem=problem,
        schedules=choose(problem, device, args.tokens, args.schedule, recipe, mode),
        capacity=capacity,
        results=args.out,
        rank_mode=mode,
        recipe=recipe,
        routing=args.routing,
        seed=args.seed,
        commit=current_commit() if args.commit is None else args.commit,
    )


def chosen_baselines(
    problem: Problem,
    recipe: Recipe,
    names: Sequence[str] | None,
    every: Sequence[Baseline] | None = None,
) -> list[Baseline]:
    """The baselines of these names, or all that run this layer here.

    Args:
        problem: the layer.
        recipe: of the layer.
        names: asked for; None for all that can.
        every: those there are; `BASELINES` when None.

    Raises:
        ValueError: one that was asked for does not exist or does not run.
    """
    from .baselines import BASELINES, named

    every = BASELINES if every is None else every
    if names is None:
        return [b for b in every if (b.available() or b.refuses(problem, recipe)) is None]
    chosen = [named(name, every) for name in dict.fromkeys(names)]
    for baseline in chosen:
        reason = baseline.available() or baseline.refuses(problem, recipe)
        if reason is not None:
            raise ValueError(f"--baseline {baseline.name} does not run: {reason}")
    return chosen


def _compile_only(options: BenchOptions, names: Sequence[str] | None, farm: Any) -> int:
    from .baselines import BASELINES, named
    from .baselines.beside import build

    baselines = BASELINES if names is None else [named(name) for name in names]
    results = build(options, baselines, farm)
    statuses = [result.status for result in results.values()]
    print(", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses)))
    return 0 if set(statuses) == {"ok"} else 1


def _run_on_gpu(
    options: BenchOptions, baselines: Sequence[Baseline], farm: Any, gpu: str, timeout_s: float
) -> int:
    from .baselines.beside import run_beside
    from .baselines.serve import spawn_bench_worker
    from .measure import RemoteBench

    good = True

    def make_bench(config: Any, control: Any) -> RemoteBench:
        return RemoteBench(config, timeout_s=timeout_s, control=control, spawn=spawn_bench_worker)

    def on_cell(cell: CellResult) -> None:
        nonlocal good
        good = good and cell.ours.time is not None
        print(report(options, cell, device_key(gpu)), flush=True)

    for baseline in baselines:
        print(f"{baseline.name}: {baseline.what}", file=sys.stderr)
    path = run_beside(options, baselines, farm, make_bench, gpu, on_cell)
    print(f"{path}: rows appended", file=sys.stderr)
    return 0 if good else 1


# ---- what is printed


def list_line(baseline: Baseline) -> tuple[str, ...]:
    """A baseline's line of --list."""
    tested = f"tested on {baseline.tested}" if baseline.tested else "untested"
    return baseline.name, baseline.available() or "yes", baseline.version() or "-", tested


def report(options: BenchOptions, cell: CellResult, device: str) -> str:
    """The table of a cell, under a line that says what it is of."""
    from tl_megamoe.synthetic import routing_name

    from .baselines.beside import layer_rates

    problem, ours = options.problem, cell.ours.time
    real = options.rank_mode == "real"
    ranks = f", {problem.num_ranks} ranks with a GPU each" if real else ""
    lines: list[Sequence[str]] = [HEADER]
    notes = []
    for entrant in (cell.ours, *cell.baselines):
        name = "tl_megamoe" if entrant is cell.ours else entrant.name
        time = entrant.time
        if time is None:
            lines.append((name, entrant.version or "-", entrant.status, *["-"] * 5))
            notes.append(f"{name}: {entrant.status}: {entrant.reason}")
            continue
        rates = layer_rates(options, cell, time.median_us)
        ratio = "-" if ours is None else f"{ours.median_us / time.median_us:.3f}"
        lines.append(
            (
                name,
                entrant.version or "-",
                f"{time.median_us:.1f} ({time.p10_us:.1f}-{time.p90_us:.1f})",
                "1" if entrant is cell.ours else ratio,
                f"{rates['tflops']:.0f}",
                f"{rates['hbm_gbs']:.0f}",
                f"{rates['nvlink_gbs']:.0f}" if real else "-",  # one rank sends nothing
                f"{rates['ratio_to_floor']:.3f}",
            )
        )
    title = (
        f"{problem.name} on {device}, {cell.num_tokens} tokens{ranks}, "
        f"{routing_name(options.routing)}, recipe {options.recipe}, "
        f"{cell.schedule.name}; ratio: our time over theirs"
    )
    return "\n".join([title, render(lines), *notes, ""])


def render(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned, the first line a header."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("name at least one baseline; --list shows them")
    return names
