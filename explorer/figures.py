"""Figures of a results page, as PNG bytes. matplotlib is optional and loaded when one is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DPI = 150
INK, SOFT, FAINT = "#1b1f24", "#59636e", "#d9dee3"
FLOOR_COLOUR = "#8a939c"
PROBLEM_COLOURS = {
    "deepseek-v4-flash": "#0072b2",
    "deepseek-v4-pro": "#d55e00",
    "mimo-v2.5": "#009e73",
    "mimo-v2.5-pro": "#aa4499",
}
"""A colour a preset in every figure: told apart with any colour vision (Okabe and Ito's set)."""
OTHER_COLOURS = ("#56707f", "#b8860b", "#6a3d9a", "#b15928", "#1f7a8c", "#c2185b")
REFERENCE_COLOURS = ("#3d4650", "#a65628", "#7a5195", "#577590", "#b5651d")
MIN_BOX = 5
"""Values from which a box is drawn; fewer are drawn as points."""
MAX_RUNS = 3


class NoFiguresError(ValueError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a figure over token counts.

    Attributes:
        label: written at its right end.
        points: token count -> value.
        colour: of line and label.
        style: of the line, as matplotlib spells it (a word, or offset and dashes); `none` for
            markers alone.
        width: of the line in points.
        marker: as matplotlib spells it; none when empty.
        bands: token count -> (low, high), drawn as error bars.
    """

    label: str
    points: Mapping[int, float]
    colour: str
    style: str | tuple[int, tuple[float, float]] = "-"
    width: float = 1.6
    marker: str = ""
    bands: Mapping[int, tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class RunTrace:
    """Readings of one run in the order of its rows; each list has an entry a row.

    Attributes:
        title: which run it is.
        minutes: since its first row, or None where rows carry no time of their own.
        tokens: token counts.
        yardstick_tflops, sm_clock_mhz, power_w: readings, NaN for none.
    """

    title: str
    minutes: Sequence[float] | None
    tokens: Sequence[int]
    yardstick_tflops: Sequence[float]
    sm_clock_mhz: Sequence[float]
    power_w: Sequence[float]


def check_available() -> None:
    """Raise where no figure can be drawn.

    Raises:
        NoFiguresError: matplotlib is not installed; says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NoFiguresError(
            "matplotlib is not installed, and figures need it. Install it with: "
            "pip install 'tl_megamoe[plot]'"
        ) from error


def colour_of(problem: str, problems: Sequence[str] = ()) -> str:
    """The colour of a problem: a preset's own, else by its place among the other `problems`."""
    if problem in PROBLEM_COLOURS:
        return PROBLEM_COLOURS[problem]
    others = sorted({*problems, problem} - set(PROBLEM_COLOURS))
    return OTHER_COLOURS[others.index(problem) % len(OTHER_COLOURS)]


# ---- lines over token counts


def lines_figure(
    title: str,
    subtitle: str,
    lines: Sequence[Line],
    *,
    log_y: bool,
    line_at: float | None = None,
    line_text: str = "",
) -> bytes:
    """Values against token counts, each line named at its right end.

    Args:
        title: what is shown, and its unit.
        subtitle: of what, in smaller type.
        lines: at least one with a point; the first lies on top.
        log_y: whether the y axis is logarithmic; the x axis is.
        line_at: a value to mark with a horizontal line.
        line_text: its name.

    Raises:
        NoFiguresError: matplotlib is not installed.
    """
    figure, (axes,) = _canvas(9.6, 5.0, title, subtitle, rows=1, right=0.80)
    tokens = sorted({t for line in lines for t in line.points})
    for place, line in enumerate(lines):
        above = 3 + len(lines) - place  # the first line lies on top
        x = sorted(line.points)
        y = [line.points[t] for t in x]
        if line.bands:
            held = [t for t in x if t in line.bands]
            low = [max(line.points[t] - line.bands[t][0], 0.0) for t in held]
            high = [max(line.bands[t][1] - line.points[t], 0.0) for t in held]
            axes.errorbar(
                held,
                [line.points[t] for t in held],
                yerr=[low, high],
                fmt="none",
                ecolor=line.colour,
                elinewidth=1.1,
                capsize=3,
                zorder=above,
            )
        axes.plot(
            x,
            y,
            color=line.colour,
            linestyle=line.style,
            linewidth=line.width,
            marker=line.marker or None,
            markersize=7.5 if line.style == "none" else 5.0,
            markerfacecolor="none" if line.style == "none" else line.colour,
            zorder=above + (len(lines) if line.style == "none" else 0),
        )
    axes.set_xscale("log", base=2)
    pad = 1.12
    axes.set_xlim(tokens[0] / pad, tokens[-1] * pad)
    if log_y:
        axes.set_yscale("log")
        _plain_log_ticks(axes)
    else:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.97 * line_at) if line_at else low, high)
    if line_at is not None:
        axes.axhline(line_at, color=FLOOR_COLOUR, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    _token_ticks(axes, tokens)
    axes.set_xlabel("tokens a rank contributes", color=SOFT)
    axes.grid(True, which="major", color=FAINT, linewidth=0.7)
    ends = [(line.label, line.colour, line.points[max(line.points)]) for line in lines]
    if line_at is not None:
        ends.append((line_text, FLOOR_COLOUR, line_at))
    _label_ends(figure, axes, ends)
    return _png(figure)


def _token_ticks(axes: Any, tokens: Sequence[int]) -> None:
    """A tick for every count; labels where they do not collide."""
    span = max(math.log2(tokens[-1] / tokens[0]), 1e-9)
    named, last = [], -math.inf
    for count in tokens:
        place = math.log2(count / tokens[0]) / span
        if place - last >= 0.055:
            named.append(count)
            last = place
    axes.set_xticks(named, [str(count) for count in named])
    axes.set_xticks([count for count in tokens if count not in named], minor=True)
    axes.tick_params(axis="x", which="minor", length=3)


def _plain_log_ticks(axes: Any) -> None:
    """Round numbers, written out."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_ylim()
    low, high = low / 1.08, high * 1.08
    axes.set_ylim(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= 4:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Places moved as little as possible so that neighbours are `gap` apart, in their order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[list[float]] = []  # pool adjacent violators: sums and counts of one level
    for rank, index in enumerate(order):
        groups.append([places[index] - rank * gap, 1.0])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    levels = [total / count for total, count in groups for _ in range(int(count))]
    out = [0.0] * len(places)
    for rank, index in enumerate(order):
        out[index] = levels[rank] + rank * gap
    return out


def _label_ends(figure: Any, axes: Any, ends: Sequence[tuple[str, str, float]]) -> None:
    """Names beside the right edge of the axes, at the heights of their last values."""
    figure.canvas.draw()
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    heights = [float(to_axes.transform((x, value))[1]) for _, _, value in ends]
    points = axes.get_window_extent().height * 72 / figure.dpi
    for (label, colour, _), height, place in zip(
        ends, heights, spread_out(heights, 13.0 / points), strict=True
    ):
        axes.plot(
            [1.006, 1.028],
            [height, place],
            transform=axes.transAxes,
            color=colour,
            linewidth=0.7,
            alpha=0.7,
            clip_on=False,
        )
        axes.text(
            1.034,
            place,
            label,
            transform=axes.transAxes,
            color=colour,
            fontsize=9.5,
            va="center",
        )


# ---- sensitivity


def sensitivity_figure(
    title: str,
    subtitle: str,
    fields: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
) -> bytes:
    """Boxes of time over the default's, by value of each field and token count.

    Args:
        title: what is shown.
        subtitle: of what.
        fields: field -> value -> token count -> ratios; values in their order.

    Raises:
        NoFiguresError: matplotlib is not installed.
    """
    rows = -(-len(fields) // 2)
    columns = min(len(fields), 2)
    figure, all_axes = _canvas(
        10.4, 0.8 + 1.75 * rows, title, subtitle, rows=rows, columns=columns, right=0.985, gap=0.55
    )
    ends: list[float] = []
    for axes, (field, values) in zip(all_axes, fields.items(), strict=False):
        tokens = sorted({t for by_tokens in values.values() for t in by_tokens})
        colours = _sequence_colours(len(values))
        width = 0.82 / len(values)
        for rank, (by_tokens, colour) in enumerate(zip(values.values(), colours, strict=True)):
            for group, count in enumerate(tokens):
                ratios = [r for r in by_tokens.get(count, ()) if math.isfinite(r)]
                place = group - 0.41 + width * (rank + 0.5)
                if ratios:
                    ends += _box(axes, ratios, place, min(width * 0.78, 0.24), colour)
        axes.axhline(1.0, color=FLOOR_COLOUR, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlim(-0.5, len(tokens) - 0.5)
        axes.set_xticks(range(len(tokens)), [str(count) for count in tokens])
        for edge in range(1, len(tokens)):
            axes.axvline(edge - 0.5, color=FAINT, linewidth=0.7, zorder=0)
        axes.grid(True, axis="y", color=FAINT, linewidth=0.6)
        axes.set_title(field, loc="left", fontsize=10, color=INK, fontweight="bold", pad=5)
        _legend_above(axes, list(values), colours)
    low, high = min([*ends, 1.0]), max([*ends, 1.0])
    pad = 0.06 * (high - low) + 1e-3
    for index, axes in enumerate(all_axes):
        axes.set_ylim(low - pad, high + pad)
        axes.set_visible(index < len(fields))
        if index >= len(fields) - columns:
            axes.set_xlabel("tokens a rank contributes", color=SOFT)
    return _png(figure)


def _legend_above(axes: Any, names: Sequence[str], colours: Sequence[Any]) -> None:
    """Values and their colours in one line at the right end of the title."""
    axes.legend(
        [_swatch(colour) for colour in colours],
        names,
        loc="lower right",
        bbox_to_anchor=(1.01, 0.975),
        frameon=False,
        fontsize=8.5,
        labelcolor=SOFT,
        ncols=len(names) if len(names) <= 10 else -(-len(names) // 2),
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.35,
        columnspacing=0.9,
        borderpad=0.1,
        labelspacing=0.1,
    )


def _box(
    axes: Any, ratios: Sequence[float], place: float, width: float, colour: Any
) -> list[float]:
    """Draw one box, or points where there are few; the lowest and highest value drawn."""
    from .protocol import percentile

    if len(ratios) < MIN_BOX:
        axes.plot(
            [place] * len(ratios), ratios, "o", color=colour, markersize=3.5, alpha=0.9, zorder=3
        )
        return [min(ratios), max(ratios)]
    from matplotlib.colors import to_rgba

    axes.boxplot(
        [list(ratios)],
        positions=[place],
        widths=width,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": to_rgba(colour, 0.45), "edgecolor": colour, "linewidth": 1.0},
        whiskerprops={"color": colour, "linewidth": 1.1},
        capprops={"color": colour, "linewidth": 1.1},
        medianprops={"color": INK, "linewidth": 1.6},
        zorder=3,
    )
    return [percentile(ratios, 0.05), percentile(ratios, 0.95)]


def _swatch(colour: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor="none")


def _sequence_colours(count: int) -> list[Any]:
    """From dark to light, for values that have an order; none too light for white paper."""
    from matplotlib import colormaps

    steps = [0.12 + 0.68 * i / max(count - 1, 1) for i in range(count)]
    return [colormaps["viridis"](step) for step in steps]


# ---- drift


def drift_figure(title: str, subtitle: str, runs: Sequence[RunTrace]) -> bytes:
    """Yardstick, SM clock and power over a run, a column each of the last `MAX_RUNS` runs.

    Raises:
        NoFiguresError: matplotlib is not installed.
    """
    runs = list(runs)[-MAX_RUNS:]
    panels = (
        ("yardstick_tflops", "yardstick, TFLOP/s"),
        ("sm_clock_mhz", "SM clock, MHz"),
        ("power_w", "power, W"),
    )
    figure, flat = _canvas(
        10.4, 7.0, title, subtitle, rows=len(panels), columns=len(runs), right=0.89
    )
    counts = sorted({t for run in runs for t in run.tokens})
    colours = dict(zip(counts, _sequence_colours(len(counts)), strict=True))
    for row, (name, label) in enumerate(panels):
        line = flat[row * len(runs) : (row + 1) * len(runs)]
        found = [v for run in runs for v in getattr(run, name) if math.isfinite(v)]
        for run, axes in zip(runs, line, strict=True):
            x = list(range(1, len(run.tokens) + 1)) if run.minutes is None else run.minutes
            axes.scatter(
                x,
                list(getattr(run, name)),
                s=9,
                c=[colours[t] for t in run.tokens],
                linewidths=0,
                zorder=3,
            )
            axes.grid(True, color=FAINT, linewidth=0.6)
            if found:
                pad = 0.06 * (max(found) - min(found)) + 1e-3 * abs(max(found))
                axes.set_ylim(min(found) - pad, max(found) + pad)
            else:
                axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center")
            if row == 0:
                axes.set_title(run.title, loc="left", fontsize=9.5, color=INK)
            if row == len(panels) - 1:
                words = "rows, in order" if run.minutes is None else "minutes since the first row"
                axes.set_xlabel(words, color=SOFT)
            if axes is line[0]:
                axes.set_ylabel(label, color=SOFT)
            else:
                axes.tick_params(axis="y", labelleft=False)
    flat[len(runs) - 1].legend(
        [_swatch(colours[t]) for t in counts],
        [str(t) for t in counts],
        title="tokens",
        title_fontsize=9.5,
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
    )
    return _png(figure)


# ---- canvas


def _canvas(
    width: float,
    height: float,
    title: str,
    subtitle: str,
    *,
    rows: int,
    columns: int = 1,
    right: float,
    gap: float = 0.16,
) -> tuple[Any, list[Any]]:
    """A figure with its title, and its axes row by row. No global state of matplotlib is used."""
    check_available()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        rows,
        columns,
        squeeze=False,
        gridspec_kw={
            "left": 0.072 if columns == 1 else 0.062,
            "right": right,
            "top": 1 - (0.98 if rows > 1 or columns > 1 else 0.72) / height,
            "bottom": 0.58 / height,
            "hspace": gap,
            "wspace": 0.09,
        },
    )
    figure.text(
        0.012, 1 - 0.10 / height, title, fontsize=13, fontweight="bold", color=INK, va="top"
    )
    figure.text(0.012, 1 - 0.37 / height, subtitle, fontsize=9.5, color=SOFT, va="top")
    axes = [axes for line in grid for axes in line]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(FAINT)
        one.tick_params(colors=SOFT, labelsize=9.5, length=3, color=FAINT)
        one.set_axisbelow(True)
    return figure, axes


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()
