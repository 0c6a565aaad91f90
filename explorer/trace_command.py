"""`tl-megamoe trace`: what every role of every block does during one launch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from tl_megamoe.kernel import KernelSpec
from tl_megamoe.layout import make_layout

from . import doctor
from .args import (
    add_problem,
    add_recipe,
    current_commit,
    device_of,
    one_count,
    problem_of,
    recipe_of,
    seconds,
)

if TYPE_CHECKING:
    from tl_megamoe.schedule import Schedule

    from .farm import Farm
    from .messages import WorkerConfig
    from .trace import Trace
    from .trace_worker import Stamped


def add_parser(add: Callable[..., Any]) -> None:
    """Declare the command."""
    parser = add(
        "trace", run, "Time every role of every block of one launch, with a profiling build."
    )
    add_problem(parser)
    add_recipe(parser, "recipe that the kernel runs")
    parser.add_argument("--tokens", type=one_count, required=True, help="tokens of the launch")
    parser.add_argument("--capacity", type=one_count, help="buffer tokens (those of --tokens)")
    parser.add_argument(
        "--schedule",
        default="frozen",
        help="frozen (the built-in default where nothing is), default, or a name that list "
        "--names prints (frozen)",
    )
    parser.add_argument(
        "--routing", default="uniform", help="uniform, zipf:<e>, skew, hot1, file:<path> (uniform)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (0)")
    parser.add_argument("--device", help="whose frozen schedules (this machine's GPU)")
    parser.add_argument(
        "--out", type=Path, help="Chrome trace for ui.perfetto.dev, as trace.json or trace.json.gz"
    )
    parser.add_argument("--summary", type=Path, help="write the tables to this CSV file too")
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, help="seconds that a step may take (300)"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the kernel cache, run nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from .farm import Farm

    config, schedule = config_of(args)
    for path in filter(None, (args.out, args.summary)):
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent} to write it to")
    farm = Farm(timeout_s=args.timeout)
    if args.compile_only:
        return 0 if build(config, schedule, farm) else 1
    if doctor.find_gpu() is None:
        raise ValueError(
            "trace runs a launch on an SM90 GPU, and there is none here. --compile-only fills the "
            "kernel cache for a machine that has one"
        )
    if not build(config, schedule, farm):
        return 1
    stamped = take(config, schedule, args)
    if stamped is None:
        return 1
    return 0 if report(args, config, schedule, stamped) else 1


def config_of(args: argparse.Namespace) -> tuple[WorkerConfig, Schedule]:
    """What the flags ask for.

    Raises:
        ValueError: a flag that does not fit the others, or a routing that does not exist.
        ScheduleError: the schedule is not valid for the problem.
    """
    from tl_megamoe.synthetic import random_inputs

    from .baselines.beside import choose
    from .messages import WorkerConfig

    problem, recipe = problem_of(args), recipe_of(args)
    capacity = args.capacity or args.tokens
    if capacity < args.tokens:
        raise ValueError(f"--capacity {capacity} is below the {args.tokens} of --tokens")
    make_layout(problem, capacity, recipe)  # refuses a capacity that no buffer has
    random_inputs(problem, args.tokens if args.routing.startswith("file:") else 1, args.routing)
    device = device_of(args) if args.schedule == "frozen" else ""
    schedule = choose(problem, device, (args.tokens,), args.schedule, recipe)[args.tokens]
    return WorkerConfig(problem=problem, capacity=capacity, recipe=recipe, seed=args.seed), schedule


def build(config: WorkerConfig, schedule: Schedule, farm: Farm) -> bool:
    """Compile both builds; says on stderr what is wrong with one. Whether both can run."""
    from .messages import kernel_specs

    shipped = kernel_specs(config, schedule)["fused"]
    specs: dict[str, KernelSpec] = {
        "shipped kernel": shipped,
        "profiling build": replace(shipped, profile=True),
    }
    with tqdm(total=len(specs), desc="compile", unit="kernel", file=sys.stderr) as bar:
        results = farm.run(list(specs.values()), lambda spec, result: _tick(bar))
    good = True
    for name, spec in specs.items():
        result = results[spec.key()]
        if result.status != "ok":
            print(f"{name}: {result.status}: {result.reason}", file=sys.stderr)
        good = good and result.report is not None
    return good


def _tick(bar: Any) -> None:
    bar.update()


def take(config: WorkerConfig, schedule: Schedule, args: argparse.Namespace) -> Stamped | None:
    """The launch, in a child process; None when it failed, and stderr says how."""
    from .child import SETUP_TIMEOUT_S, ChildDied, ChildError, ChildTimeout

    worker = spawn(config)
    try:
        worker.call("cell", args.tokens, args.routing, timeout_s=SETUP_TIMEOUT_S)
        stamped: Stamped = worker.call("trace", schedule, timeout_s=args.timeout)
    except ChildTimeout:
        print(
            f"tl-megamoe: no launch in {args.timeout:g} s; its process was killed", file=sys.stderr
        )
        return None
    except (ChildDied, ChildError) as error:
        if isinstance(error, ChildError) and error.kind == "ValueError":
            raise ValueError(str(error)) from error
        print(f"tl-megamoe: the launch failed: {error}", file=sys.stderr)
        return None
    finally:
        worker.kill()
    return stamped


def spawn(config: WorkerConfig) -> Any:
    """A fresh GPU process."""
    from .trace_worker import spawn_trace_worker

    return spawn_trace_worker(config)


def report(
    args: argparse.Namespace, config: WorkerConfig, schedule: Schedule, stamped: Stamped
) -> bool:
    """Print and write what a launch did. Whether the trace is whole and the result right."""
    from .table import write_atomically
    from .trace import chrome_trace, read_trace, write_chrome_trace
    from .trace_summary import fact, render_summary, summarise, summary_rows

    trace = read_trace(stamped.words, config.problem, schedule, args.tokens, stamped.received)
    summary = summarise(trace)
    cost = stamped.profiling_us / stamped.shipped_us - 1
    print(
        f"{config.problem.name}, {args.tokens} tokens, {args.routing}, recipe {config.recipe}, "
        f"{schedule.name}, commit {current_commit()}"
    )
    print(fact("shipped kernel", stamped.shipped_us, "us"))
    print(fact("profiling build", stamped.profiling_us, f"us ({cost:+.1%})"))
    if exchanges_few(schedule, config, args.tokens):
        print(
            "the profiling build exchanges the counts of few routes, which the shipped pingpong "
            "kernel does not: it starts some microseconds later (docs/profiling.md)"
        )
    print(render_summary(summary))
    if args.out is not None:
        notes = {
            "shipped_us": stamped.shipped_us,
            "profiling_us": stamped.profiling_us,
            "routing": args.routing,
            "recipe": str(config.recipe),
        }
        write_chrome_trace(args.out, chrome_trace(trace, notes))
        print(
            f"{args.out}: {len(trace.events)} events; open it in ui.perfetto.dev", file=sys.stderr
        )
    if args.summary is not None:
        write_atomically(args.summary, summary_rows(summary).to_csv(index=False))
    problems = problems_of(trace, stamped)
    for text in problems:
        print(f"tl-megamoe: {text}", file=sys.stderr)
    return not problems


def exchanges_few(schedule: Schedule, config: WorkerConfig, tokens: int) -> bool:
    """Whether the shipped kernel counts these routes in every block and the profiling build does
    not (`Plan.counts_few`)."""
    return schedule.pingpong and schedule.is_few(config.problem, tokens, config.recipe)


def problems_of(trace: Trace, stamped: Stamped) -> list[str]:
    """What is wrong with a trace; empty when nothing is."""
    from .trace import wrong_tiles

    found = []
    if not stamped.same:
        found.append("the profiling build's result is not the shipped kernel's: a defect")
    if trace.num_lost:
        found.append(
            f"{trace.num_lost} events did not fit and are missing: trace a launch of fewer tokens"
        )
    else:
        found += [
            f"{role}: {count} tiles were not traced exactly once: a defect"
            for role, count in wrong_tiles(trace).items()
            if count
        ]
    return found
