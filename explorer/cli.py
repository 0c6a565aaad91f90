"""The `tl-megamoe` command. Data goes to stdout, progress and messages to stderr."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tl_megamoe
from tl_megamoe.frozen import RANK_MODES, device_key, schedules_root
from tl_megamoe.kernel import PHASES
from tl_megamoe.layout import MAX_RANKS
from tl_megamoe.problem import PRESETS, Problem, load_problem
from tl_megamoe.recipe import ALL_RECIPES, Recipe
from tl_megamoe.schedule import Schedule

from . import check
from .doctor import diagnose, find_gpu

SIZES = ("hidden", "intermediate", "num_experts", "num_topk", "num_ranks")
DEFAULT_RESULTS = Path("results")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except KeyboardInterrupt:
        print(
            "interrupted; written rows and compiled kernels are kept, the same command resumes",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (ValueError, OSError) as error:
        print(f"tl-megamoe: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tl-megamoe", description="Search, record and freeze schedules of the fused MoE layer."
    )
    parser.add_argument("--version", action="version", version=tl_megamoe.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=run)
        return sub

    doctor = add("doctor", run_doctor, "Say what this machine can do.")
    doctor.add_argument("--schedules", type=Path, help="folder of the frozen files")

    listing = add("list", run_list, "List the candidates, and how many each rule rejects.")
    _add_problem(listing)
    _add_ranks(listing)
    _add_space(listing)
    _add_recipe(listing, "recipe that the kernels run")
    listing.add_argument("--tokens", type=_one_count, default=512, help="token count (512)")
    listing.add_argument("--names", action="store_true", help="print names only")

    search = add("search", run_search, "Compile, check and time candidates; append rows.")
    _add_problem(search)
    _add_ranks(search)
    _add_space(search)
    _add_recipe(search, "recipe that the kernels run")
    search.add_argument(
        "--tokens", type=_counts, required=True, help="tokens a rank contributes, as 16,512,8192"
    )
    search.add_argument("--routing", default="uniform", help="uniform, zipf:<exponent>, skew, hot1")
    search.add_argument("--seed", type=int, default=0, help="of weights, inputs and order")
    search.add_argument("--phase", choices=PHASES, default="fused", help="whole layer or one phase")
    search.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    search.add_argument("--capacity", type=_one_count, help="buffer tokens (largest of --tokens)")
    search.add_argument("--jobs", type=_one_count, help="compile processes (CPUs)")
    search.add_argument(
        "--timeout", type=check.seconds, default=180.0, help="seconds a candidate may take (180)"
    )
    search.add_argument("--again", action="store_true", help="repeat finished rows")
    search.add_argument("--commit", help="recorded with the rows (from git)")
    search.add_argument("--top", type=_one_count, default=10, help="candidates shown (10)")
    mode = search.add_mutually_exclusive_group()
    mode.add_argument(
        "--compile-only", action="store_true", help="fill the kernel cache, write no rows"
    )
    mode.add_argument(
        "--prebuilt", action="store_true", help="compile nothing: only kernels in the cache"
    )

    report = add("report", run_report, "Print ranked tables.")
    _add_problem(report)
    _add_ranks(report)
    _add_recipe(report, "only rows of this recipe", default=None)
    report.add_argument("--tokens", type=_counts, help="only these counts")
    report.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    report.add_argument("--device", help="as nvidia-h200 (all with rows)")
    report.add_argument("--top", type=_one_count, default=10, help="candidates of a cell (10)")
    report.add_argument("--csv", action="store_true", help="print the rows as CSV")

    freeze = add("freeze", run_freeze, "Freeze the best measured candidates for the op.")
    _add_problem(freeze)
    _add_ranks(freeze)
    _add_recipe(freeze, "rows of this recipe; the entries serve all")
    freeze.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    freeze.add_argument("--device", help="as nvidia-h200 (this machine's GPU)")
    freeze.add_argument("--routing", default="uniform", help="rows of this routing")
    freeze.add_argument("--schedules", type=Path, help="folder of the frozen files")

    check.add_parser(add, _add_problem)

    why = add("why", run_why, "Say which schedule the op runs, and where it came from.")
    _add_problem(why)
    _add_ranks(why)
    _add_recipe(why, "recipe of the buffer")
    why.add_argument("--tokens", type=_one_count, required=True)
    why.add_argument("--capacity", type=_one_count, help="buffer tokens (those of --tokens)")
    why.add_argument("--device", help="as nvidia-h200 (this machine's GPU)")
    why.add_argument("--schedules", type=Path, help="folder of the frozen files")
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problem", "a preset, a TOML file, or sizes")
    group.add_argument("--problem", help=f"{', '.join(PRESETS)}, or a .toml file")
    for name in SIZES:
        group.add_argument(f"--{name.replace('_', '-')}", type=_one_count)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks", "how the layer runs; one rank of --num-ranks if not")
    group.add_argument(
        "--ranks", type=_one_count, help="ranks that run; sets --num-ranks unless the mode is one"
    )
    group.add_argument(
        "--rank-mode",
        choices=RANK_MODES,
        default="one",
        help="one: a rank alone, which gets all routes; virtual: all ranks share this GPU; real: a "
        "GPU a rank (one)",
    )


def _add_recipe(
    parser: argparse.ArgumentParser, text: str, default: str | None = str(Recipe())
) -> None:
    parser.add_argument(
        "--recipe",
        choices=[str(recipe) for recipe in ALL_RECIPES],
        default=default,
        help=f"{text} ({default or 'all'})",
    )


def _add_space(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--space", default="screen", help="screen, full, demo, or a .toml file (screen)"
    )
    parser.add_argument(
        "--limit",
        type=_one_count,
        help="best candidates by the model; default, classic and frozen always stay (all)",
    )


def _one_count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_one_count(part) for part in text.split(",")}))


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem as one of its ranks runs it, alone.

    Raises:
        ValueError: neither a problem nor all its sizes.
    """
    return whole_problem(args).one_rank()


def running_problem(args: argparse.Namespace) -> tuple[Problem, str]:
    """The problem as it runs, and the rank mode.

    Raises:
        ValueError: as `problem_of`, or --ranks does not agree with --rank-mode or --num-ranks.
    """
    ranks, mode = args.ranks, str(args.rank_mode)
    if mode == "one":
        if ranks not in (None, 1):
            raise ValueError(
                f"--ranks {ranks} with --rank-mode one: one rank runs alone. To run {ranks} on "
                f"this GPU add --rank-mode virtual; for one of {ranks} ranks write --num-ranks "
                f"{ranks}"
            )
        return problem_of(args), mode
    if ranks is None:
        raise ValueError(f"--rank-mode {mode} needs the number of ranks that run, as --ranks 4")
    if args.num_ranks not in (None, ranks):
        raise ValueError(
            f"--num-ranks {args.num_ranks} and --ranks {ranks}: with --rank-mode {mode} all ranks "
            "of the layer run; give --ranks alone"
        )
    if ranks > MAX_RANKS:
        raise ValueError(f"--ranks {ranks} exceeds {MAX_RANKS}, the most ranks of one launch")
    return whole_problem(argparse.Namespace(**{**vars(args), "num_ranks": ranks})), mode


def whole_problem(args: argparse.Namespace) -> Problem:
    """The problem over all its ranks.

    Raises:
        ValueError: neither a problem nor all its sizes.
    """
    sizes = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    if args.problem is not None:
        return load_problem(args.problem, **sizes)
    missing = [name for name in SIZES if name not in sizes and name != "num_ranks"]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"no --problem given (a preset or a .toml file), and no {flags} either")
    name = "h{hidden}-i{intermediate}-e{num_experts}-k{num_topk}".format(**sizes)
    return Problem(name=name, **sizes)


def _recipe_of(args: argparse.Namespace) -> Recipe:
    return Recipe.parse(args.recipe)


def _device_of(args: argparse.Namespace) -> str:
    name = args.device or find_gpu()
    if name is None:
        raise ValueError("no SM90 GPU here: name a device, as --device nvidia-h200")
    return device_key(name)


def current_commit() -> str:
    """The commit of the working tree that this package runs from, empty outside git."""
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def run_doctor(args: argparse.Namespace) -> int:
    compiles, found = diagnose(args.schedules)
    for subject, text in found:
        print(f"{subject:<24} {text}")
    return 0 if compiles else 1


def run_list(args: argparse.Namespace) -> int:
    from .cost import predict
    from .space import best_by_model, enumerate_candidates, load_space

    problem, mode = running_problem(args)
    recipe, gpu_ranks = _recipe_of(args), problem.num_ranks if mode == "virtual" else 1
    candidates = enumerate_candidates(
        problem, args.tokens, load_space(args.space), recipe, gpu_ranks=gpu_ranks
    )
    ranked = best_by_model(
        candidates, problem, args.tokens, args.limit, recipe=recipe, gpu_ranks=gpu_ranks
    )
    if args.names:
        print("\n".join(s.name for s in ranked))
        return 0
    kernels = len({s.kernel_key() for s in candidates.schedules})
    ranks = "" if mode == "one" else f"{problem.num_ranks} {mode} ranks, "
    print(
        f"{problem.name}, {ranks}{args.tokens} tokens, space {args.space}: "
        f"{len(candidates.schedules)} candidates in {kernels} kernels"
    )
    print(f"{candidates.num_rejected} of {candidates.num_points} points break a rule")
    for field, count in candidates.rejections.items():
        print(f"  {field:<20} rejects {count}")
    names: dict[Schedule, list[str]] = {}
    for word, schedule in candidates.pinned.items():
        names.setdefault(schedule, []).append(word)
    print("candidates by predicted time, us:")
    for schedule in ranked:
        words = " ".join(names.get(schedule, []))
        found = predict(problem, schedule, args.tokens, recipe=recipe, gpu_ranks=gpu_ranks)
        us = found.total_us
        print(f"  {us:9.1f}  {schedule.name}  {words}".rstrip())
    return 0


def run_search(args: argparse.Namespace) -> int:
    from .farm import Farm
    from .measure import GpuUnusable, RemoteBench
    from .report import render
    from .search import MODEL_DEVICE, SearchOptions, build_cells, plan_cells
    from .search import run_search as search
    from .space import load_space
    from .table import read_table

    problem, mode = running_problem(args)
    if mode == "real":
        raise ValueError(
            "--rank-mode real: search times what one GPU runs; a GPU a rank is not timed yet. "
            "Search with --rank-mode virtual, or check real ranks with: torchrun "
            "--nproc_per_node=N -m tl_megamoe.explorer check"
        )
    capacity = args.capacity or max(args.tokens)
    if capacity < max(args.tokens):
        raise ValueError(f"capacity={capacity} is below the {max(args.tokens)} of --tokens")
    _check_routing(problem, args.routing)
    if not args.compile_only:
        _check_writable(args.out)
    options = SearchOptions(
        problem=problem,
        tokens=args.tokens,
        space=load_space(args.space),
        results=args.out,
        capacity=capacity,
        rank_mode=mode,
        recipe=_recipe_of(args),
        phase=args.phase,
        routing=args.routing,
        seed=args.seed,
        limit=args.limit,
        again=args.again,
        commit=current_commit() if args.commit is None else args.commit,
    )
    _say_rejections(options)
    farm = Farm(jobs=args.jobs, timeout_s=args.timeout, prebuilt=args.prebuilt)
    gpu = find_gpu()
    if args.compile_only:
        counts = build_cells(options, plan_cells(options, gpu and device_key(gpu)), farm)
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
        return 0
    if gpu is None:
        print(
            "no SM90 GPU here: candidates are compiled for sm_90a and ranked by the cost model; "
            "rows say source=model and cannot be frozen",
            file=sys.stderr,
        )

    def bench(config: Any, control: Schedule) -> RemoteBench:
        return RemoteBench(config, timeout_s=args.timeout, control=control)

    try:
        done = search(options, farm, None if gpu is None else bench, gpu)
    except GpuUnusable as error:
        print(f"tl-megamoe: {error}", file=sys.stderr)
        return 1
    statuses = ", ".join(f"{n} {status}" for status, n in done.statuses.items()) or "none"
    print(
        f"{done.path}: {done.written} rows written ({statuses}), {done.skipped} were there",
        file=sys.stderr,
    )
    frame = read_table(done.path)
    device = MODEL_DEVICE if gpu is None else device_key(gpu)
    rows = _select(
        frame, problem, mode, args.tokens, device=device, phase=args.phase, recipe=args.recipe
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


def _say_rejections(options: Any) -> None:
    """What the rules removed from the space; a space that loses points may surprise."""
    from .space import enumerate_candidates

    tokens = options.tokens[0]  # the rules do not depend on it
    found = enumerate_candidates(
        options.problem, tokens, options.space, options.recipe, gpu_ranks=options.gpu_ranks
    )
    if found.num_rejected:
        rules = ", ".join(f"{field} {count}" for field, count in found.rejections.items())
        print(
            f"{found.num_rejected} of {found.num_points} points of the space break a rule "
            f"({rules}); tl-megamoe list explains",
            file=sys.stderr,
        )


def _check_routing(problem: Problem, routing: str) -> None:
    """Fail on a bad routing now and not after minutes of compiling."""
    from tl_megamoe.synthetic import random_inputs

    random_inputs(problem, 1, routing)


def _select(
    frame: Any,
    problem: Problem,
    rank_mode: str,
    tokens: tuple[int, ...] | None,
    **wanted: str | None,
) -> Any:
    """Rows of a problem, of some token counts (all when None) and some columns' values."""
    from .freeze import rows_of

    rows = rows_of(frame, problem, rank_mode)
    if tokens is not None:
        rows = rows[rows["num_tokens"].isin(list(tokens))]
    for name, value in wanted.items():
        if value is not None:
            rows = rows[rows[name] == value]
    return rows


def run_report(args: argparse.Namespace) -> int:
    import pandas as pd

    from .freeze import flags_of
    from .report import render
    from .table import read_table

    problem, mode = running_problem(args)
    device = device_key(args.device) if args.device else None
    pattern = f"{device or '*'}/{problem.name}.csv"
    paths = sorted(args.out.glob(pattern))
    wanted = {"device": device, "recipe": args.recipe}
    frames = [_select(read_table(p), problem, mode, args.tokens, **wanted) for p in paths]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        raise ValueError(
            f"no rows of problem {problem.name!r} with {problem.table_num_ranks} ranks ({mode})"
            f"{f', recipe {args.recipe}' if args.recipe else ''}"
            f"{f' at {args.tokens} tokens' if args.tokens else ''} in {args.out / pattern}. "
            f"Make some with: tl-megamoe search {flags_of(problem, mode)} --tokens 512"
            f"{f' --recipe {args.recipe}' if args.recipe else ''}"
        )
    frame = pd.concat(frames, ignore_index=True)
    if args.csv:
        frame.to_csv(sys.stdout, index=False)
    else:
        print(render(frame, args.top))
    return 0


def run_freeze(args: argparse.Namespace) -> int:
    from .farm import kernel_digest
    from .freeze import freeze

    root = args.schedules or schedules_root()
    problem, mode = running_problem(args)
    path, rows = freeze(
        problem,
        _device_of(args),
        args.out,
        root,
        recipe=_recipe_of(args),
        routing=args.routing,
        rank_mode=mode,
    )
    print(f"{path}: {len(rows)} entries")
    for kernel in sorted({str(row["kernel"]) for row in rows} - {kernel_digest()}):
        print(
            f"measured with kernel {kernel}, this is {kernel_digest()}: search again for times of "
            "this one",
            file=sys.stderr,
        )
    for row in rows:
        print(
            f"  {row['num_tokens']:>6} tokens  {row['median_us']:.1f} us, "
            f"{row['ratio_to_floor']:.3f} of the floor  {row['candidate']}"
        )
    return 0


def run_why(args: argparse.Namespace) -> int:
    from .why import explain

    (problem, mode), device = running_problem(args), _device_of(args)
    capacity, recipe = args.capacity or args.tokens, _recipe_of(args)
    print(explain(problem, mode, device, args.tokens, capacity, recipe, args.schedules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
