"""The tables and figures of one section of a results page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from . import figures
from .document import Block, Figure, Heading, Table, Words
from .glossary import MEDIANS
from .ranking import Best, by_tokens, default_name, ranked, screened
from .schema import STATUSES
from .sections import Section, Values, sensitivity_of, traces_of, which_ran

MAX_REASONS = 2
BENCH_MARKERS = ("s", "^", "v", "P", "X")
DRIFTED = "yardstick_drift_blocks"
"""In the notes of a row: blocks that were kept although their two yardsticks differ."""


def number(value: Any, spec: str) -> str:
    """A number as text; `-` for none."""
    if value is None or pd.isna(value):
        return "-"
    return format(float(value), spec)


def section_blocks(section: Section, colour: str, *, draw: bool) -> list[Block]:
    """The tables and figures of a section.

    Args:
        section: what to tell.
        colour: of the problem in figures.
        draw: whether to draw figures.
    """
    blocks: list[Block] = [Heading(3, f"{section.problem}: {section.title}")]
    if section.best:
        blocks.append(_best_table(section))
        if draw and len(section.best) > 1:
            blocks += _line_figures(section, colour)
        blocks.append(_detail_table(section))
    elif section.setting["source"] == "model":
        blocks.append(_model_table(section.rows))
    else:
        blocks.append(Words("No candidate was timed successfully here."))
    if section.bench:
        blocks.append(_bench_table(section))
    blocks.append(_status_table(section.rows))
    values = sensitivity_of(section.rows)
    if values:
        if draw:
            blocks.append(_sensitivity_figure(section, values))
        blocks.append(_sensitivity_table(values))
    return blocks


def _best_table(section: Section) -> Table:
    columns = ["tokens", "evidence", "us", "floor us", "/ floor", "default us", "/ default"]
    bench, frozen = bool(section.bench), bool(section.frozen)
    columns += ["ours / best baseline"] if bench else []
    columns += ["frozen / floor", "frozen schedule is"] if frozen else []
    rows = []
    for tokens, best in section.best.items():
        row = [
            str(tokens),
            "confirmed" if best.stage == "confirm" else "screened",
            number(best.median_us, ".1f"),
            number(best.floor_us, ".1f"),
            number(best.ratio_to_floor, ".3f"),
            number(best.default_us, ".1f"),
            number(best.ratio_to_default, ".3f"),
        ]
        if bench:
            row.append(_best_baseline(section.bench.get(tokens)))
        if frozen:
            old = section.frozen.get(tokens)
            same = old is not None and old.candidate == best.candidate
            row += ["-", "none"]
            if old is not None:
                ratio = number(old.ratio_to_floor, ".3f")
                row[-2:] = [ratio, "the same" if same else "another"]
        rows.append((*row, best.candidate))
    return Table(
        (*columns, "schedule"),
        tuple(rows),
        "The best schedule of each token count against its floor, the built-in default schedule "
        "beside it in the same rounds"
        + (", and the frozen schedule with the `/ floor` that its file records" if frozen else "")
        + ". Times in microseconds, lower is better; `/ x` is the time divided by that of x. "
        + MEDIANS
        + (
            " `ours / best baseline` is of the bench, a run of its own: our schedule there over "
            "the fastest other implementation beside it."
            if bench
            else ""
        ),
        frozenset({"schedule"}),
    )


def _best_baseline(beside: pd.DataFrame | None) -> str:
    """Our time over that of the baseline that comes off best, and its name."""
    if beside is None:
        return "-"
    first = beside.sort_values("ratio_to_baseline").iloc[-1]
    return f"{number(first['ratio_to_baseline'], '.3f')} ({first['baseline']})"


def _unsteady(rows: pd.DataFrame, tokens: int, best: Best) -> str:
    """Of the rows of a confirmation those that were kept although the yardstick drifted."""
    if best.stage != "confirm":
        return "-"
    mine = (rows["num_tokens"] == tokens) & (rows["stage"] == "confirm") & (rows["run"] == best.run)
    notes = rows.loc[mine, "notes"]
    return f"{int(notes.str.contains(DRIFTED, regex=False).sum())} of {len(notes)}"


def _spread(rows: pd.DataFrame, tokens: int, best: Best) -> str:
    """In percent; the default has none to itself."""
    first = rows[rows["num_tokens"] == tokens].iloc[0]
    if best.candidate == default_name(first):
        return "-"
    return number(100 * best.spread, ".2f")


def _detail_table(section: Section) -> Table:
    rows = [
        (
            str(tokens),
            f"{number(best.p10_us, '.1f')} - {number(best.p90_us, '.1f')}",
            _spread(section.rows, tokens, best),
            f"{best.num_rounds} / {best.num_seeds}",
            _unsteady(section.rows, tokens, best),
            number(best.yardstick_tflops, ".0f"),
            number(best.tflops, ".0f"),
            number(best.hbm_gbs, ".0f"),
            best.run or "-",
            best.card or "-",
            best.kernel or "-",
        )
        for tokens, best in section.best.items()
    ]
    return Table(
        (
            "tokens",
            "p10 - p90 us",
            "spread %",
            "rounds / seeds",
            "unsteady",
            "yardstick TFLOP/s",
            "TFLOP/s",
            "GB/s",
            "run",
            "card",
            "kernel",
        ),
        tuple(rows),
        "How far to trust those times, and what rates they mean. Spread is the robust standard "
        "deviation of `/ default` from round to round of a confirmation; a screened row has none, "
        "and the default's is zero by construction (`-`). `unsteady` counts the rows of that "
        "confirmation, over all its candidates, that were kept after repeats although the "
        "yardstick before and after differed by more than the protocol allows: the card's clock "
        "moved while they ran. Medians over rounds bear some of them; with many, trust the last "
        "percent less.",
        frozenset({"run", "card", "kernel"}),
    )


def _model_table(rows: pd.DataFrame) -> Table:
    out = []
    for tokens, own in by_tokens(screened(rows)):
        good = own[own["status"] == "ok"]
        if len(good):
            first = ranked(good, "model").iloc[0]
            held = ["predicted_us", "registers", "smem_bytes"]
            numbers = [number(first[name], ".1f" if name == held[0] else ".0f") for name in held]
            out.append((str(tokens), *numbers, str(first["candidate"])))
    return Table(
        ("tokens", "predicted us", "registers", "smem bytes", "schedule"),
        tuple(out),
        "Nothing was timed: there was no GPU. The best of each token count by the cost model.",
        frozenset({"schedule"}),
    )


def _bench_table(section: Section) -> Table:
    rows = [
        (
            str(tokens),
            row["baseline"],
            row["baseline_version"],
            str(row["n"]),
            number(row["baseline_us"], ".1f"),
            number(row["median_us"], ".1f"),
            f"{number(row['p10_us'], '.1f')} - {number(row['p90_us'], '.1f')}",
            number(row["ratio_to_baseline"], ".3f"),
            number(row["ratio_to_floor"], ".3f"),
            number(row["yardstick_tflops"], ".0f"),
            number(row["power_w"], ".0f"),
            which_ran(row["candidate"], section.frozen_name(tokens)),
            row["candidate"],
        )
        for tokens, beside in section.bench.items()
        for row in beside.to_dict("records")
    ]
    return Table(
        (
            "tokens",
            "baseline",
            "version",
            "n",
            "its us",
            "our us",
            "our p10 - p90",
            "ours / its",
            "our / floor",
            "yardstick TFLOP/s",
            "watts",
            "ours was",
            "schedule",
        ),
        tuple(rows),
        "Bench: our schedule beside others on one card, interleaved; medians over n rows (of other "
        "seeds). Below 1 in `ours / its`, ours is faster. These are runs of their own: their times "
        "do not compare with the tables above; `/ floor` does up to about 512 tokens, and above "
        "that within the noise of the yardstick. Watts are read when a row's timing starts.",
        frozenset({"schedule"}),
    )


def _status_table(rows: pd.DataFrame) -> Table:
    """Where each status fell, over the candidates of the screen and all other rows."""
    tokens = sorted({int(t) for t in rows["num_tokens"]})
    last = screened(rows)
    shown = pd.concat([last, rows[rows["stage"] != "screen"]])
    out = []
    for status in (s for s in STATUSES if (shown["status"] == s).any()):
        own = shown[shown["status"] == status]
        per_count = own["num_tokens"].value_counts()
        reasons = own.loc[own["reason"] != "", "reason"].value_counts()
        told = [f"{reason} ({count} x)" for reason, count in reasons.head(MAX_REASONS).items()]
        if len(reasons) > MAX_REASONS:
            told.append(f"{len(reasons) - MAX_REASONS} other reasons")
        counts = [str(int(per_count.get(t, 0))) for t in tokens]
        out.append((status, *counts, str(len(own)), "; ".join(told)))
    return Table(
        ("status", *(f"{t} tokens" for t in tokens), "all", "commonest reason"),
        tuple(out),
        "Where each status fell: every screened candidate of the last kernel once, and every row "
        "of the other stages. `duplicate` is a candidate whose generated code equals another's; "
        "it was not timed and is no failure.",
    )


# ---- figures over token counts


def _line_figures(section: Section, colour: str) -> list[Block]:
    where = f"{section.title}, on {section.rows['device'].iloc[0]}"
    tokens = list(section.best)
    out: list[Block] = []
    for what, floor in (("time", False), ("ratio", True)):
        lines = _lines(section, colour, relative=floor)
        if not lines:
            continue
        words = "time over the floor (1 is the floor)" if floor else "time of the layer, us"
        png = figures.lines_figure(
            f"{section.problem}: {words}",
            where + "; lower is better",
            lines,
            log_y=not floor,
            line_at=1.0 if floor else None,
            line_text="floor",
        )
        told = ", ".join(
            f"{t} tokens {number(line.points.get(t), '.3f' if floor else '.1f')}"
            for line in lines[:1]
            for t in tokens
        )
        caption = (
            "The same times divided by the floor of their own run. Lone markers are of other runs: "
            "above about 512 tokens the floor is the yardstick's, so they compare with the line "
            "within its noise alone. What lies near 1 has little left to gain. "
            "Bars reach from p10 to p90."
            if floor
            else "Both axes are logarithmic: at 45 degrees the time doubles with the tokens. Bars "
            "on the best reach from p10 to p90. Lone markers are of other runs (the bench, the "
            "frozen file): their times do not compare with the lines to the percent."
        )
        name = f"{section.problem}-{what}-{section.name}"
        out.append(Figure(name, png, f"{words} against tokens. Best: {told}", caption))
    return out


def _lines(section: Section, colour: str, *, relative: bool) -> list[figures.Line]:
    """Best, default, baselines, frozen; over the floor of their own run if `relative`.

    What is of another run than the best is drawn as markers.
    """

    def scaled(values: Mapping[int, float]) -> dict[int, float]:
        found = {
            t: v / (section.best[t].floor_us if relative else 1.0)
            for t, v in values.items()
            if t in section.best
        }
        return {t: v for t, v in found.items() if math.isfinite(v)}

    best = section.best
    floors = {t: b.floor_us for t, b in best.items() if math.isfinite(b.floor_us)}
    ratios = {t: b.ratio_to_floor for t, b in best.items() if math.isfinite(b.ratio_to_floor)}
    times = ratios if relative else scaled({t: b.median_us for t, b in best.items()})
    part = {t: (b.p10_us / b.median_us, b.p90_us / b.median_us) for t, b in best.items()}
    bands = {
        t: (times[t] * low, times[t] * high)
        for t, (low, high) in part.items()
        if t in times and math.isfinite(low + high)
    }
    lines = [figures.Line("best", times, colour, "-", 2.2, "o", bands)]
    default = scaled({t: b.default_us for t, b in best.items()})
    lines.append(figures.Line("default schedule", default, figures.SOFT, "-", 1.1, "."))
    baselines: dict[str, dict[int, float]] = {}
    for tokens, beside in section.bench.items():
        for row in beside.to_dict("records"):
            value = row["baseline_us"] / (row["floor_us"] if relative else 1.0)
            if math.isfinite(value):
                baselines.setdefault(row["baseline"], {})[tokens] = value
    palette = figures.REFERENCE_COLOURS
    for index, (name, points) in enumerate(sorted(baselines.items())):
        tint = palette[index % len(palette)]
        marker = BENCH_MARKERS[index % len(BENCH_MARKERS)]
        lines.append(figures.Line(f"{name} (bench)", points, tint, "none", 1.0, marker))
    field = "ratio_to_floor" if relative else "median_us"
    frozen = {
        t: float(value)
        for t, f in section.frozen.items()
        if (value := getattr(f, field)) is not None
    }
    lines.append(figures.Line("frozen (its file)", frozen, figures.INK, "none", 1.0, "D"))
    if not relative:
        lines.append(figures.Line("floor", floors, figures.FLOOR_COLOUR, (0, (4, 3)), 1.4))
    return [line for line in lines if line.points]


# ---- sensitivity and drift


def _sensitivity_figure(section: Section, values: Values) -> Figure:
    png = figures.sensitivity_figure(
        f"{section.problem}: time over the default schedule's, by value of each field",
        f"{section.title}; screened candidates; below 1 is faster than the default",
        values,
    )
    return Figure(
        f"{section.problem}-sensitivity-{section.name}",
        png,
        f"Box plots of time over the default's by value of {', '.join(values)}",
        "Each box holds the screened candidates with one value of the field: the line is their "
        "median, the box the middle half, the whiskers the 5th to 95th percentile; fewer than five "
        "are drawn as points. The other fields vary within a box, so a low median is a hint and "
        "not a proof: the best candidate may have any value.",
    )


def _sensitivity_table(values: Values) -> Table:
    tokens = sorted({t for field in values.values() for own in field.values() for t in own})
    rows = []
    for field, by_value in values.items():
        cells = []
        for count in tokens:
            medians = {
                value: float(pd.Series(own[count]).median())
                for value, own in by_value.items()
                if count in own
            }
            if len(medians) < 2:
                cells.append("-")
                continue
            best = min(medians, key=lambda value: medians[value])
            gap = max(medians.values()) / medians[best] - 1
            cells.append(f"{best} ({100 * gap:.1f} %)")
        rows.append((field, ", ".join(by_value), *cells))
    return Table(
        ("field", "values", *(f"{t} tokens" for t in tokens)),
        tuple(rows),
        "How much each field matters: the value whose candidates have the lowest median time, and "
        "by how much the worst value's median is above it.",
        frozenset({"field"}),
    )


def drift_figure(problem: str, frame: pd.DataFrame) -> Figure | None:
    """The card over the runs of a problem; None without readings."""
    runs = traces_of(frame)
    if not runs:
        return None
    shown = runs[-figures.MAX_RUNS :]
    which = "the last runs" if len(runs) > len(shown) else "each run"
    return Figure(
        f"{problem}-drift",
        figures.drift_figure(
            f"{problem}: the card over {which}",
            "a point a row, coloured by its token count; yardstick beside the row",
            shown,
        ),
        f"Yardstick, SM clock and power over {', '.join(run.title for run in shown)}",
        "A steady card shows flat bands. A yardstick that sinks over a run means a card that "
        "warms up or is throttled, so that late rows look slower than they are: this is why "
        "rankings use the default schedule of the same round. Clock and power are read near the "
        "end of a trial where the row has that, else at its start.",
    )
