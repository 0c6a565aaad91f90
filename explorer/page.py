"""The results page of a folder: results/<device>/report.html and its Markdown twin report.md.

The page is built from the tables alone, so it is the same whenever it is built from the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from tl_megamoe.frozen import FrozenFile, read_frozen, schedules_root

from . import figures
from .document import Block, Figure, Heading, Table, Terms, Words, to_html, to_markdown
from .files import write_atomically, write_bytes
from .glossary import TERMS
from .schema import STAGES, STATUSES, TableError
from .section_blocks import drift_figure, number, section_blocks
from .sections import Section, run_names, sections_of
from .table import gpu_of, read_table

logger = logging.getLogger(__name__)

SUMMARY = "summary.csv"
FIGURES = "figures"
MAX_FAILURES = 40


def device_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a device's folder that have rows, by problem; a bad one is left out, and said.

    Args:
        folder: results/<device>.
    """
    out = {}
    for path in sorted(folder.glob("*.csv")):
        if path.name == SUMMARY:
            continue
        try:
            frame = read_table(path, folder.resolve().name)
        except TableError as error:
            logger.warning("left out: %s", error)
            continue
        if len(frame):
            out[path.stem] = frame
    return out


def check_figures(folder: Path, *, draw: bool) -> bool:
    """Whether figures are to be drawn.

    Without matplotlib a page that has no figures yet is written without, and a warning says so.

    Args:
        folder: results/<device>.
        draw: whether they are wanted.

    Raises:
        NoFiguresError: matplotlib is not installed, and the page that is there has figures.
    """
    if not draw:
        return False
    try:
        figures.check_available()
    except figures.NoFiguresError as error:
        page = folder / "report.html"
        if page.is_file() and "<img " in page.read_text(encoding="utf-8"):
            raise figures.NoFiguresError(
                f"{page} has figures, and writing it now would lose them: {error}, or write it "
                "without figures: --no-figures"
            ) from error
        logger.warning("the report has no figures: %s", error)
        return False
    return True


def write_page(folder: Path, schedules: Path | None = None, *, draw: bool = True) -> list[Path]:
    """Write report.html, report.md and the figures of a device.

    Args:
        folder: results/<device>.
        schedules: folder of the frozen files; the package's when None.
        draw: whether to draw figures (see `check_figures`).

    Returns:
        The files that were written, report.html first.

    Raises:
        ValueError: the folder has no table with rows, a frozen file is corrupt, or as
            `check_figures`.
    """
    tables = device_tables(folder)
    if not tables:
        raise ValueError(
            f"{folder}: no table with rows to report. Make some with: tl-megamoe search"
        )
    draw = check_figures(folder, draw=draw)
    device = folder.resolve().name
    frozen = _frozen_files(schedules or schedules_root(), gpu_of(device))
    title, blocks = build(device, tables, frozen, draw=draw)
    out = [folder / "report.html", folder / "report.md"]
    write_atomically(out[0], to_html(title, blocks))
    for block in blocks:
        if isinstance(block, Figure):
            path = folder / FIGURES / f"{block.name}.png"
            write_bytes(path, block.png)
            out.append(path)
    write_atomically(out[1], to_markdown(title, blocks, FIGURES))
    return out


def _frozen_files(root: Path, device: str) -> dict[str, FrozenFile]:
    """The frozen files of a device by problem."""
    return {path.stem: read_frozen(path) for path in sorted((root / device).glob("*.json"))}


def build(
    device: str,
    tables: Mapping[str, pd.DataFrame],
    frozen: Mapping[str, FrozenFile],
    *,
    draw: bool,
) -> tuple[str, list[Block]]:
    """The page's title and content.

    Args:
        device: for example `nvidia-h200`.
        tables: problem -> rows.
        frozen: problem -> frozen file.
        draw: whether to draw figures.
    """
    everything = pd.concat(list(tables.values()), ignore_index=True)
    sections = {
        problem: sections_of(problem, frame, frozen.get(problem))
        for problem, frame in tables.items()
    }
    blocks: list[Block] = [
        Words(
            "How fast one fused FP8 mixture-of-experts layer runs on this device with the "
            "schedules that `tl-megamoe search` tried, and how sure that is. Every number comes "
            "from the result tables (`.csv`) in this folder; the words are explained under "
            "“How to read this page”."
        ),
        Heading(2, "At a glance"),
        *_glance(tables, sections, draw=draw),
        Heading(2, "How to read this page"),
        Terms(TERMS),
        Heading(2, "What was run"),
        *_what_was_run(everything),
    ]
    for problem, frame in tables.items():
        blocks += _problem_blocks(problem, frame, sections[problem], list(tables), draw=draw)
    blocks += [Heading(2, "Failures"), *_failures(everything)]
    return f"tl_megamoe results: {device}", blocks


def _glance(
    tables: Mapping[str, pd.DataFrame], sections: Mapping[str, list[Section]], *, draw: bool
) -> list[Block]:
    """The first measured whole-layer section of each problem: a table, and a figure of all."""
    first = {
        problem: section
        for problem, own in sections.items()
        if (section := next((s for s in own if s.best and s.setting["phase"] == "fused"), None))
    }
    if not first:
        return [Words("No time was measured for these rows: they come from the cost model.")]
    tokens = sorted({t for section in first.values() for t in section.best})
    rows = []
    for problem, section in first.items():
        cells = [
            f"{number(best.median_us, '.1f')} ({number(best.ratio_to_floor, '.2f')})"
            if (best := section.best.get(t))
            else "-"
            for t in tokens
        ]
        rows.append((problem, *cells, section.title))
    out: list[Block] = [
        Table(
            ("problem", *(f"{t} tokens" for t in tokens), "run as"),
            tuple(rows),
            "Microseconds of the best schedule, and in brackets its time over the floor.",
        )
    ]
    lines = []
    for problem, section in first.items():
        points = {t: b.ratio_to_floor for t, b in section.best.items() if b.ratio_to_floor > 0}
        if points:
            colour = figures.colour_of(problem, list(tables))
            lines.append(figures.Line(problem, points, colour, "-", 2.0, "o"))
    if draw and lines and len(first) > 1 and len(tokens) > 1:
        png = figures.lines_figure(
            "Time over the floor (1 is the floor)",
            "the best schedule of each problem and token count; lower is better",
            lines,
            log_y=False,
            line_at=1.0,
            line_text="floor",
        )
        alt = "Time over the floor against tokens, a line a problem"
        out.append(Figure("overview-ratio", png, alt, "What lies near 1 has little left to gain."))
    return out


def _between(stamps: list[str]) -> str:
    """From the first time to the last, to the minute."""
    if not stamps:
        return "-"
    first, last = (stamp[:16].replace("T", " ") for stamp in (stamps[0], stamps[-1]))
    return (
        first if first == last else f"{first} to {last[11:] if first[:10] == last[:10] else last}"
    )


def _joined(values: pd.Series[str]) -> str:
    return ", ".join(sorted({str(v) for v in values} - {""})) or "-"


def _what_was_run(frame: pd.DataFrame) -> list[Block]:
    rows = []
    named = frame.assign(name=run_names(frame))
    for (name, problem), own in named.groupby(["name", "problem"], sort=False):
        stamps = sorted({str(s) for s in own["measured_at"]} - {""})
        rows.append(
            (
                str(name) if (own["run"] != "").all() else "-",
                str(problem),
                _between(stamps),
                str(len(own)),
                ", ".join(str(t) for t in sorted({int(t) for t in own["num_tokens"]})),
                *(_joined(own[n]) for n in ("card", "kernel", "commit")),
                *(_joined(own[n]) for n in ("tilelang", "nvcc", "torch", "driver")),
            )
        )
    held = [s for s in STATUSES if (frame["status"] == s).any()]
    stages = []
    for problem in sorted(set(frame["problem"])):
        for stage in STAGES:
            own = frame[(frame["problem"] == problem) & (frame["stage"] == stage)]
            if len(own):
                cells = [str(int((own["status"] == status).sum())) for status in held]
                stages.append((problem, stage, *cells, str(len(own))))
    return [
        Table(
            (
                "run",
                "problem",
                "measured, UTC",
                "rows",
                "tokens",
                "card",
                "kernel",
                "commit",
                "tilelang",
                "nvcc",
                "torch",
                "driver",
            ),
            tuple(rows),
            "Each run of the search. Rows of one run were interleaved on one card; `card` is an "
            "anonymous id of the physical GPU, `kernel` a digest of the kernel's sources. Rows "
            "from before runs had an id are grouped by kernel.",
            frozenset({"run", "card", "kernel", "commit"}),
        ),
        Table(
            ("problem", "stage", *held, "all"),
            tuple(stages),
            "Rows by stage and status, over all runs and kernels. A candidate that fails is a row "
            "too.",
        ),
    ]


def _problem_blocks(
    problem: str,
    frame: pd.DataFrame,
    sections: list[Section],
    problems: list[str],
    *,
    draw: bool,
) -> list[Block]:
    sizes = frame[["hidden", "intermediate", "num_local_experts", "num_topk"]].drop_duplicates()
    told = "; ".join(
        f"hidden {row[0]}, intermediate {row[1]}, {row[2]} experts a rank, top-{row[3]}"
        for row in sizes.itertuples(index=False, name=None)
    )
    blocks: list[Block] = [
        Heading(2, problem),
        Words(
            f"{told}. Points of a search space that break a rule of the kernel never become rows: "
            f"`tl-megamoe list --problem {problem}` counts them by rule."
        ),
    ]
    for section in sections:
        blocks += section_blocks(section, figures.colour_of(problem, problems), draw=draw)
    if draw and (drift := drift_figure(problem, frame)) is not None:
        blocks += [Heading(3, f"{problem}: the card during the runs"), drift]
    return blocks


def _failures(frame: pd.DataFrame) -> list[Block]:
    bad = frame[~frame["status"].isin(["ok", "duplicate"])]
    if bad.empty:
        return [Words("Every row is `ok` or a duplicate.")]
    keys = ["problem", "stage", "status", "reason"]
    rows = []
    for values, own in bad.groupby(keys, sort=True):
        tokens = ", ".join(str(t) for t in sorted({int(t) for t in own["num_tokens"]}))
        rows.append((*map(str, values), str(len(own)), tokens, str(own["candidate"].iloc[-1])))
    rows.sort(key=lambda row: -int(row[4]))
    more = len(rows) - MAX_FAILURES
    left = f" {more} rarer ones are in the tables." if more > 0 else ""
    return [
        Table(
            ("problem", "stage", "status", "reason", "rows", "tokens", "an example"),
            tuple(rows[:MAX_FAILURES]),
            f"Why candidates failed, the commonest first, over all runs and kernels.{left}",
            frozenset({"an example"}),
        )
    ]
