"""`tl-megamoe report`: ranked tables as text, the results page, and two runs side by side."""

from __future__ import annotations

import argparse
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
from .evidence import MIN_OBSERVATIONS, MIN_SEEDS
from .freeze import flags_of, rows_of
from .ranking import (
    CELL,
    GROUP,
    benched,
    best_of,
    confirmed_of,
    order_column,
    ranked,
    ranked_cells,
    ranking_columns,
    screened,
    status_counts,
)

__all__ = ["add_parser", "order_column", "ranked_cells", "render", "run", "status_counts"]
MEASURED_COLUMNS = {
    "candidate": "candidate",
    "median_us": "median us",
    "p10_us": "p10",
    "p90_us": "p90",
    "ratio_to_floor": "/ floor",
    "ratio_to_baseline": "/ default",
    "tflops": "TFLOP/s",
    "hbm_gbs": "GB/s",
    "nvlink_gbs": "NVLink GB/s",
    "yardstick_tflops": "yardstick",
}
MODEL_COLUMNS = {
    "candidate": "candidate",
    "predicted_us": "predicted us",
    "registers": "registers",
    "spill_bytes": "spills",
    "smem_bytes": "smem",
    "num_wgmma": "wgmma",
}


# ---- text


def render(frame: pd.DataFrame, top: int = 10) -> str:
    """The report as text: ranked tables a cell, then the best of each cell.

    Args:
        frame: rows of any problems and ranks; each gets tables of its own.
        top: candidates shown of each table.
    """
    groups = frame.groupby(GROUP, sort=True)
    return "\n\n".join(_render_group(rows, top) for _, rows in groups)


def _render_group(frame: pd.DataFrame, top: int) -> str:
    parts, best = [], []
    keys = [name for name in CELL if name != "seed"]
    for values, rows in frame.groupby(keys, sort=True):
        cell = dict(zip(keys, values, strict=True))
        parts.append(_title(cell, rows.iloc[0]))
        if cell["source"] == "measured":
            parts += _confirmed_parts(rows, top)
        parts += _screen_parts(rows, str(cell["source"]), top)
        parts += _bench_parts(rows)
        parts.append("")
        line = _best_line(cell, rows)
        if line:
            best.append(line)
    if len(best) > 1:
        parts += ["Best of each cell", *best]
    return "\n".join(parts).rstrip()


def _title(cell: dict[str, Any], first: Any) -> str:
    measured = cell["source"] == "measured"
    return (
        f"{first['problem']}, {cell['num_tokens']} tokens, {first['num_ranks']} ranks "
        f"({first['rank_mode']}), {cell['routing']} routing, {cell['phase']}, {cell['recipe']}, "
        f"{'measured on' if measured else 'source=model, not measured:'} {cell['device']}"
    )


def _numbered(table: pd.DataFrame) -> str:
    table.index = pd.RangeIndex(1, len(table) + 1)
    return table.to_string(float_format=lambda v: f"{v:.4g}", na_rep="-")


def _failure_lines(rows: pd.DataFrame, top: int) -> list[str]:
    """Why rows are not `ok`, the rarest reason first, since the commonest is known to all.

    A duplicate is no failure and only counted.
    """
    failures = rows[~rows["status"].isin(["ok", "duplicate"])]
    groups = [
        (len(own), str(status), str(reason), str(own["candidate"].iloc[0]))
        for (status, reason), own in failures.groupby(["status", "reason"], sort=True)
    ]
    lines = [
        f"  {status}: {name}{f' and {count - 1} more' if count > 1 else ''}: {reason[:120]}"
        for count, status, reason, name in sorted(groups)
    ]
    left = len(lines) - top
    return lines[:top] + ([f"  {left} other reasons"] if left > 0 else [])


def _confirmed_parts(rows: pd.DataFrame, top: int) -> list[str]:
    timed = rows[rows["stage"] == "confirm"]
    if timed.empty:
        return []
    found = confirmed_of(rows)
    if not found:
        return [
            f"confirm: {len(timed)} rows of {timed['candidate'].nunique()} candidates, none of "
            f"this kernel with {MIN_OBSERVATIONS} observations of {MIN_SEEDS} seeds each",
            *_failure_lines(timed, top),
        ]
    first = found[0]
    run = timed[timed["run"] == first.run]
    shown = [
        {
            "candidate": one.candidate,
            "median us": one.median_us,
            "p10": one.p10_us,
            "p90": one.p90_us,
            "/ floor": one.ratio_to_floor,
            "/ default": one.ratio_to_default,
            "spread": one.spread,
            "yardstick": one.yardstick_tflops,
        }
        for one in found[:top]
    ]
    return [
        f"confirm: {len(found)} candidates, {first.num_observations} rounds over "
        f"{first.num_seeds} seeds{f' in run {first.run}' if first.run else ''}; "
        "ranked by / default, the median over the rounds",
        _numbered(pd.DataFrame(shown)),
        *_failure_lines(run, top),
    ]


def _screen_parts(rows: pd.DataFrame, source: str, top: int) -> list[str]:
    parts = []
    columns = MEASURED_COLUMNS if source == "measured" else MODEL_COLUMNS
    found = screened(rows)
    for seed, own in found.groupby("seed", sort=True):
        ordered = ranked(own, source)
        good = ordered[ordered["status"] == "ok"]
        by = ranking_columns(good, source)[0]
        seed_text = f", seed {seed}" if found["seed"].nunique() > 1 else ""
        text = f"screen{seed_text}: {len(own)} candidates: {status_counts(ordered)}"
        if source == "measured" and good["floor_us"].notna().any():
            text += f"; floor {good['floor_us'].iloc[0]:.1f} us"
        parts.append(f"{text}; ranked by {columns.get(by, by)}" if len(good) else text)
        if len(good):
            held = [c for c in columns if c != "nvlink_gbs" or good[c].notna().any()]
            parts.append(_numbered(good.head(top)[held].rename(columns=columns)))
        parts += _failure_lines(ordered, top)
    return parts


def _bench_parts(rows: pd.DataFrame) -> list[str]:
    parts = []
    for row in benched(rows).to_dict("records"):
        parts.append(
            f"bench: {row['median_us']:.1f} us beside {row['baseline']} "
            f"{row['baseline_version']} in {row['baseline_us']:.1f} us: "
            f"{row['ratio_to_baseline']:.3f} of its time ({row['rounds']} rows), "
            f"{row['candidate']}"
        )
    bench = rows[rows["stage"] == "bench"]
    timed = set(bench.loc[bench["baseline_us"].notna(), "baseline"]) | {""}
    for name in sorted(set(bench["baseline"]) - timed):
        notes = bench.loc[bench["baseline"] == name, "notes"].iloc[-1]
        parts.append(f"bench: no time of {name}: {notes[:120]}")
    return parts + _failure_lines(bench, len(rows))


def _best_line(cell: dict[str, Any], rows: pd.DataFrame) -> str:
    tokens = f"  {cell['num_tokens']:>6} tokens  "
    if cell["source"] == "measured":
        best = best_of(rows)
        if best is None:
            return ""
        held = best.ratio_to_floor == best.ratio_to_floor
        floor = f", {best.ratio_to_floor:.3f} of the floor" if held else ""
        word = "confirmed" if best.stage == "confirm" else "screened"
        return f"{tokens}{best.median_us:.1f} us{floor}  {best.candidate}  ({word})"
    good = screened(rows)
    good = good[good["status"] == "ok"]
    if good.empty:
        return ""
    row = ranked(good, "model").iloc[0]
    return f"{tokens}predicted {row['predicted_us']:.1f} us  {row['candidate']}"


# ---- command line


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
    parser.add_argument("--device", help="as nvidia-h200 (all with rows)")
    parser.add_argument("--top", type=one_count, default=10, help="candidates of a table (10)")
    parser.add_argument("--csv", action="store_true", help="print the rows as CSV")
    parser.add_argument(
        "--write",
        action="store_true",
        help="also write <device>/report.html and report.md: all rows of the device, whatever "
        "limits the text",
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
    if args.schedules and not args.write:
        raise ValueError("--schedules names the frozen files of the page: add --write")
    frame = _chosen_rows(args, problem)
    if args.csv:
        frame.to_csv(sys.stdout, index=False)
    else:
        print(render(frame, args.top))
    if args.write:
        from .page import write_page

        for device in sorted(set(frame["device"])):
            for path in write_page(args.out / device, args.schedules):
                print(f"wrote {path}", file=sys.stderr)
    return 0


def _asked_problem(args: argparse.Namespace) -> tuple[Problem, str] | None:
    """The problem that limits the rows and its rank mode; None for all.

    Raises:
        ValueError: as `running_problem`, or ranks without a problem.
    """
    named = args.problem is not None or any(getattr(args, name) is not None for name in SIZES)
    if named or not (args.write or args.diff):
        return running_problem(args)
    if args.ranks is not None or args.rank_mode != "one":
        raise ValueError(
            f"--ranks {args.ranks} --rank-mode {args.rank_mode} without --problem: they choose "
            "among the rows of a problem. Add --problem, or leave them away for all rows"
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


def _chosen_rows(args: argparse.Namespace, problem: tuple[Problem, str] | None) -> pd.DataFrame:
    """The rows that the arguments choose, over all tables.

    Raises:
        ValueError: there are none.
    """
    from .page import device_tables
    from .table import read_table

    device = device_key(args.device) if args.device else None
    pattern = f"{device or '*'}/{problem[0].name if problem else '*'}.csv"
    if problem is None:
        folders = sorted(path for path in args.out.glob(device or "*") if path.is_dir())
        frames = [frame for folder in folders for frame in device_tables(folder).values()]
    else:
        frames = [read_table(path) for path in sorted(args.out.glob(pattern))]
    wanted = {"device": device, "recipe": args.recipe}
    frames = [select(frame, problem, args.tokens, **wanted) for frame in frames]
    frames = [frame for frame in frames if len(frame)]
    if frames:
        return pd.concat(frames, ignore_index=True)
    limits = (
        f"{f', recipe {args.recipe}' if args.recipe else ''}"
        f"{f' at {args.tokens} tokens' if args.tokens else ''} in {args.out / pattern}. Make some "
    )
    if problem is None:
        raise ValueError(f"no rows{limits}with: tl-megamoe search --problem ... --tokens 512")
    raise ValueError(
        f"no rows of problem {problem[0].name!r} with {problem[0].table_num_ranks} ranks "
        f"({problem[1]}){limits}with: tl-megamoe search {flags_of(*problem)} --tokens 512"
        f"{f' --recipe {args.recipe}' if args.recipe else ''}"
    )


def _run_diff(args: argparse.Namespace, problem: tuple[Problem, str] | None) -> int:
    from .diff import compare, read_side, render_diff

    for flag in ("write", "csv", "device", "schedules"):
        if getattr(args, flag):
            raise ValueError(f"--diff prints what changed between two tables: --{flag} not with it")
    sides = [read_side(path) for path in args.diff]
    chosen = [select(side, problem, args.tokens, recipe=args.recipe) for side in sides]
    for path, side in zip(args.diff, chosen, strict=True):
        if side.empty:
            raise ValueError(f"--diff: no row of {path} is left by --problem, --tokens, --recipe")
    print(render_diff(compare(*chosen), args.top, names=[str(path) for path in args.diff]))
    return 0
