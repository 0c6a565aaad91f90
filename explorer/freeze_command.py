"""`tl-megamoe freeze` and `tl-megamoe why`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tl_megamoe.frozen import schedules_root

from .args import (
    DEFAULT_RESULTS,
    add_problem,
    add_ranks,
    add_recipe,
    device_of,
    mix_of,
    one_count,
    recipe_of,
    running_problem,
)


def add_parser(add: Callable[..., Any]) -> None:
    """Declare the commands."""
    freeze = add("freeze", run_freeze, "Freeze the best confirmed candidates for the op.")
    add_problem(freeze)
    add_ranks(freeze)
    add_recipe(freeze, "rows of this recipe; the entries serve all")
    freeze.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    freeze.add_argument("--device", help="as nvidia-h200 (this machine's GPU)")
    freeze.add_argument(
        "--routing",
        default="uniform",
        help="routings that count, several with weights as uniform=0.7,zipf:1.2=0.3 (uniform)",
    )
    freeze.add_argument("--schedules", type=Path, help="folder of the frozen files")
    freeze.add_argument("--dry-run", action="store_true", help="say what would change")
    why = add("why", run_why, "Say which schedule the op runs, and where it came from.")
    add_problem(why)
    add_ranks(why)
    add_recipe(why, "recipe of the buffer")
    why.add_argument("--tokens", type=one_count, required=True)
    why.add_argument("--capacity", type=one_count, help="buffer tokens (those of --tokens)")
    why.add_argument("--device", help="as nvidia-h200 (this machine's GPU)")
    why.add_argument("--schedules", type=Path, help="folder of the frozen files")


def run_freeze(args: argparse.Namespace) -> int:
    """The command `freeze`."""
    from tl_megamoe.synthetic import routing_name

    from .farm import kernel_digest
    from .freeze import plan_freeze, write_freeze

    problem, mode = running_problem(args)
    device = device_of(args)
    plan = plan_freeze(
        problem,
        device,
        args.out,
        args.schedules or schedules_root(),
        recipe=recipe_of(args),
        mix={routing_name(r): weight for r, weight in mix_of(args.routing).items()},
        rank_mode=mode,
    )
    if not args.dry_run:
        write_freeze(plan)
    verb = "would have" if args.dry_run else "has"
    print(f"{plan.path} {verb} {len(plan.entries)} entries for {len(plan.choices)} token counts")
    for line in plan.changes:
        print(line)
    for entry in plan.entries:
        print(f"up to {entry['max_tokens']:>6} tokens  {entry['candidate']}")
    for kernel in sorted({str(e["kernel"]) for e in plan.entries} - {kernel_digest(), ""}):
        print(
            f"measured with kernel {kernel}, this is {kernel_digest()}: search again for times of "
            "this one",
            file=sys.stderr,
        )
    return 0


def run_why(args: argparse.Namespace) -> int:
    """The command `why`."""
    from .why import explain

    (problem, mode), device = running_problem(args), device_of(args)
    capacity, recipe = args.capacity or args.tokens, recipe_of(args)
    print(explain(problem, mode, device, args.tokens, capacity, recipe, args.schedules))
    return 0
