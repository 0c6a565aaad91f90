"""One search: enumerate, compile, screen, confirm, record. Every candidate leaves a row.

The GPU side and the compiler come in as arguments, so that all of this runs in tests without
either.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tl_megamoe import frozen

from .farm import Farm
from .options import SearchOptions as SearchOptions
from .options import worker_config as worker_config
from .planning import build_cells as build_cells
from .planning import plan_cells as plan_cells
from .record import Recorder
from .screen import Budget
from .session import MakeBench, Session

MODEL_DEVICE = "sm90-model"
"""Device of rows that rest on the cost model."""


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """What a search did: rows written by status, candidates that had rows already."""

    path: Path
    written: int
    skipped: int
    statuses: dict[str, int]


def run_search(
    options: SearchOptions,
    farm: Farm,
    make_bench: MakeBench | None,
    device_name: str | None = None,
    *,
    num_gpus: int = 1,
    budget: Budget | None = None,
) -> SearchSummary:
    """Search: with a bench candidates are measured, without one the model ranks them.

    Args:
        options: what to search.
        farm: compiles.
        make_bench: a GPU worker from its config and the control schedule; None without a GPU.
        device_name: the GPU's name, for example `NVIDIA H200`; None without a GPU.
        num_gpus: cells that are timed at once, each on a GPU of its own.
        budget: clock of `options.budget_s`; tests pass their own.

    Raises:
        measure.GpuUnusable: the GPU does not run even the control; finished rows are kept.
        TableError: the table is damaged or of another device.
    """
    device = MODEL_DEVICE if device_name is None else frozen.device_key(device_name)
    recorder = Recorder(options, device, measured=make_bench is not None)
    cells = plan_cells(options, None if device_name is None else device)
    known = {
        (c.num_tokens, c.routing, s) for c in cells for s in c.schedules if recorder.seen(c, s)
    }
    if make_bench is None:
        todo = [c for c in cells if any(recorder.seen(c, s) is None for s in c.schedules)]
        if todo:
            build_cells(options, todo, farm)
        for cell in todo:
            fresh = [s for s in cell.schedules if recorder.seen(cell, s) is None]
            recorder.write(recorder.model_row(cell, s) for s in fresh)
    else:
        session = Session(options, farm, recorder, cells, budget or Budget(options.budget_s))
        session.run(make_bench, max(1, num_gpus))
    statuses = recorder.statuses
    return SearchSummary(recorder.path, sum(statuses.values()), len(known), statuses)
