"""Rows of a search: what one holds, which are there already, and appending them."""

from __future__ import annotations

import math
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING, Any

import tl_megamoe
from tl_megamoe import metrics
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule

from .constants import load_constants
from .cost import predict, uniform_counts
from .farm import BuildResult, kernel_digest, package_version
from .gpu_state import GpuState
from .messages import CellInfo, CheckResult
from .protocol import Measurement
from .table import append_rows, read_table, table_path

if TYPE_CHECKING:
    from .cell import Cell
    from .options import SearchOptions

BASELINE = "default_schedule"
"""Name of the baseline in the rows of a search."""
WORK = ("num_tokens", "routing", "seed", "stage", "candidate")
"""What distinguishes the rows of one search; a row's observation counts within it."""
STATE = {
    "sm_clock_mhz": "sm_clock_end_mhz",
    "mem_clock_mhz": "mem_clock_end_mhz",
    "power_w": "power_end_w",
    "temperature_c": "temperature_end_c",
}
"""Column of a reading at the start of a trial -> the column of the one at its end."""
VERSIONS = ("card", "driver", "torch")
"""Columns that a GPU process tells."""
FROM_REPORT = ("registers", "spill_bytes", "smem_bytes", "num_wgmma", "source_hash", "nvcc")
"""Columns that the report of a kernel tells."""


def new_run() -> str:
    """An id for a search run: the time in UTC and four random digits."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{now}-{secrets.token_hex(2)}"


@dataclass(slots=True)
class Seen:
    """What the rows of one candidate say, of one stage, routing and seed.

    Attributes:
        status: of the last row.
        ratios: time over the baseline's in the same round, of each `ok` row that has one.
        times_us: medians of the `ok` rows.
    """

    status: str = ""
    ratios: list[float] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it ran, and no later row failed."""
        return self.status == "ok" and bool(self.times_us)

    @property
    def score(self) -> float:
        """What candidates of a cell are ordered by: the median ratio to the default's time."""
        return median(self.ratios)

    @property
    def ranked(self) -> bool:
        """Whether it ran and has a score."""
        return self.ok and bool(self.ratios)


class Recorder:
    """Makes rows and appends them; knows which are there already.

    Args:
        options: the search.
        device: whose table it is, for example `nvidia-h200`.
        measured: whether the rows rest on a GPU.

    Attributes:
        path: the table.
        run: id of this search run.
    """

    def __init__(self, options: SearchOptions, device: str, *, measured: bool):
        self.options = options
        self.device = device
        self.source = "measured" if measured else "model"
        self.path = table_path(
            options.results,
            device,
            options.problem.name,
            options.rank_mode,
            options.problem.num_ranks,
        )
        self.run = new_run()
        self._constants = load_constants()
        self._predicted: dict[tuple[int, Schedule], float] = {}
        self._gpu = threading.local()  # a thread times on one GPU
        self._lock = threading.Lock()
        self._seen: dict[tuple[Any, ...], Seen] = {}
        self._observations: dict[tuple[Any, ...], int] = {}
        self._statuses: dict[str, int] = {}
        self._confirmed: dict[tuple[Any, ...], dict[str, Counter[int]]] = {}
        self._broken: set[tuple[Any, ...]] = set()
        self._load()

    def meet(self, found: dict[str, str]) -> None:
        """Take down what the GPU process of this thread says of its card and versions."""
        self._gpu.versions = {name: found.get(name, "") for name in VERSIONS}

    @property
    def versions(self) -> dict[str, str]:
        """Columns card, driver and torch; without a GPU process only torch's is known."""
        found = getattr(self._gpu, "versions", None)
        if found is None:
            import torch

            found = {"torch": str(torch.__version__)}
        return dict(found)

    def _load(self) -> None:
        """Rows of this search that an earlier run wrote."""
        frame = read_table(self.path, device=self.device)
        same = self._identity()
        for name, value in same.items():
            frame = frame[frame[name] == value]
        for row in frame.to_dict("records"):
            key = tuple(row[name] for name in WORK)
            number = int(row["observation"]) + 1
            self._observations[key] = max(self._observations.get(key, 0), number)
            if not self.options.again:
                self._note({str(k): v for k, v in row.items()})

    def _note(self, row: dict[str, Any]) -> None:
        seen = self._seen.setdefault(tuple(row[name] for name in WORK), Seen())
        seen.status = str(row["status"])
        if seen.status == "ok":
            for name, values in (
                ("median_us", seen.times_us),
                ("ratio_to_baseline", seen.ratios),
            ):
                value = row.get(name)
                if value is not None and not math.isnan(value):
                    values.append(float(value))
        if row["stage"] == "confirm":
            where = row["num_tokens"], row["routing"], row["run"]
            if seen.status == "ok":
                of_run = self._confirmed.setdefault(where, {})
                of_run.setdefault(row["candidate"], Counter())[int(row["seed"])] += 1
            else:
                self._broken.add((*where, row["candidate"]))

    def confirmed_together(
        self, cells: Sequence[Cell], names: set[str], seeds: Sequence[int], observations: int
    ) -> bool:
        """Whether one run has all observations of these candidates in all cells, or their failures.

        A run in which the default failed has no ratios and confirmed nothing.
        """

        def complete(cell: Cell, run: str) -> bool:
            where = cell.num_tokens, cell.routing, run
            found = self._confirmed.get(where, {})
            return (*where, cell.baseline.name) not in self._broken and all(
                (*where, name) in self._broken
                or all(found.get(name, Counter())[seed] >= observations for seed in seeds)
                for name in names
            )

        with self._lock:
            runs = {run for _, _, run in self._confirmed}
            return any(all(complete(cell, run) for cell in cells) for run in runs)

    def seen(self, cell: Cell, schedule: Schedule) -> Seen | None:
        """What the screen knows of a candidate; None when it has no row."""
        key = (cell.num_tokens, cell.routing, self.options.seed, "screen", schedule.name)
        with self._lock:
            return self._seen.get(key)

    def next_observation(self, cell: Cell, seed: int) -> int:
        """The first observation number that no confirmed row of the cell and seed has."""
        with self._lock:
            taken = [
                number
                for (tokens, routing, own, stage, _), number in self._observations.items()
                if (tokens, routing, own, stage) == (cell.num_tokens, cell.routing, seed, "confirm")
            ]
        return max(taken, default=0)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, with the time of now and the next observation of their candidate."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        with self._lock:
            batch = []
            for row in rows:
                key = tuple(row[name] for name in WORK)
                number = row.get("observation", self._observations.get(key, 0))
                self._observations[key] = max(self._observations.get(key, 0), number + 1)
                batch.append({**row, "observation": number, "measured_at": now})
            if batch:
                append_rows(self.path, batch)
            for row in batch:
                self._note(row)
                self._statuses[row["status"]] = self._statuses.get(row["status"], 0) + 1

    @property
    def statuses(self) -> dict[str, int]:
        """Rows written, by status."""
        return dict(self._statuses)

    def _identity(self) -> dict[str, Any]:
        """Columns that all rows of the search share and that make its work what it is."""
        o, p = self.options, self.options.problem
        return {
            "problem": p.name,
            "num_ranks": p.table_num_ranks,
            "rank_mode": o.rank_mode,
            "phase": o.phase,
            "recipe": str(o.recipe),
            "source": self.source,
            "hidden": p.hidden,
            "intermediate": p.intermediate,
            "num_local_experts": p.num_local_experts,
            "num_topk": p.num_topk,
            "capacity": o.capacity,
            "kernel": kernel_digest(),
        }

    def _base(self, cell: Cell, schedule: Schedule, stage: str, seed: int | None) -> dict[str, Any]:
        return {
            **self._identity(),
            "num_tokens": cell.num_tokens,
            "routing": cell.routing,
            "seed": self.options.seed if seed is None else seed,
            "stage": stage,
            "run": self.run,
            "candidate": schedule.name,
            "device": self.device,
            "tilelang": package_version("tilelang"),
            "commit": self.options.commit,
            **self.versions,
            **schedule.to_dict(),
        }

    def _built(
        self, cell: Cell, schedule: Schedule, stage: str, seed: int | None, build: BuildResult
    ) -> dict[str, Any]:
        report = build.report
        row = {
            **self._base(cell, schedule, stage, seed),
            "predicted_us": self._prediction(cell.num_tokens, schedule),
        }
        if report is not None:
            for name in FROM_REPORT:
                row[name] = getattr(report, name)
        return row

    def _prediction(self, num_tokens: int, schedule: Schedule) -> float:
        """Made once a candidate: rows are written between rounds, while the GPU waits."""
        key, o = (num_tokens, schedule), self.options
        if key not in self._predicted:
            found = predict(
                o.problem,
                schedule,
                num_tokens,
                recipe=o.recipe,
                gpu_ranks=o.gpu_ranks,
                constants=self._constants,
            )
            self._predicted[key] = found.phase_us(o.phase)
        return self._predicted[key]

    def failed_row(
        self,
        cell: Cell,
        schedule: Schedule,
        status: str,
        reason: str,
        stage: str = "screen",
        seed: int | None = None,
    ) -> dict[str, Any]:
        """A candidate without a time."""
        built = self._built(cell, schedule, stage, seed, cell.builds[schedule])
        return {**built, "status": status, "reason": reason}

    def check_row(
        self,
        cell: Cell,
        schedule: Schedule,
        check: CheckResult,
        stage: str = "screen",
        seed: int | None = None,
    ) -> dict[str, Any]:
        """A candidate that failed its check."""
        row = self.failed_row(cell, schedule, check.status, check.reason, stage, seed)
        return {**row, "notes": check.observation}

    def model_row(self, cell: Cell, schedule: Schedule) -> dict[str, Any]:
        """A candidate that was compiled and never ran."""
        build = cell.builds[schedule]
        counts = uniform_counts(self.options.problem, cell.num_tokens)
        ranks = self.options.gpu_ranks
        return {
            **self._built(cell, schedule, "screen", None, build),
            "status": build.status,
            "reason": build.reason,
            "touched_experts": ranks * sum(c > 0 for c in counts),
            "pairs": ranks * sum(counts),
        }

    def measured_row(
        self,
        cell: Cell,
        schedule: Schedule,
        found: Measurement,
        info: CellInfo,
        yardstick: float,
        baseline: Measurement | None,
        stage: str = "screen",
        seed: int | None = None,
    ) -> dict[str, Any]:
        """A candidate that ran. Floor and rates are those of the whole layer, so fused only.

        They count what a GPU does: the tokens, touched experts and pairs of all its ranks; with a
        GPU a rank, those of the busiest rank.

        Args:
            cell: where it ran.
            schedule: the candidate.
            found: its time.
            info: the routing.
            yardstick: highest yardstick of the round, for the floor.
            baseline: the built-in default's time in the same round.
            stage: `screen` or `confirm`.
            seed: of the routing; the search's when None.
        """
        options, us = self.options, found.median_us
        row = {
            **self._built(cell, schedule, stage, seed, cell.builds[schedule]),
            "status": "ok",
            "median_us": us,
            "p10_us": found.p10_us,
            "p90_us": found.p90_us,
            "num_samples": found.num_samples,
            "ranks_us": ranks_text(found),
            "yardstick_tflops": found.yardstick_tflops,
            "touched_experts": info.touched,
            "pairs": info.pairs,
            "notes": f"yardstick_drift_blocks={found.drifted}" if found.drifted else "",
            **state_columns(found.state, found.end),
        }
        if options.phase == "fused":
            row.update(
                layer_columns(
                    options.problem, options.rank_mode, cell.num_tokens, info, us, yardstick
                )
            )
        if baseline is not None:
            row["baseline"] = BASELINE
            row["baseline_version"] = tl_megamoe.__version__
            row["baseline_us"] = baseline.median_us
            row["ratio_to_baseline"] = us / baseline.median_us
        return row


def ranks_text(found: Measurement) -> str:
    """The column `ranks_us`: the median of each rank, empty where one rank runs."""
    return "/".join(f"{t:.2f}" for t in found.ranks_us)


def state_columns(start: GpuState, end: GpuState) -> dict[str, float | None]:
    """The columns of the card's state at the start and the end of a trial."""
    return {
        column: getattr(state, name)
        for name, other in STATE.items()
        for column, state in ((name, start), (other, end))
    }


def layer_columns(
    problem: Problem,
    rank_mode: str,
    num_tokens: int,
    info: CellInfo,
    us: float,
    yardstick: float,
) -> dict[str, float]:
    """Floor, its ratio and rates of a whole layer that took `us` microseconds, of one GPU."""
    touched, pairs, gpu_ranks = info.touched, info.pairs, problem.num_ranks
    if rank_mode == "real":
        touched, pairs, gpu_ranks = info.max_touched, info.max_pairs, 1
    size = (problem, num_tokens * gpu_ranks, touched, pairs)
    floor = metrics.floor_us(*size, yardstick)
    row = {
        "floor_us": floor,
        "ratio_to_floor": metrics.ratio(us, floor),
        "tflops": metrics.tflops(problem, pairs, us),
        "hbm_gbs": metrics.hbm_gbs(*size, us),
    }
    if problem.num_ranks > 1:
        remote = info.max_remote_pairs
        row["nvlink_gbs"] = metrics.nvlink_gbs(problem, remote, remote, us)
    return row
