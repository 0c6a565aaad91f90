"""Freeze confirmed candidates into schedules/<device>/<problem>.json for the op (choosing.py).

Planning reads the table and the file that is there, and writes nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import SCHEMA, FrozenEntry, FrozenFile, lookup, read_frozen
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

from .choosing import SAME, VERSIONS, Choice, choose, evidence_of, merge_choices, plain
from .evidence import MIN_OBSERVATIONS, MIN_SEEDS, Confirmed, confirmed
from .space import default_of, frozen_as_run
from .table import (
    SUMMARY_COLUMNS,
    SUMMARY_NAME,
    locked_folder,
    read_table,
    table_path,
    update_summary,
    write_atomically,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Plan:
    """What `freeze` writes.

    Attributes:
        path: the frozen file.
        tables: folder of the table that it rests on.
        choices: one for each token count.
        entries: JSON entries of this problem's ranks and mode.
        data: the whole file.
        summary: rows of summary.csv.
        changes: sentences, one a token count.
        carried: token counts whose rows of summary.csv stay as they are.
    """

    path: Path
    tables: Path
    choices: list[Choice]
    entries: list[dict[str, Any]]
    data: dict[str, Any]
    summary: list[dict[str, Any]]
    changes: list[str] = field(default_factory=list)
    carried: set[int] = field(default_factory=set)


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
    """The last screened row of each candidate, of the kernel that was measured last in each cell.

    A cell is what a ranking compares: token count, routing, seed, phase, recipe, source, device,
    capacity (it is part of the kernel), stage.
    """
    if frame.empty:
        return frame
    cell = ["num_tokens", "routing", "seed", "phase", "recipe", "source", "device", "capacity"]
    cell.append("stage")
    newest = frame.groupby(cell, sort=False, dropna=False)["kernel"].transform("last")
    return frame[frame["kernel"] == newest].drop_duplicates([*cell, "candidate"], keep="last")


def plan_freeze(
    problem: Problem,
    device: str,
    results: Path,
    schedules: Path,
    *,
    recipe: Recipe | None = None,
    mix: Mapping[str, float] | None = None,
    rank_mode: str | None = None,
) -> Plan:
    """Decide what to freeze; writes nothing.

    Entries of other rank counts or modes in the file stay, and so do token counts that no row
    confirms any more. An entry serves every recipe, and its evidence says which was measured.

    Args:
        problem: the layer as the rank runs it.
        device: for example `nvidia-h200`.
        results: folder of the tables.
        schedules: folder of the frozen files.
        recipe: the recipe that was measured; the default one when None.
        mix: routing -> weight in the ranking; uniform routing alone when None.
        rank_mode: `one`, `virtual` or `real`; the problem's when None.

    Raises:
        ValueError: no table, no confirmed row, or a corrupt or foreign file.
    """
    rank_mode, recipe = rank_mode or problem.rank_mode, recipe or Recipe()
    mix = dict(mix or {"uniform": 1.0})
    source = table_path(results, device, problem.name, rank_mode, problem.num_ranks)
    if not source.exists():
        raise ValueError(
            f"no results at {source}: run tl-megamoe search {flags_of(problem, rank_mode)} "
            "--tokens ... on that device first"
        )
    rows = rows_of(read_table(source, device=device), problem, rank_mode)
    rows = rows[(rows["phase"] == "fused") & (rows["recipe"] == str(recipe))]
    by_count = {
        n: rows[rows["num_tokens"] == n] for n in sorted({int(n) for n in rows["num_tokens"]})
    }
    cells = {
        n: found for n, own in by_count.items() if (found := _valid(own, mix, problem, recipe))
    }
    if not cells:
        raise ValueError(
            f"problem {problem.name!r} with {problem.table_num_ranks} ranks ({rank_mode}), routing "
            f"{mix_text(mix)!r} and recipe {recipe} has no confirmed row in {source}: only "
            f"candidates with {MIN_OBSERVATIONS} observations of {MIN_SEEDS} seeds are frozen. Run "
            f"tl-megamoe search {flags_of(problem, rank_mode)} --recipe {recipe} --tokens ... on a "
            "GPU; it confirms its best candidates."
        )
    path = schedules / device / f"{problem.name}.json"
    old = read_frozen(path) if path.exists() else None
    if old is not None and old.problem != whole_sizes(problem):
        raise ValueError(
            f"{path} holds another layer: {old.problem}, not {whole_sizes(problem)}. Give the "
            "problem a name of its own, in a TOML file, or move that file away"
        )
    mine = _own_entries(old, problem, rank_mode)
    carried = {c.num_tokens: c for c in _carried(mine, problem, recipe)}
    choices, skipped = [], []
    for num_tokens, found in cells.items():
        current = _current(problem, device, num_tokens, schedules, recipe, rank_mode)
        failed = _failure(by_count[num_tokens], current, found[0].run)
        choice = choose(num_tokens, found, current, mix, failed)
        if choice is not None:
            choices.append(choice)
        elif num_tokens not in carried:
            skipped.append(
                f"{num_tokens:>6} tokens  nothing is frozen: {current.name}, which runs today, was "
                f"not timed in run {found[0].run}; search again"
            )
        else:
            why = f"it runs today and was not timed in run {found[0].run}; search again"
            choices.append(replace(carried[num_tokens], why=why))
    choices += [c for n, c in carried.items() if n not in cells]
    if not choices:
        raise ValueError("nothing can be frozen. " + "; ".join(t.strip() for t in skipped))
    groups = merge_choices(choices)
    common = {"recipe": str(recipe), "routing": mix_text(mix), "table": _relative(source)}
    entries = _entries(groups, problem, rank_mode, common, mix)
    others = [] if old is None else [e for e in old.entries if e not in mine]
    everything = [*entries, *(_entry_json(e) for e in others)]
    everything.sort(key=lambda e: (e["num_ranks"], e["rank_mode"], e["max_tokens"]))
    plan = Plan(
        path=path,
        tables=source.parent,
        choices=choices,
        entries=entries,
        data={
            "schema": SCHEMA,
            "problem": {"name": problem.name, **whole_sizes(problem)},
            "device": device,
            "entries": everything,
        },
        summary=_summary_rows(groups),
    )
    plan.changes = [*_changes(groups), *skipped]
    plan.carried = {c.num_tokens for c in choices if not c.candidates}
    return plan


def write_freeze(plan: Plan) -> None:
    """Write a plan: the frozen file, and the problem's rows of the summary beside its table."""
    with locked_folder(plan.tables):
        write_atomically(plan.path, json.dumps(plan.data, indent=1) + "\n")
        update_summary(plan.tables / SUMMARY_NAME, plan.summary, plan.carried)


def mix_text(mix: Mapping[str, float]) -> str:
    """A routing mix as the command line takes it."""
    if len(mix) == 1:
        return next(iter(mix))
    return ",".join(f"{routing}={weight:g}" for routing, weight in mix.items())


def _relative(path: Path) -> str:
    """The table as a reader of the repository finds it: its last three parts."""
    return "/".join(path.parts[-3:])


def _own_entries(old: FrozenFile | None, problem: Problem, rank_mode: str) -> list[FrozenEntry]:
    wanted = (problem.table_num_ranks, rank_mode)
    entries = [] if old is None else old.entries
    return sorted(
        (e for e in entries if (e.num_ranks, e.rank_mode) == wanted), key=lambda e: e.max_tokens
    )


def _entry_json(entry: FrozenEntry) -> dict[str, Any]:
    return {
        "num_ranks": entry.num_ranks,
        "rank_mode": entry.rank_mode,
        "max_tokens": entry.max_tokens,
        "schedule": entry.schedule.to_dict(),
        **entry.evidence,
    }


def _valid(
    rows: pd.DataFrame, mix: Mapping[str, float], problem: Problem, recipe: Recipe
) -> list[Confirmed]:
    """Confirmed candidates that today's rules still allow."""
    return [c for c in confirmed(rows, mix) if not c.schedule.violations(problem, recipe)]


def _current(
    problem: Problem,
    device: str,
    num_tokens: int,
    schedules: Path,
    recipe: Recipe,
    rank_mode: str,
) -> Schedule:
    """What the op runs today, as the search confirms it."""
    gpu_ranks = problem.num_ranks if rank_mode == "virtual" else 1
    default = default_of(problem, num_tokens, recipe, gpu_ranks)
    found = lookup(problem, device, num_tokens, root=schedules, rank_mode=rank_mode)
    if found is None or found.schedule.violations(problem, recipe):
        return default
    return frozen_as_run(found.schedule, default, gpu_ranks)


def _failure(rows: pd.DataFrame, current: Schedule, run: str) -> str:
    """How a schedule failed in a run; empty if it did not."""
    mine = rows[(rows["run"] == run) & (rows["candidate"] == current.name)]
    mine = mine[~mine["status"].isin(["ok", "duplicate"])]
    return "" if mine.empty else f"{mine.iloc[-1]['status']} ({mine.iloc[-1]['reason']})"


def _carried(entries: Sequence[FrozenEntry], problem: Problem, recipe: Recipe) -> list[Choice]:
    """Token counts of old entries, for those that no row confirms; what broke a rule is left."""
    out = []
    for entry in entries:
        broken = entry.schedule.violations(problem, recipe)
        if broken:
            logger.warning("up to %d tokens: dropped: %s", entry.max_tokens, "; ".join(broken))
            continue
        for cell in entry.evidence.get("cells") or [entry.evidence]:
            tokens = int(cell.get("num_tokens", entry.max_tokens))
            why = "kept from the file: no row confirms this token count"
            accepted = {entry.schedule: 1.0}
            out.append(Choice(tokens, entry.schedule, dict(cell), why, accepted))
    return out


def _entries(
    groups: Sequence[tuple[Schedule, list[Choice]]],
    problem: Problem,
    rank_mode: str,
    common: Mapping[str, Any],
    mix: Mapping[str, float],
) -> list[dict[str, Any]]:
    """JSON entries; a boundary between two is the geometric middle of their token counts."""
    out = []
    for index, (schedule, members) in enumerate(groups):
        last = members[-1].num_tokens
        if index + 1 < len(groups):
            last = max(last, math.isqrt(last * groups[index + 1][1][0].num_tokens))
        cells = [_cell_of(schedule, member, mix) for member in members]
        newest = max(cells, key=lambda cell: str(cell.get("measured_at", "")))
        out.append(
            {
                "num_ranks": problem.table_num_ranks,
                "rank_mode": rank_mode,
                "max_tokens": last,
                "schedule": schedule.to_dict(),
                "candidate": schedule.name,
                **common,
                **{name: newest.get(name, "") for name in VERSIONS},
                "cells": cells,
            }
        )
    return out


def _confirmed_as(schedule: Schedule, member: Choice) -> Confirmed | None:
    return next((c for c in member.candidates if c.schedule == schedule), None)


def _cell_of(schedule: Schedule, member: Choice, mix: Mapping[str, float]) -> dict[str, Any]:
    found = _confirmed_as(schedule, member)
    if found is None:
        return member.evidence
    return evidence_of(member.num_tokens, found, member.candidates, mix)


def _summary_rows(groups: Sequence[tuple[Schedule, list[Choice]]]) -> list[dict[str, Any]]:
    out = []
    for schedule, members in groups:
        for member in members:
            found = _confirmed_as(schedule, member)
            if found is None:
                continue
            last = {str(k): plain(v) for k, v in found.rows.iloc[-1].to_dict().items()}
            row = {name: last[name] for name in SUMMARY_COLUMNS if name in last}
            for name in ("floor_us", "tflops", "hbm_gbs", "nvlink_gbs"):
                row[name] = plain(found.rows[name].median())
            for name in ("median_us", "p10_us", "p90_us", "ratio_to_floor", "yardstick_tflops"):
                row[name] = getattr(found, name)
            row.pop("schema", None)
            out.append(row)
    return out


def _changes(groups: Sequence[tuple[Schedule, list[Choice]]]) -> list[str]:
    out = []
    for schedule, members in groups:
        for member in members:
            now = member.current
            if now is None or now == schedule:
                text = f"{schedule.name} stays: {member.why}"
            elif schedule == member.schedule:
                text = f"{now.name} -> {schedule.name}: {member.why}"
            else:
                ratio = member.acceptable[schedule]
                text = (
                    f"{now.name} -> {schedule.name}: within {SAME:.0%} of the best here "
                    f"({ratio:.3f} of it), and one entry with its neighbours"
                )
            out.append(f"{member.num_tokens:>6} tokens  {text}")
    return out
