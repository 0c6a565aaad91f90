"""Ranked tables of what a search found."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from .freeze import latest

CELL = ["device", "source", "phase", "recipe", "routing", "seed", "num_tokens"]
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


def order_column(source: str) -> str:
    """What rows of a source are ranked by."""
    return "median_us" if source == "measured" else "predicted_us"


def ranked_cells(frame: pd.DataFrame) -> Iterator[tuple[dict[str, object], pd.DataFrame]]:
    """Each cell's values and its latest rows: `ok` ones by time, then the failures by status."""
    for values, rows in latest(frame).groupby(CELL, sort=True):
        cell = dict(zip(CELL, values, strict=True))
        by = order_column(str(cell["source"]))
        failed = (rows["status"] != "ok").rename("failed")
        ranked = rows.assign(failed=failed).sort_values(["failed", by, "candidate"], kind="stable")
        yield cell, ranked.drop(columns="failed")


def status_counts(rows: pd.DataFrame) -> str:
    """For example `48 ok, 2 spilled, 1 timeout`."""
    counts = rows["status"].value_counts()
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def render(frame: pd.DataFrame, top: int = 10) -> str:
    """The report as text: a ranked table a cell, then the best of each cell.

    Args:
        frame: rows of one problem.
        top: candidates shown of each cell.
    """
    parts, best = [], []
    for cell, rows in ranked_cells(frame):
        measured = cell["source"] == "measured"
        columns = MEASURED_COLUMNS if measured else MODEL_COLUMNS
        first = rows.iloc[0]
        title = (
            f"{first['problem']}, {cell['num_tokens']} tokens, {first['num_ranks']} ranks "
            f"({first['rank_mode']}), {cell['routing']} routing, {cell['phase']}, "
            f"{cell['recipe']}, "
            f"{'measured on' if measured else 'source=model, not measured:'} {cell['device']}"
        )
        good = rows[rows["status"] == "ok"]
        text = f"{title}\n{len(rows)} candidates: {status_counts(rows)}"
        if measured and good["floor_us"].notna().any():
            text += f"; floor {good['floor_us'].iloc[0]:.1f} us"
        parts.append(text)
        if len(good):
            held = [c for c in columns if c != "nvlink_gbs" or good[c].notna().any()]
            shown = good.head(top)[held].rename(columns=columns)
            shown.index = pd.RangeIndex(1, len(shown) + 1)
            parts.append(shown.to_string(float_format=lambda v: f"{v:.4g}", na_rep="-"))
            best.append((cell, good.iloc[0]))
        failures = rows[rows["status"] != "ok"].head(top)
        if len(failures):
            parts.append(
                "\n".join(
                    f"  {r['status']}: {r['candidate']}: {str(r['reason'])[:120]}"
                    for _, r in failures.iterrows()
                )
            )
        parts.append("")
    if len(best) > 1:
        parts.append("Best of each cell")
        lines = []
        for cell, row in best:
            time = f"{row[order_column(str(cell['source']))]:.1f} us"
            ratio = row["ratio_to_floor"]
            floor = "" if pd.isna(ratio) else f", {ratio:.3f} of the floor"
            word = "" if cell["source"] == "measured" else "predicted "
            lines.append(
                f"  {cell['num_tokens']:>6} tokens  {word}{time}{floor}  {row['candidate']}"
            )
        parts.append("\n".join(lines))
    return "\n".join(parts).rstrip()
