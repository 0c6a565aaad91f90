"""`tl-megamoe report`: ranked tables as text, the results page, and two runs side by side."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import device_key
from tl_megamoe.problem import Problem

from .args import (
    DEFAULT_RESULTS,
    SIZES,
    add_problem,
    add_ranks,
    add_recipe,
    counts,
    one_count,
    running_problem,
)
from .freeze import flags_of, rows_of
from .ranking import GROUP, order_column, problem_of_row, ranked_cells, status_counts
from .report_text import render
from .schema import STAGES
from .table import folder_name, gpu_of

__all__ = ["add_parser", "order_column", "ranked_cells", "render", "run", "status_counts"]

Tables = dict[Path, pd.DataFrame]
"""Rows by the file that they are in; their index is the row's place in it."""


def add_parser(add: Callable[..., Any]) -> None:
    """Register the verb.

    Args:
        add: makes a sub-parser from a name, a function and a text.
    """
    parser = add("report", run, "Print ranked tables; write the results page; compare two runs.")
    add_problem(parser)
    add_ranks(parser)
    add_recipe(parser, "only rows of this recipe", default=None)
    parser.add_argument("--tokens", type=counts, help="only these counts")
    parser.add_argument("--out", type=Path, default=DEFAULT_RESULTS, help="results folder")
    parser.add_argument(
        "--device", help="as nvidia-h200, or nvidia-h200-x2: its ranks alone (all with rows)"
    )
    parser.add_argument("--top", type=one_count, default=10, help="candidates of a table (10)")
    parser.add_argument("--csv", action="store_true", help="print the rows as CSV, as they stand")
    parser.add_argument(
        "--write",
        action="store_true",
        help="also write <device>/report.html and report.md: all rows of the device, whatever "
        "limits the text",
    )
    parser.add_argument(
        "--no-figures",
        action="store_true",
        help="with --write: write the page without figures, even over one that has some",
    )
    parser.add_argument("--schedules", type=Path, help="folder of the frozen files, for --write")
    parser.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar=("A.csv", "B.csv"),
        help="print what changed from table A to table B instead",
    )


def run(args: argparse.Namespace) -> int:
    """The verb."""
    problem = _asked_problem(args)
    if args.diff:
        return _run_diff(args, problem)
    for flag in ("schedules", "no_figures"):
        if getattr(args, flag) and not args.write:
            raise ValueError(f"--{flag.replace('_', '-')} belongs to the page: add --write")
    limited = args.tokens is not None or args.recipe is not None
    if problem is None and not (args.write or args.csv or limited):
        print(_listing(_tables(args, None)))
        return 0
    tables = _chosen(args, problem)
    if args.csv:
        _print_lines(tables)
    else:
        print(render(pd.concat(tables.values(), ignore_index=True), args.top, args.schedules))
    if args.write:
        _write_pages(args, tables)
    return 0


def _print_lines(tables: Tables) -> None:
    """Rows as they stand in their files: numbers keep the digits that they have there."""
    from .schema import COLUMNS
    from .table import read_lines

    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(COLUMNS)
    for path, frame in tables.items():
        lines = read_lines(path)
        out.writerows(lines[place] for place in frame.index)


def _write_pages(args: argparse.Namespace, tables: Tables) -> None:
    from .page import check_figures, write_page

    devices: dict[str, bool] = {}  # folder -> whether it has measured rows
    for path, frame in tables.items():
        measured = bool((frame["source"] == "measured").any())
        devices[path.parent.name] = devices.get(path.parent.name, False) or measured
    chosen = [device for device in sorted(devices) if devices[device] or args.device]
    for device in sorted(set(devices) - set(chosen)):
        print(
            f"no page of {device}: its rows are of the cost model. For one add --device {device}",
            file=sys.stderr,
        )
    for device in chosen:
        check_figures(args.out / device, draw=not args.no_figures)
    for device in chosen:
        written = write_page(args.out / device, args.schedules, draw=not args.no_figures)
        for path in written:
            print(f"wrote {path}", file=sys.stderr)


def _asked_problem(args: argparse.Namespace) -> tuple[Problem, str] | None:
    """The problem that limits the rows and its rank mode; None for all.

    Raises:
        ValueError: as `running_problem`, or ranks without a problem.
    """
    if args.problem is not None or any(getattr(args, name) is not None for name in SIZES):
        return running_problem(args)
    if args.ranks is not None or args.rank_mode != "one":
        given = [] if args.ranks is None else [f"--ranks {args.ranks}"]
        given += [] if args.rank_mode == "one" else [f"--rank-mode {args.rank_mode}"]
        raise ValueError(
            f"{' '.join(given)} without --problem: they choose among the rows of a problem. Add "
            "--problem, or leave them away for all rows"
        )
    return None


def select(
    frame: pd.DataFrame,
    problem: tuple[Problem, str] | None,
    tokens: tuple[int, ...] | None,
    **wanted: str | None,
) -> pd.DataFrame:
    """Rows of a problem and its rank mode, of some token counts and some columns' values.

    Args:
        frame: rows.
        problem: the problem as it runs, and the rank mode; all when None.
        tokens: token counts; all when None.
        wanted: column -> value; any value when None.
    """
    rows = frame if problem is None else rows_of(frame, *problem)
    if tokens is not None:
        rows = rows[rows["num_tokens"].isin(list(tokens))]
    for name, value in wanted.items():
        if value is not None:
            rows = rows[rows[name] == value]
    return rows


def _tables(args: argparse.Namespace, problem: tuple[Problem, str] | None) -> Tables:
    """The tables with rows of the device and problem that the arguments name."""
    from .page import device_tables
    from .table import read_table

    folders = sorted(path for path in args.out.glob("*") if path.is_dir())
    if args.device:
        device = device_key(args.device)
        folders = [path for path in folders if device in (path.name, gpu_of(path.name))]
    if problem is not None:
        paths = [folder / f"{problem[0].name}.csv" for folder in folders]
        return {path: read_table(path) for path in paths if path.is_file()}
    return {
        folder / f"{name}.csv": frame
        for folder in folders
        for name, frame in device_tables(folder).items()
    }


def _chosen(args: argparse.Namespace, problem: tuple[Problem, str] | None) -> Tables:
    """The rows that the arguments choose.

    Raises:
        ValueError: there are none.
    """
    tables = _tables(args, problem)
    gpu = gpu_of(device_key(args.device)) if args.device else None
    wanted = {"device": gpu, "recipe": args.recipe}

    def chosen(tokens: tuple[int, ...] | None) -> Tables:
        found = {p: select(f, problem, tokens, **wanted) for p, f in tables.items()}
        return {path: frame for path, frame in found.items() if len(frame)}

    found = chosen(args.tokens)
    if found:
        return found
    place = device_key(args.device) if args.device else "*"
    if problem is not None and gpu_of(place) == place:
        place = folder_name(place, problem[1], problem[0].num_ranks)
    pattern = f"{place}/{problem[0].name if problem else '*'}.csv"
    recipe = f", recipe {args.recipe}" if args.recipe else ""
    rows = "no rows"
    if problem is not None:
        rows += f" of problem {problem[0].name!r} with {problem[0].table_num_ranks} ranks "
        rows += f"({problem[1]})"
    others = sorted({int(t) for frame in chosen(None).values() for t in frame["num_tokens"]})
    if args.tokens and others:
        raise ValueError(
            f"{rows}{recipe} at {_joined(args.tokens)} tokens in {args.out / pattern}; there are "
            f"rows at {_joined(others)}. Name some of these with --tokens, or leave it away"
        )
    flags = flags_of(*problem) if problem else "--problem ..."
    raise ValueError(
        f"{rows}{recipe} in {args.out / pattern}. Make some with: tl-megamoe search {flags} "
        f"--tokens {_joined(args.tokens or (512,), ',')}"
        f"{f' --recipe {args.recipe}' if args.recipe else ''}"
    )


def _joined(counts: tuple[int, ...] | list[int], comma: str = ", ") -> str:
    return comma.join(map(str, counts))


def _listing(tables: Tables) -> str:
    """The tables that there are, and how to see one.

    Raises:
        ValueError: there is none.
    """
    lines = []
    for path, frame in tables.items():
        for _, rows in frame.groupby(GROUP, sort=True):
            first = rows.iloc[0]
            problem = problem_of_row(first)
            flags = flags_of(problem, str(first["rank_mode"])) if problem is not None else "-"
            stages = rows["stage"].value_counts()
            lines.append(
                {
                    "device": str(first["device"]),
                    "problem": str(first["problem"]),
                    "ranks": f"{first['num_ranks']} ({first['rank_mode']})",
                    "rows": str(len(rows)),
                    "stages": ", ".join(f"{stages[s]} {s}" for s in STAGES if s in stages),
                    "tokens": _joined(sorted({int(t) for t in rows["num_tokens"]}), ","),
                    "see it with": f"tl-megamoe report {flags} --out {path.parent.parent}",
                }
            )
    if not lines:
        raise ValueError(
            "no results table with rows in the folder that --out and --device name. Make one with: "
            "tl-megamoe search --problem ... --tokens 512"
        )
    columns = list(lines[0])
    table = [columns, *([line[name] for name in columns] for line in lines)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    text = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]
    return "\n".join(
        [
            *(line.rstrip() for line in text),
            "--device takes one device, --tokens some counts; --write makes the page of each "
            "device.",
        ]
    )


def _run_diff(args: argparse.Namespace, problem: tuple[Problem, str] | None) -> int:
    from .diff import compare, read_side, render_diff

    for flag in ("write", "csv", "device", "schedules", "no_figures"):
        if getattr(args, flag):
            raise ValueError(
                f"--diff prints what changed between two tables: --{flag.replace('_', '-')} not "
                "with it"
            )
    sides = [read_side(path) for path in args.diff]
    chosen = [select(side, problem, args.tokens, recipe=args.recipe) for side in sides]
    for path, side in zip(args.diff, chosen, strict=True):
        if side.empty:
            raise ValueError(f"--diff: no row of {path} is left by --problem, --tokens, --recipe")
    print(render_diff(compare(*chosen), args.top, names=[str(path) for path in args.diff]))
    return 0
