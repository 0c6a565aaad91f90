"""Freeze the best measured candidates into schedules/<device>/<problem>.json for the op."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import SCHEMA, read_frozen
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .table import COLUMNS, locked_folder, read_table, table_path, update_summary, write_atomically

EVIDENCE = (
    "num_tokens",
    "candidate",
    "median_us",
    "ratio_to_floor",
    "yardstick_tflops",
    "recipe",
    "measured_at",
    "commit",
    "kernel",
)


def whole_sizes(problem: Problem) -> dict[str, int]:
    """Sizes of the layer over all ranks: a file serves the one-rank view and the real ranks."""
    whole = problem.num_local_experts * problem.table_num_ranks
    return {
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "num_experts": whole,
        "num_topk": problem.num_topk,
    }


def flags_of(problem: Problem, rank_mode: str) -> str:
    """The command-line flags that name a problem and how its ranks run."""
    if rank_mode == "one":
        return problem.flags()
    return f"{problem.flags()} --ranks {problem.num_ranks} --rank-mode {rank_mode}"


def rows_of(frame: pd.DataFrame, problem: Problem, rank_mode: str | None = None) -> pd.DataFrame:
    """Rows of exactly this problem: name, sizes, ranks and rank mode (the problem's when None)."""
    wanted: dict[str, Any] = {
        "problem": problem.name,
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "num_local_experts": problem.num_local_experts,
        "num_topk": problem.num_topk,
        "num_ranks": problem.table_num_ranks,
        "rank_mode": rank_mode or problem.rank_mode,
    }
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    return frame


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The last row of each candidate, of the kernel that was measured last in each cell.

    A cell is what a ranking compares: token count, routing, seed, phase, recipe, source, device,
    capacity (it is part of the kernel).
    """
    if frame.empty:
        return frame
    cell = ["num_tokens", "routing", "seed", "phase", "recipe", "source", "device", "capacity"]
    newest = frame.groupby(cell, sort=False, dropna=False)["kernel"].transform("last")
    return frame[frame["kernel"] == newest].drop_duplicates([*cell, "candidate"], keep="last")


def best_rows(
    frame: pd.DataFrame,
    problem: Problem,
    recipe: Recipe,
    routing: str,
    rank_mode: str | None = None,
) -> list[dict[str, Any]]:
    """The best measured `ok` row of each token count, by token count.

    The lowest ratio to the floor wins: the floor holds the yardstick of its own run, so the ratio
    also compares rows of different runs.

    Raises:
        ValueError: there is no such row.
    """
    rank_mode = rank_mode or problem.rank_mode
    rows = latest(rows_of(frame, problem, rank_mode))
    rows = rows[
        (rows["status"] == "ok")
        & (rows["source"] == "measured")
        & (rows["phase"] == "fused")
        & (rows["recipe"] == str(recipe))
        & (rows["routing"] == routing)
        & rows["median_us"].notna()
    ]
    if rows.empty:
        raise ValueError(
            f"problem {problem.name!r} with {problem.table_num_ranks} ranks "
            f"({rank_mode}), routing {routing!r} and recipe {recipe} has no measured ok "
            f"row. Only measured rows can be frozen: run tl-megamoe search "
            f"{flags_of(problem, rank_mode)} --recipe {recipe} --tokens ... on a GPU."
        )
    ordered = rows.sort_values(["num_tokens", "ratio_to_floor", "median_us"], kind="stable")
    chosen = ordered.drop_duplicates("num_tokens", keep="first")
    return [{str(k): _plain(v) for k, v in row.items()} for row in chosen.to_dict("records")]


def _plain(value: Any) -> Any:
    """A JSON value: nullable and numpy numbers become Python's."""
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def schedule_of(row: Mapping[str, Any]) -> Schedule:
    """The schedule of a row."""
    return Schedule.from_dict({f.name: row[f.name] for f in fields(Schedule)})


def entries_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """JSON entries of rows sorted by tokens; a boundary is the geometric middle of two counts."""
    out = []
    for index, row in enumerate(rows):
        tokens = int(row["num_tokens"])
        if index + 1 < len(rows):
            max_tokens = max(tokens, math.isqrt(tokens * int(rows[index + 1]["num_tokens"])))
        else:
            max_tokens = tokens
        out.append(
            {
                "num_ranks": row["num_ranks"],
                "rank_mode": row["rank_mode"],
                "max_tokens": max_tokens,
                "schedule": schedule_of(row).to_dict(),
                **{name: row[name] for name in EVIDENCE},
            }
        )
    return out


def freeze(
    problem: Problem,
    device: str,
    results: Path,
    schedules: Path,
    *,
    recipe: Recipe | None = None,
    routing: str = "uniform",
    rank_mode: str | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Write a problem's frozen file and its rows of results/<device>/summary.csv.

    Entries of other rank counts or modes in the file stay. An entry serves every recipe: freezing
    the rows of another one replaces it, and its evidence says which was measured.

    Args:
        problem: the layer as the rank runs it.
        device: for example `nvidia-h200`.
        results: folder of the tables.
        schedules: folder of the frozen files.
        recipe: the recipe that was measured; the default one when None.
        routing: the routing that was measured.
        rank_mode: `one`, `virtual` or `real`; the problem's when None.

    Returns:
        The file, and the rows that were frozen.

    Raises:
        ValueError: no measured ok row, or a corrupt or foreign file.
    """
    source = table_path(results, device, problem.name)
    rank_mode = rank_mode or problem.rank_mode
    if not source.exists():
        raise ValueError(
            f"no results at {source}: run tl-megamoe search {flags_of(problem, rank_mode)} "
            "--tokens ... on that device first"
        )
    rows = best_rows(read_table(source), problem, recipe or Recipe(), routing, rank_mode)
    for row in rows:
        schedule_of(row).check(problem, recipe)
    path = schedules / device / f"{problem.name}.json"
    with locked_folder(results / device):
        entries = entries_of(rows)
        if path.exists():
            old = read_frozen(path)
            if old.problem == whole_sizes(problem):
                mine = (problem.table_num_ranks, rank_mode)
                entries += [
                    {
                        "num_ranks": e.num_ranks,
                        "rank_mode": e.rank_mode,
                        "max_tokens": e.max_tokens,
                        "schedule": e.schedule.to_dict(),
                        **e.evidence,
                    }
                    for e in old.entries
                    if (e.num_ranks, e.rank_mode) != mine
                ]
        entries.sort(key=lambda e: (e["num_ranks"], e["rank_mode"], e["max_tokens"]))
        data = {
            "schema": SCHEMA,
            "problem": {"name": problem.name, **whole_sizes(problem)},
            "device": device,
            "entries": entries,
        }
        write_atomically(path, json.dumps(data, indent=1) + "\n")
        known = {name for name in rows[0] if name in COLUMNS}
        update_summary(
            results / device / "summary.csv",
            [{k: r[k] for k in known if k != "schema"} for r in rows],
        )
    return path, rows
