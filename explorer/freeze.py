"""Freeze confirmed candidates into schedules/<device>/<problem>.json for the op.

What runs today (the frozen schedule, or the built-in default) is left only for a candidate that is
faster by more than max(1 %, 2 x spread of the gain) in the rounds of one confirmation. Token counts
that follow each other share an entry where one schedule is within 1 % of the best of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.frozen import SCHEMA, FrozenEntry, FrozenFile, read_frozen
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

from .evidence import MIN_OBSERVATIONS, MIN_SEEDS, Comparison, Confirmed, compare, confirmed
from .table import (
    SUMMARY_COLUMNS,
    locked_folder,
    read_table,
    table_path,
    update_summary,
    write_atomically,
)

MIN_GAIN = 0.01
"""Least gain for which another schedule replaces the one that runs today."""
SPREADS = 2.0
"""The gain must also exceed this many of its own standard errors (`evidence.Comparison`)."""
SAME = 0.01
"""A schedule within this of the best may serve a token count for the sake of one entry."""
VERSIONS = ("device", "card", "tilelang", "torch", "driver", "kernel", "commit", "measured_at")


@dataclass(frozen=True, slots=True)
class Choice:
    """What is frozen for one token count.

    Attributes:
        num_tokens: tokens a rank contributes.
        schedule: the choice.
        evidence: what the file says of it.
        why: one sentence.
        acceptable: schedule -> its ratio to the best, of those that may serve this count too.
        candidates: the confirmed ones, the best first; empty when an old entry is carried over.
        current: what runs today.
    """

    num_tokens: int
    schedule: Schedule
    evidence: dict[str, Any]
    why: str
    acceptable: dict[Schedule, float]
    candidates: tuple[Confirmed, ...] = ()
    current: Schedule | None = None


@dataclass(slots=True)
class Plan:
    """What `freeze` writes.

    Attributes:
        path: the frozen file.
        choices: one for each token count.
        entries: JSON entries of this problem's ranks and mode.
        data: the whole file.
        summary: rows of summary.csv.
        changes: sentences, one a token count.
    """

    path: Path
    choices: list[Choice]
    entries: list[dict[str, Any]]
    data: dict[str, Any]
    summary: list[dict[str, Any]]
    changes: list[str] = field(default_factory=list)


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


def choose(
    num_tokens: int, found: Sequence[Confirmed], current: Schedule, mix: Mapping[str, float]
) -> Choice:
    """The schedule of one token count.

    Args:
        num_tokens: the count.
        found: its confirmed candidates, the best first.
        current: what runs today; it must be beaten.
        mix: routing -> weight.
    """
    best = found[0]
    now = next((c for c in found if c.schedule == current), None)
    chosen = best
    if now is None:
        why = f"{current.name}, which runs today, was not confirmed beside it"
    elif now is best:
        why = "it runs today and is the best confirmed"
    else:
        gain = compare(best, now, mix)
        need = max(MIN_GAIN, SPREADS * gain.spread)
        if gain.gain > need:
            why = f"{_gain(gain)} faster than {now.candidate}, which runs today"
        else:
            chosen = now
            why = f"it runs today; {best.candidate} is {_gain(gain)} faster, {need:.1%} is asked"
    ratios = {c.schedule: c.ratio_to_default / best.ratio_to_default for c in found}
    acceptable = {s: r for s, r in ratios.items() if r <= 1 + SAME}
    acceptable[chosen.schedule] = ratios[chosen.schedule]
    evidence = evidence_of(num_tokens, chosen, found, mix)
    return Choice(num_tokens, chosen.schedule, evidence, why, acceptable, tuple(found), current)


def _gain(found: Comparison) -> str:
    return f"{found.gain:.1%} (spread {found.spread:.1%}, {found.num_rounds} rounds)"


def evidence_of(
    num_tokens: int, chosen: Confirmed, found: Sequence[Confirmed], mix: Mapping[str, float]
) -> dict[str, Any]:
    """What a frozen cell says of how it was measured; times in microseconds, ratios plain."""
    others = [c for c in found if c is not chosen]
    out: dict[str, Any] = {
        "num_tokens": num_tokens,
        "median_us": _digits(chosen.median_us),
        "p10_us": _digits(chosen.p10_us),
        "p90_us": _digits(chosen.p90_us),
        "ratio_to_floor": _digits(chosen.ratio_to_floor),
        "ratio_to_default": _digits(chosen.ratio_to_default),
        "spread": _digits(chosen.spread),
        "yardstick_tflops": _digits(chosen.yardstick_tflops),
        "num_observations": chosen.num_observations,
        "num_seeds": chosen.num_seeds,
        "best": found[0].candidate,
        "ratio_to_best": _digits(chosen.ratio_to_default / found[0].ratio_to_default),
        "run": chosen.run,
    }
    if others:
        margin = compare(chosen, others[0], mix)
        out["runner_up"] = others[0].candidate
        out["margin"] = _digits(margin.gain)
        out["margin_spread"] = _digits(margin.spread)
    last = chosen.rows.iloc[-1]
    out.update({name: str(last[name]) for name in VERSIONS})
    return out


def _digits(value: float) -> float | None:
    """Six digits are more than was measured; JSON has no NaN."""
    return None if math.isnan(value) else float(f"{value:.6g}")


def merge_choices(choices: Sequence[Choice]) -> list[tuple[Schedule, list[Choice]]]:
    """Token counts in order, joined as long as one schedule is acceptable to all of a group."""
    groups: list[tuple[dict[Schedule, float], list[Choice]]] = []
    for choice in sorted(choices, key=lambda c: c.num_tokens):
        if groups:
            shared = {
                s: max(worst, choice.acceptable[s])
                for s, worst in groups[-1][0].items()
                if s in choice.acceptable
            }
            if shared:
                groups[-1] = shared, [*groups[-1][1], choice]
                continue
        groups.append((dict(choice.acceptable), [choice]))
    out = []
    for shared, members in groups:
        chosen = [c.schedule for c in members]
        # What most of its counts chose by themselves, then the least loss.
        best = min(shared, key=lambda s: (-chosen.count(s), shared[s], s.name))
        out.append((best, members))
    return out


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
    source = table_path(results, device, problem.name)
    if not source.exists():
        raise ValueError(
            f"no results at {source}: run tl-megamoe search {flags_of(problem, rank_mode)} "
            "--tokens ... on that device first"
        )
    rows = rows_of(read_table(source, device=device), problem, rank_mode)
    rows = rows[(rows["phase"] == "fused") & (rows["recipe"] == str(recipe))]
    cells = {
        tokens: found
        for tokens in sorted({int(n) for n in rows["num_tokens"]})
        if (found := confirmed(rows[rows["num_tokens"] == tokens], mix))
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
        old = None
    mine = _own_entries(old, problem, rank_mode)
    choices = []
    for num_tokens, found in cells.items():
        entry = next((e for e in mine if num_tokens <= e.max_tokens), mine[-1] if mine else None)
        current = (
            default_schedule(problem, num_tokens, recipe=recipe)
            if entry is None
            else entry.schedule
        )
        choices.append(choose(num_tokens, found, current, mix))
    choices += [c for c in _carried(mine) if c.num_tokens not in cells]
    groups = merge_choices(choices)
    common = {"recipe": str(recipe), "routing": mix_text(mix), "table": _relative(source)}
    entries = _entries(groups, problem, rank_mode, common, mix)
    others = [] if old is None else [e for e in old.entries if e not in mine]
    everything = [*entries, *(_entry_json(e) for e in others)]
    everything.sort(key=lambda e: (e["num_ranks"], e["rank_mode"], e["max_tokens"]))
    plan = Plan(
        path=path,
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
    plan.changes = _changes(groups)
    for schedule, _ in groups:
        schedule.check(problem, recipe)
    return plan


def write_freeze(plan: Plan, results: Path, device: str) -> None:
    """Write a plan: the frozen file and the problem's rows of results/<device>/summary.csv."""
    with locked_folder(results / device):
        write_atomically(plan.path, json.dumps(plan.data, indent=1) + "\n")
        update_summary(results / device / "summary.csv", plan.summary)


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


def _carried(entries: Sequence[FrozenEntry]) -> list[Choice]:
    """Token counts of old entries, for those that no row confirms."""
    out = []
    for entry in entries:
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
            last = {str(k): _plain(v) for k, v in found.rows.iloc[-1].to_dict().items()}
            row = {name: last[name] for name in SUMMARY_COLUMNS if name in last}
            for name in ("floor_us", "tflops", "hbm_gbs", "nvlink_gbs"):
                row[name] = _plain(found.rows[name].median())
            for name in ("median_us", "p10_us", "p90_us", "ratio_to_floor", "yardstick_tflops"):
                row[name] = getattr(found, name)
            row.pop("schema", None)
            out.append(row)
    return out


def _plain(value: Any) -> Any:
    """Nullable and numpy numbers become Python's."""
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


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
