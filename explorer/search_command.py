"""`tl-megamoe search`: arguments, executor and cache of a search, and what it prints at the end."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_megamoe.frozen import device_key
from tl_megamoe.kernel import PHASES
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule

from . import doctor
from .args import (
    DEFAULT_RESULTS,
    add_problem,
    add_ranks,
    add_recipe,
    add_space,
    check_gpus,
    counts,
    current_commit,
    mix_of,
    non_negative,
    one_count,
    recipe_of,
    running_problem,
    seconds,
)
from .strategy import STRATEGIES, import_optuna

if TYPE_CHECKING:
    from .search import SearchOptions

EXECUTORS = ("local", "ray")


def add_parser(add: Callable[..., Any]) -> None:
    """Declare the command."""
    parser = add("search", run, "Compile, check, time and confirm candidates; append rows.")
    add_search_flags(parser)
    work = parser.add_argument_group("search", "which candidates are timed, and how often")
    work.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="halving",
        help="grid: each once; halving: then the best third again, and so on; optuna: what its "
        "sampler suggests, --limit of them (halving)",
    )
    work.add_argument(
        "--confirm",
        type=non_negative,
        default=4,
        help="best candidates of a cell that are confirmed; 0: none (4)",
    )
    work.add_argument("--seeds", type=one_count, default=3, help="routings of a confirmation (3)")
    work.add_argument(
        "--observations", type=one_count, default=5, help="rounds of each routing (5)"
    )
    work.add_argument(
        "--budget-seconds", type=seconds, help="time on the GPU; then the search stops (no limit)"
    )
    work.add_argument("--again", action="store_true", help="repeat finished rows")
    parser.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    parser.add_argument("--commit", help="recorded with the rows (from git)")
    parser.add_argument("--top", type=one_count, default=10, help="candidates shown (10)")
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="local",
        help="where kernels are compiled and timed: processes here, or a Ray cluster (local)",
    )
    parser.add_argument("--ray-address", help="of a running Ray cluster (starts one here)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--compile-only", action="store_true", help="fill the kernel cache, write no rows"
    )
    mode.add_argument(
        "--prebuilt", action="store_true", help="compile nothing: only kernels in the cache"
    )
    mode.add_argument(
        "--cache", type=Path, metavar="FILE.tar.xz", help="compile nothing: kernels of this file"
    )


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that decide which kernels a search needs; `build` has them too."""
    add_problem(parser)
    add_ranks(parser)
    add_space(parser)
    add_recipe(parser, "recipe that the kernels run")
    parser.add_argument(
        "--tokens", type=counts, required=True, help="tokens a rank contributes, as 16,512,8192"
    )
    parser.add_argument(
        "--routing",
        default="uniform",
        help="uniform, zipf:<exponent>, skew, hot1, file:<path>; several with weights of the "
        "ranking as uniform=0.7,zipf:1.2=0.3 (uniform)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and order (0)")
    parser.add_argument("--phase", choices=PHASES, default="fused", help="whole layer or one phase")
    parser.add_argument("--capacity", type=one_count, help="buffer tokens (largest of --tokens)")
    parser.add_argument("--jobs", type=one_count, help="compile processes (CPUs)")
    parser.add_argument(
        "--timeout", type=seconds, default=180.0, help="seconds a candidate may take (180)"
    )


def options_of(args: argparse.Namespace) -> SearchOptions:
    """What the flags of `add_search_flags`, and those of a search if there are any, ask for.

    Raises:
        ValueError: a flag that does not fit the others.
    """
    from tl_megamoe.synthetic import routing_name

    from .search import SearchOptions
    from .space import load_space

    problem, mode = running_problem(args)
    capacity = args.capacity or max(args.tokens)
    if capacity < max(args.tokens):
        raise ValueError(f"capacity={capacity} is below the {max(args.tokens)} of --tokens")
    mix = mix_of(args.routing)
    for routing in mix:
        check_routing(problem, routing, max(args.tokens))
    extra: dict[str, Any] = {}
    if hasattr(args, "strategy"):
        extra = {
            "strategy": args.strategy,
            "confirm_top": args.confirm,
            "num_seeds": args.seeds,
            "num_observations": args.observations,
            "budget_s": args.budget_seconds,
            "again": args.again,
            "commit": current_commit() if args.commit is None else args.commit,
            "results": args.out,
        }
    return SearchOptions(
        **{
            "problem": problem,
            "tokens": args.tokens,
            "space": load_space(args.space),
            "results": DEFAULT_RESULTS,
            "capacity": capacity,
            "rank_mode": mode,
            "recipe": recipe_of(args),
            "phase": args.phase,
            "routings": {routing_name(routing): routing for routing in mix},
            "mix": {routing_name(routing): weight for routing, weight in mix.items()},
            "seed": args.seed,
            "limit": args.limit,
            **extra,
        }
    )


def check_routing(problem: Problem, routing: str, num_tokens: int) -> None:
    """Fail on a bad routing now and not after minutes of compiling.

    Args:
        problem: the layer as it runs.
        routing: as for `random_inputs`.
        num_tokens: of a rank.
    """
    from tl_megamoe.synthetic import load_routing, random_inputs

    if routing.startswith("file:"):
        whole = replace(problem, num_ranks=1)  # a file holds the tokens of all ranks that run
        load_routing(routing, whole, num_tokens * problem.num_ranks)
    else:
        random_inputs(problem, 1, routing)


def run(args: argparse.Namespace) -> int:
    """The command."""
    from .bundle import use_cache

    if args.cache is not None:
        manifest = use_cache(args.cache)
        print(f"{args.cache}: {manifest.num_kernels} kernels", file=sys.stderr)
        args.prebuilt = True
    if args.compile_only and args.executor != "local":
        raise ValueError("--compile-only compiles on this machine: leave --executor ray away")
    if args.compile_only and args.strategy == "optuna":
        raise ValueError(
            "--compile-only with --strategy optuna: what it will propose is not known beforehand. "
            "Compile the whole space with --strategy grid"
        )
    if args.strategy == "optuna":
        import_optuna()
    options = options_of(args)
    if options.rank_mode == "real" and not args.compile_only:
        check_gpus(options.problem.num_ranks, "Search with --rank-mode virtual or fewer --ranks")
    if args.confirm and min(args.seeds, args.observations) < 3:
        print(
            f"{args.seeds} seeds x {args.observations} observations: freeze asks for 3 x 3",
            file=sys.stderr,
        )
    if not args.compile_only:
        _check_writable(args.out)
    _say_rejections(options)
    if args.compile_only:
        return _compile(options, args)
    return _search(options, args)


def _compile(options: SearchOptions, args: argparse.Namespace) -> int:
    from .farm import Farm
    from .search import build_cells, plan_cells

    gpu = doctor.find_gpu()
    cells = plan_cells(options, gpu and device_key(gpu))
    counted = build_cells(options, cells, Farm(jobs=args.jobs, timeout_s=args.timeout))
    print(", ".join(f"{count} {status}" for status, count in counted.items()))
    return 0


def _search(options: SearchOptions, args: argparse.Namespace) -> int:
    from .cluster import make_executor
    from .measure import GpuUnusable, RemoteBench
    from .report import render, select
    from .search import MODEL_DEVICE, run_search
    from .table import read_table

    executor = make_executor(
        args.executor,
        jobs=args.jobs,
        timeout_s=args.timeout,
        prebuilt=args.prebuilt,
        rank_mode=options.rank_mode,
        address=args.ray_address,
    )
    with executor:
        gpu = executor.gpu_name()
        if gpu is None and options.strategy == "optuna":
            raise ValueError(
                "--strategy optuna proposes from measured times, and there is no SM90 GPU here"
            )
        if gpu is None:
            print(
                "no SM90 GPU here: candidates are compiled for sm_90a and ranked by the cost "
                "model; rows say source=model and cannot be frozen",
                file=sys.stderr,
            )

        def bench(config: Any, control: Schedule) -> RemoteBench:
            return RemoteBench(
                config, timeout_s=args.timeout, control=control, spawn=executor.spawn
            )

        try:
            done = run_search(
                options,
                executor.farm,
                None if gpu is None else bench,
                gpu,
                num_gpus=executor.num_gpus,
            )
        except GpuUnusable as error:
            print(f"tl-megamoe: {error}", file=sys.stderr)
            return 1
    statuses = ", ".join(f"{n} {status}" for status, n in done.statuses.items()) or "none"
    print(
        f"{done.path}: {done.written} rows written ({statuses}), {done.skipped} candidates were "
        "there",
        file=sys.stderr,
    )
    device = MODEL_DEVICE if gpu is None else device_key(gpu)
    rows = select(
        read_table(done.path, device=device),
        (options.problem, options.rank_mode),
        args.tokens,
        device=device,
        phase=args.phase,
        recipe=args.recipe,
    )
    print(render(rows, args.top))
    return 0


def _check_writable(out: Path) -> None:
    """Fail on a bad results folder now and not after minutes of compiling."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} must be a folder that can be written: {error}") from error


def _say_rejections(options: SearchOptions) -> None:
    """What the rules removed from the space; a space that loses points may surprise."""
    from .space import enumerate_candidates

    tokens = options.tokens[0]  # the rules do not depend on it
    found = enumerate_candidates(
        options.problem, tokens, options.space, options.recipe, gpu_ranks=options.gpu_ranks
    )
    if found.num_rejected:
        rules = ", ".join(f"{rule} {count}" for rule, count in found.rejections.items())
        print(
            f"{found.num_rejected} of {found.num_points} points of the space break a rule "
            f"({rules}); tl-megamoe list --explain says more",
            file=sys.stderr,
        )
