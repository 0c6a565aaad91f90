"""`tl-megamoe list`: the candidates of a problem, and how the rules made them of the space."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

from tl_megamoe.problem import Problem
from tl_megamoe.rules import RULES
from tl_megamoe.schedule import Schedule

from .args import (
    add_problem,
    add_ranks,
    add_recipe,
    add_space,
    one_count,
    recipe_of,
    running_problem,
)
from .space import (
    Candidates,
    Range,
    Space,
    best_by_model,
    choices,
    enumerate_candidates,
    load_space,
)


def add_parser(add: Callable[..., Any]) -> None:
    """Register the verb; `add` makes a sub-parser from a name, a function and a text."""
    parser = add("list", run_list, "List the candidates, and how many each rule rejects.")
    add_problem(parser)
    add_ranks(parser)
    add_space(parser)
    add_recipe(parser, "recipe that the kernels run")
    parser.add_argument("--tokens", type=one_count, default=512, help="token count (512)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--names", action="store_true", help="print names only")
    shown.add_argument(
        "--explain", action="store_true", help="print the space and every rule, no candidates"
    )


def run_list(args: argparse.Namespace) -> int:
    """Print names, the space and its rules, or the candidates by predicted time."""
    from .constants import load_constants
    from .cost import predict

    problem, mode = running_problem(args)
    gpu_ranks = problem.num_ranks if mode == "virtual" else 1
    recipe, space, constants = recipe_of(args), load_space(args.space), load_constants()
    candidates = enumerate_candidates(problem, args.tokens, space, recipe, gpu_ranks=gpu_ranks)
    if not args.explain:
        ranked = best_by_model(
            candidates,
            problem,
            args.tokens,
            args.limit,
            recipe=recipe,
            gpu_ranks=gpu_ranks,
            constants=constants,
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
    if args.explain:
        print("\n".join((*explain_space(space, candidates, problem), *explain_rules(candidates))))
        return 0
    print(f"{candidates.num_rejected} of {candidates.num_points} points break a rule")
    for rule, count in candidates.rejections.items():
        print(f"  {rule:<20} rejects {count}")
    words = pinned_words(candidates)
    print("candidates by predicted time, us:")
    for schedule in ranked:
        found = predict(
            problem,
            schedule,
            args.tokens,
            recipe=recipe,
            gpu_ranks=gpu_ranks,
            constants=constants,
        )
        named = " ".join(words.get(schedule, []))
        print(f"  {found.total_us:9.1f}  {schedule.name}  {named}".rstrip())
    return 0


def pinned_words(candidates: Candidates) -> dict[Schedule, list[str]]:
    """Pinned schedule -> what it is pinned as."""
    out: dict[Schedule, list[str]] = {}
    for word, schedule in candidates.pinned.items():
        out.setdefault(schedule, []).append(word)
    return out


def explain_space(space: Space, candidates: Candidates, problem: Problem) -> list[str]:
    """Lines that say what the space holds: ranges with their values, bases, pinned candidates."""
    lines = []
    if space.product:
        lines += ["", "product: every combination of"]
        lines += _range_lines(space.product, problem)
    if space.bases:
        lines += [
            "",
            "bases: points that hold where nothing is varied (* changed from the defaults)",
        ]
        for base in space.bases:
            text = ", ".join(f"{name} {value}" for name, value in base.items())
            lines.append(f"  * {text or 'the defaults'}")
        lines.append("vary: one of these at a time around each base")
        lines += _range_lines(space.vary, problem)
    lines += ["", "pinned: candidates whatever the space holds"]
    lines += [f"  {word:<10} {schedule.name}" for word, schedule in candidates.pinned.items()]
    return lines


def _range_lines(ranges: tuple[Range, ...], problem: Problem) -> list[str]:
    lines = []
    for (names, _), updates in zip(ranges, choices(ranges, problem), strict=True):
        values = " ".join("/".join(str(update[n]) for n in names) for update in updates)
        lines.append(f"  {', '.join(names):<30} {len(updates)}: {values}")
    return lines


def explain_rules(candidates: Candidates) -> list[str]:
    """Lines that say of every rule what it asks, what it removes and what it removes alone."""
    lines = [
        "",
        f"rules: {candidates.num_rejected} of {candidates.num_points} points break at least one",
        f"  {'rule':<22}{'removes':>8}{'alone':>8}",
    ]
    for rule in (*candidates.rejections, *(r for r in RULES if r not in candidates.rejections)):
        removed, alone = candidates.rejections.get(rule, 0), candidates.sole.get(rule, 0)
        lines.append(f"  {rule:<22}{removed:>8}{alone:>8}  {RULES[rule]}")
        if removed:
            text = f"as: {candidates.examples[rule]}"
            indent = " " * 40
            lines += textwrap.wrap(
                text, 100, initial_indent=indent, subsequent_indent=indent + "    "
            )
    return lines
