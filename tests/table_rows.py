"""A row as a search writes it, and tables of older schemas."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from tl_megamoe.explorer.table import (
    MIGRATIONS,
    SCHEMA,
)
from tl_megamoe.schedule import Schedule


def row(**fields: Any) -> dict[str, Any]:
    schedule = Schedule()
    return {
        "problem": "p",
        "num_tokens": 16,
        "num_ranks": 8,
        "rank_mode": "one",
        "routing": "uniform",
        "seed": 0,
        "stage": "screen",
        "observation": 0,
        "candidate": schedule.name,
        "phase": "fused",
        "recipe": "exact-128",
        "status": "ok",
        "source": "measured",
        "median_us": 205.5,
        "hidden": 4096,
        "intermediate": 2048,
        "num_local_experts": 32,
        "num_topk": 6,
        "device": "nvidia-h200",
        "kernel": "abc",
        **schedule.to_dict(),
        **fields,
    }


RESULTS = Path(__file__).resolve().parents[1] / "results"


def as_schema(text: str, schema: int) -> str:
    """A table's text as an older schema had it."""
    lines = list(csv.reader(io.StringIO(text)))
    names = list(lines[0])
    places = list(range(len(names)))
    for version in range(SCHEMA, schema, -1):
        change = MIGRATIONS[version]
        back = {new: old for old, new in change.renamed.items()}
        places = [i for i in places if names[i] not in change.added]
        names = [back.get(name, name) for name in names]
    old = [[line[i] for i in places] for line in (names, *lines[1:])]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [old[0], *([str(schema), *line[1:]] for line in old[1:])]
    )
    return out.getvalue()
