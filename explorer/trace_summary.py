"""The numbers of a traced launch: where its time went, by phase, by role and by event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from .bench import render
from .trace import PHASES, Trace, roles_of

SHARES = {
    "K loop": ("K loop",),
    "finish": ("finish",),
    "move": ("route", "exchange counts", "pull", "load"),
    "combine": ("combine", "reset"),
    "wait": (
        *("wait for counts", "wait for rows", "wait for turn", "wait for stage"),
        *("wait to finish", "wait for all tiles"),
    ),
}
"""Column of the table of roles -> the events that it adds up."""
FIRST_WORK = {
    "dispatch": ("route", "exchange counts", "pull"),
    "linear1": ("K loop", "finish"),
    "linear2": ("K loop", "finish"),
    "combine": ("combine",),
}
"""What counts as work of a phase: from the first begin to the last end of these it lasts."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The tables of a launch; times in microseconds unless a name says otherwise.

    Attributes:
        launch: by name: `span_us`; `first_tile_us`, from the first stamp to the first K loop;
            `combine_us`, first begin to last end of the sum; `tail_us`, from the first to the last
            block's end; `sm_clock_mhz`; `num_blocks`; `num_lost` events.
        phases: by phase, `first_us`, `last_us`, `span_us`: from the first to the last of its work.
        roles: by role, the shares of the launch's span, over all blocks, that SHARES names, and
            `done`, the time before its first and behind its last stamp.
        k_loops: by phase, `tiles`, and a tile's and a K block's mean in `tile_ns`, `tile_clocks`,
            `k_block_ns`, `k_block_clocks`.
        events: by phase, role and event, `count`, `share` of the span of all blocks, `mean_ns`,
            `p50_ns`, `p90_ns`, `max_ns`, `mean_clocks`.
    """

    launch: dict[str, float]
    phases: pd.DataFrame
    roles: pd.DataFrame
    k_loops: pd.DataFrame
    events: pd.DataFrame


def summarise(trace: Trace) -> Summary:
    """The tables of a launch.

    Raises:
        ValueError: nothing was stamped.
    """
    events = trace.events
    if events.empty:
        raise ValueError("the launch stamped no event: was it the profiling build that ran?")
    events = events.assign(ns=events["end_ns"] - events["begin_ns"])
    span = int(events["end_ns"].max())
    blocks = events["block"].nunique()
    loops = events[events["event"] == "K loop"]
    ends = events.groupby("block")["end_ns"].max()
    sums = events[events["event"] == "combine"]
    launch = {
        "span_us": span / 1000,
        "first_tile_us": loops["begin_ns"].min() / 1000,
        "combine_us": (sums["end_ns"].max() - sums["begin_ns"].min()) / 1000,
        "tail_us": (ends.max() - ends.min()) / 1000,
        "sm_clock_mhz": 1000 * float(events["clocks"].sum()) / max(1, int(events["ns"].sum())),
        "num_blocks": float(blocks),
        "num_lost": float(trace.num_lost),
    }
    return Summary(
        {name: float(value) for name, value in launch.items()},
        _phases(events),
        _roles(events, trace, span * blocks),
        _k_loops(loops, trace),
        _events(events, span * blocks),
    )


def _phases(events: pd.DataFrame) -> pd.DataFrame:
    rows = {}
    for phase in PHASES:
        work = events[(events["phase"] == phase) & events["event"].isin(FIRST_WORK[phase])]
        first, last = work["begin_ns"].min() / 1000, work["end_ns"].max() / 1000
        rows[phase] = {"first_us": first, "last_us": last, "span_us": last - first}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("phase")


def _roles(events: pd.DataFrame, trace: Trace, total: int) -> pd.DataFrame:
    by_event = events.groupby(["role", "event"])["ns"].sum().unstack(fill_value=0)
    rows = {}
    for role in roles_of(trace.schedule):
        if role in by_event.index:
            ns: dict[Any, float] = by_event.loc[role].to_dict()
            row = {
                share: sum(ns.get(name, 0.0) for name in names) / total
                for share, names in SHARES.items()
            }
            rows[role] = {**row, "done": 1 - sum(row.values())}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("role")


def _k_loops(loops: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    problem, schedule = trace.problem, trace.schedule
    k_blocks = {
        "linear1": problem.hidden // 128 * (256 // schedule.linear1_block_n),
        "linear2": problem.intermediate // 128,
    }
    rows = {}
    for phase, count in k_blocks.items():
        of_phase = loops[loops["phase"] == phase]
        ns, clocks = of_phase["ns"].mean(), of_phase["clocks"].mean()
        rows[phase] = {
            "tiles": len(of_phase.drop_duplicates(["pool_block", "tile"])),
            "tile_ns": ns,
            "tile_clocks": clocks,
            "k_block_ns": ns / count,
            "k_block_clocks": clocks / count,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("phase")


def _events(events: pd.DataFrame, total: int) -> pd.DataFrame:
    order = {phase: place for place, phase in enumerate(PHASES)}
    grouped = events.groupby(["phase", "role", "event"], sort=False)
    ns = grouped["ns"]
    table = pd.DataFrame(
        {
            "count": ns.size(),
            "share": ns.sum() / total,
            "mean_ns": ns.mean(),
            "p50_ns": ns.quantile(0.5),
            "p90_ns": ns.quantile(0.9),
            "max_ns": ns.max(),
            "mean_clocks": grouped["clocks"].mean(),
        }
    )
    keys = table.index.get_level_values("phase").map(order)
    return table.iloc[keys.argsort(kind="stable")]


# ---- text and CSV


def render_summary(summary: Summary) -> str:
    """The tables as text."""
    launch = summary.launch
    facts = (
        ("span of the launch", "span_us", f"us, {launch['num_blocks']:.0f} blocks"),
        ("first tile starts", "first_tile_us", "us"),
        ("combine", "combine_us", "us"),
        ("tail", "tail_us", "us from the first block's end on"),
        ("SM clock", "sm_clock_mhz", "MHz"),
    )
    lines = [fact(name, launch[measure], unit) for name, measure, unit in facts]
    if launch["num_lost"]:
        lines.append(f"{launch['num_lost']:.0f} events are lost: the tables lack them")
    tables = [
        _table(summary.phases, "phase", "{:.1f}"),
        _table(100 * summary.roles, "role: % of span", "{:.1f}"),
        _table(summary.k_loops, "K loop", "{:.0f}"),
        _table(
            summary.events.assign(share=100 * summary.events["share"]).rename(
                columns={"share": "% of span"}
            ),
            ("phase", "role", "event"),
            "{:.0f}",
            {"% of span": "{:.1f}"},
        ),
    ]
    return "\n\n".join(["\n".join(lines), *tables])


def fact(name: str, value: float, unit: str) -> str:
    """A line of the text's head; a value that there is none of is a dash."""
    number = "-" if pd.isna(value) else f"{value:.1f}"
    return f"{name:<21} {number:>9} {unit}"


def _table(
    frame: pd.DataFrame,
    names: str | tuple[str, ...],
    number: str,
    numbers: dict[str, str] | None = None,
) -> str:
    heads = (names,) if isinstance(names, str) else names
    formats = [(numbers or {}).get(str(column), number) for column in frame.columns]
    rows = [(*heads, *map(str, frame.columns))]
    for key, values in zip(frame.index, frame.to_numpy(), strict=True):
        cells = [
            "-" if pd.isna(value) else text.format(value)
            for text, value in zip(formats, values, strict=True)
        ]
        rows.append((*((key,) if isinstance(key, str) else key), *cells))
    return render(rows)


def summary_rows(summary: Summary) -> pd.DataFrame:
    """The tables as one: columns `table`, `subject`, `measure`, `value`."""
    rows: list[tuple[str, str, str, float]] = [
        ("launch", "", name, value) for name, value in summary.launch.items()
    ]
    for table in ("phases", "roles", "k_loops", "events"):
        frame: pd.DataFrame = getattr(summary, table)
        for key, values in zip(frame.index, frame.to_dict("records"), strict=True):
            subject = key if isinstance(key, str) else "/".join(key)
            rows += [(table, subject, str(name), float(value)) for name, value in values.items()]
    return pd.DataFrame(rows, columns=["table", "subject", "measure", "value"])
