"""One search: enumerate, compile, check, time, record. Every candidate leaves a row.

The GPU side and the compiler come in as arguments, so that all of this runs in tests without
either.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

import tl_megamoe
from tl_megamoe import frozen, metrics
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule, default_schedule

from .cost import predict, uniform_counts
from .farm import NOT_BUILT, BuildResult, Farm, kernel_digest, package_version
from .protocol import Bench, Failure, Measurement, Rules, run_rounds
from .space import Space, best_by_model, enumerate_candidates
from .table import append_rows, finished_keys, key_of, table_path
from .worker import CellInfo, CheckResult, WorkerConfig, kernel_specs

logger = logging.getLogger(__name__)

MODEL_DEVICE = "sm90-model"
"""Device of rows that rest on the cost model."""
BASELINE = "default_schedule"


class CellBench(Bench, Protocol):
    """`protocol.Bench` with the checks around it: `measure.RemoteBench` or a fake."""

    def start(self) -> dict[str, str]: ...
    def cell(self, num_tokens: int, routing: str) -> CellInfo: ...
    def check(self, name: str, schedule: Schedule) -> CheckResult: ...
    def recheck(self, name: str) -> CheckResult: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search.

    Attributes:
        problem: the layer as it runs: the one-rank view, or over all virtual ranks.
        rank_mode: `one`, or `virtual`: all ranks of `problem` share the GPU.
        tokens: token counts that a rank contributes, one cell each.
        space: where candidates come from.
        results: folder of the tables.
        limit: candidates a cell, the best by the model; None for all.
        capacity: tokens of the buffers, at least max(tokens).
        again: measure finished rows once more.
        commit: recorded with every row.
    """

    problem: Problem
    tokens: tuple[int, ...]
    space: Space
    results: Path
    capacity: int
    rank_mode: str = "one"
    recipe: Recipe = Recipe()
    phase: str = "fused"
    routing: str = "uniform"
    seed: int = 0
    limit: int | None = None
    again: bool = False
    commit: str = ""
    rules: Rules = Rules()

    @property
    def gpu_ranks(self) -> int:
        """Ranks that run on the GPU."""
        return self.problem.num_ranks


@dataclass(slots=True)
class Cell:
    """The candidates of one token count, with their compile results as they come."""

    num_tokens: int
    schedules: list[Schedule]
    baseline: Schedule
    builds: dict[Schedule, BuildResult] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """What a search did: rows written, rows that were there already, rows by status."""

    path: Path
    written: int
    skipped: int
    statuses: dict[str, int]


def worker_config(options: SearchOptions) -> WorkerConfig:
    """What the GPU worker of a search is built for."""
    return WorkerConfig(
        problem=options.problem,
        capacity=options.capacity,
        rank_mode=options.rank_mode,
        recipe=options.recipe,
        phase=options.phase,
        seed=options.seed,
        rules=options.rules,
    )


def plan_cells(options: SearchOptions, frozen_device: str | None = None) -> list[Cell]:
    """The candidates of every token count; the frozen schedule of a device is one of them.

    Raises:
        ScheduleError: the built-in default of a token count is not valid for the problem.
    """
    cells = []
    for num_tokens in options.tokens:
        # The baseline of every row.
        baseline = default_schedule(options.problem, num_tokens, recipe=options.recipe)
        baseline.check(options.problem, options.recipe)
        current = None
        if frozen_device is not None:
            found = frozen.lookup(
                options.problem, frozen_device, num_tokens, rank_mode=options.rank_mode
            )
            current = found.schedule if found is not None else None
        candidates = enumerate_candidates(
            options.problem,
            num_tokens,
            options.space,
            options.recipe,
            current,
            gpu_ranks=options.gpu_ranks,
        )
        schedules = best_by_model(
            candidates,
            options.problem,
            num_tokens,
            options.limit,
            recipe=options.recipe,
            gpu_ranks=options.gpu_ranks,
        )
        cells.append(Cell(num_tokens, schedules, candidates.pinned["default"]))
    return cells


def build_cells(options: SearchOptions, cells: Sequence[Cell], farm: Farm) -> dict[str, int]:
    """Compile what the cells need; a progress bar goes to stderr. Counts kernels by status."""
    config = worker_config(options)
    schedules = {s for cell in cells for s in (*cell.schedules, cell.baseline)}
    specs = {s: kernel_specs(config, s) for s in sorted(schedules, key=lambda s: s.name)}
    everything = [spec for by_phase in specs.values() for spec in by_phase.values()]
    distinct = len({spec.key() for spec in everything})
    with tqdm(total=distinct, desc="compile", unit="kernel", file=sys.stderr) as bar:
        results = farm.run(everything, lambda spec, result: _tick(bar))
    for cell in cells:
        for schedule in {*cell.schedules, cell.baseline}:
            by_phase = {p: results[spec.key()] for p, spec in specs[schedule].items()}
            bad = [r for r in by_phase.values() if r.status != "ok"]
            cell.builds[schedule] = bad[0] if bad else by_phase[options.phase]
        built = [s for s in cell.schedules if cell.builds[s].status != NOT_BUILT]
        if len(built) < len(cell.schedules):
            logger.warning(
                "%d tokens: %d of %d candidates are not prebuilt and are left out",
                cell.num_tokens,
                len(cell.schedules) - len(built),
                len(cell.schedules),
            )
        cell.schedules = built
    counts: dict[str, int] = {}
    for result in results.values():
        counts[result.status] = counts.get(result.status, 0) + 1
    return counts


def run_search(
    options: SearchOptions,
    farm: Farm,
    make_bench: Callable[[WorkerConfig, Schedule], CellBench] | None,
    device_name: str | None = None,
) -> SearchSummary:
    """Search: with a bench candidates are measured, without one the model ranks them.

    Args:
        options: what to search.
        farm: compiles.
        make_bench: a GPU worker from its config and the control schedule; None without a GPU.
        device_name: the GPU's name, for example `NVIDIA H200`; None without a GPU.

    Raises:
        measure.GpuUnusable: the GPU does not run even the control; finished rows are kept.
    """
    device = MODEL_DEVICE if device_name is None else frozen.device_key(device_name)
    recorder = Recorder(options, device, measured=make_bench is not None)
    cells = plan_cells(options, None if device_name is None else device)
    for cell in cells:
        cell.schedules = [s for s in cell.schedules if recorder.is_open(cell.num_tokens, s)]
    cells = [cell for cell in cells if cell.schedules]
    if not cells:
        return recorder.summary()
    build_cells(options, cells, farm)
    if make_bench is None:
        for cell in cells:
            recorder.write(recorder.model_row(cell, s) for s in cell.schedules)
        return recorder.summary()
    bench = make_bench(worker_config(options), cells[-1].baseline)
    try:
        recorder.torch_version = bench.start()["torch"]
        for cell in cells:
            _measure_cell(cell, bench, recorder, options)
    finally:
        bench.close()
    return recorder.summary()


def _measure_cell(cell: Cell, bench: CellBench, recorder: Recorder, options: SearchOptions) -> None:
    builds = cell.builds
    recorder.write(
        recorder.failed_row(cell, s, builds[s].status, builds[s].reason)
        for s in cell.schedules
        if builds[s].status != "ok"
    )
    info = bench.cell(cell.num_tokens, options.routing)
    todo = [s for s in cell.schedules if cell.builds[s].status == "ok"]
    # The baseline runs in every loop, so that each row has a ratio measured beside it.
    extra = cell.baseline not in cell.schedules and cell.builds[cell.baseline].status == "ok"
    checks: dict[str, CheckResult] = {}
    good: dict[str, Schedule] = {}
    label = f"{cell.num_tokens} tokens"
    candidates = [*todo, cell.baseline] if extra else todo
    for schedule in tqdm(candidates, desc=f"{label}: check", unit="", file=sys.stderr):
        check = checks[schedule.name] = bench.check(schedule.name, schedule)
        if check.status == "ok":
            good[schedule.name] = schedule
        elif schedule in cell.schedules:
            recorder.write([recorder.check_row(cell, schedule, check)])
    total = options.rules.rounds * len(good)
    with tqdm(total=total, desc=f"{label}: time", unit="block", file=sys.stderr) as bar:
        timed = run_rounds(
            bench,
            list(good),
            rules=options.rules,
            seed=options.seed,
            on_block=lambda name: _tick(bar),
        )
    measured = {n: m for n, m in timed.items() if isinstance(m, Measurement)}
    yardstick = max((m.max_yardstick_tflops for m in measured.values()), default=0.0)
    baseline = measured.get(cell.baseline.name)
    for name, schedule in good.items():
        if schedule not in cell.schedules:
            continue
        result = timed[name]
        if isinstance(result, Failure):
            recorder.write([recorder.failed_row(cell, schedule, result.status, result.reason)])
            continue
        after = bench.recheck(name)
        if after.status != "ok":
            recorder.write([recorder.check_row(cell, schedule, after)])
            continue
        row = recorder.measured_row(cell, schedule, result, info, yardstick, baseline)
        recorder.write([{**row, "observation": _observation(checks[name], result)}])


def _tick(bar: Any) -> None:
    bar.update()


def _observation(check: CheckResult, found: Measurement) -> str:
    rounds = "/".join(f"{t:.1f}" for t in found.rounds_us)
    drift = f" yardstick_drift_blocks={found.drifted}" if found.drifted else ""
    return f"{check.observation} rounds_us={rounds}{drift}"


class Recorder:
    """Makes rows and appends them; knows which are there already."""

    def __init__(self, options: SearchOptions, device: str, *, measured: bool):
        self.options = options
        self.device = device
        self.source = "measured" if measured else "model"
        self.torch_version = package_version("torch")
        self.path = table_path(options.results, device, options.problem.name)
        self._finished = set() if options.again else finished_keys(self.path)
        self._skipped = 0
        self._statuses: dict[str, int] = {}

    def is_open(self, num_tokens: int, schedule: Schedule) -> bool:
        """Whether the row is still to be made."""
        done = key_of(self._base(num_tokens, schedule)) in self._finished
        self._skipped += done
        return not done

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, with the time of now."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        batch = [{**row, "measured_at": now} for row in rows]
        if batch:
            append_rows(self.path, batch)
        for row in batch:
            self._statuses[row["status"]] = self._statuses.get(row["status"], 0) + 1

    def summary(self) -> SearchSummary:
        """What happened so far."""
        written = sum(self._statuses.values())
        return SearchSummary(self.path, written, self._skipped, dict(self._statuses))

    def _base(self, num_tokens: int, schedule: Schedule) -> dict[str, Any]:
        o, p = self.options, self.options.problem
        return {
            "problem": p.name,
            "num_tokens": num_tokens,
            "num_ranks": p.table_num_ranks,
            "rank_mode": o.rank_mode,
            "routing": o.routing,
            "seed": o.seed,
            "candidate": schedule.name,
            "phase": o.phase,
            "recipe": str(o.recipe),
            "source": self.source,
            "hidden": p.hidden,
            "intermediate": p.intermediate,
            "num_local_experts": p.num_local_experts,
            "num_topk": p.num_topk,
            "capacity": o.capacity,
            "device": self.device,
            "tilelang": package_version("tilelang"),
            "torch": self.torch_version,
            "kernel": kernel_digest(),
            "commit": o.commit,
            **schedule.to_dict(),
        }

    def _built(self, cell: Cell, schedule: Schedule) -> dict[str, Any]:
        report = cell.builds[schedule].report
        o = self.options
        prediction = predict(
            o.problem, schedule, cell.num_tokens, recipe=o.recipe, gpu_ranks=o.gpu_ranks
        )
        row = {
            **self._base(cell.num_tokens, schedule),
            "predicted_us": prediction.phase_us(o.phase),
        }
        if report is not None:
            for name in ("registers", "spill_bytes", "smem_bytes", "num_wgmma"):
                row[name] = getattr(report, name)
        return row

    def failed_row(
        self,
        cell: Cell,
        schedule: Schedule,
        status: str,
        reason: str,
    ) -> dict[str, Any]:
        """A candidate without a time."""
        return {**self._built(cell, schedule), "status": status, "reason": reason}

    def check_row(self, cell: Cell, schedule: Schedule, check: CheckResult) -> dict[str, Any]:
        """A candidate that failed its check."""
        row = self.failed_row(cell, schedule, check.status, check.reason)
        return {**row, "observation": check.observation}

    def model_row(self, cell: Cell, schedule: Schedule) -> dict[str, Any]:
        """A candidate that was compiled and never ran."""
        build = cell.builds[schedule]
        counts = uniform_counts(self.options.problem, cell.num_tokens)
        ranks = self.options.gpu_ranks
        return {
            **self._built(cell, schedule),
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
    ) -> dict[str, Any]:
        """A candidate that ran. Floor and rates are those of the whole layer, so fused only.

        They count what the GPU does: all its ranks' tokens, touched experts and pairs.
        """
        problem, us = self.options.problem, found.median_us
        row = {
            **self._built(cell, schedule),
            "status": "ok",
            "median_us": us,
            "p10_us": found.p10_us,
            "p90_us": found.p90_us,
            "num_samples": found.num_samples,
            "yardstick_tflops": found.yardstick_tflops,
            "touched_experts": info.touched,
            "pairs": info.pairs,
            "sm_clock_mhz": found.state.sm_clock_mhz,
            "mem_clock_mhz": found.state.mem_clock_mhz,
            "power_w": found.state.power_w,
            "temperature_c": found.state.temperature_c,
        }
        if self.options.phase == "fused":
            tokens = cell.num_tokens * self.options.gpu_ranks
            size = (problem, tokens, info.touched, info.pairs)
            row["floor_us"] = metrics.floor_us(*size, yardstick)
            row["ratio_to_floor"] = metrics.ratio(us, row["floor_us"])
            row["tflops"] = metrics.tflops(problem, info.pairs, us)
            row["hbm_gbs"] = metrics.hbm_gbs(*size, us)
            if problem.num_ranks > 1:
                remote = info.max_remote_pairs
                row["nvlink_gbs"] = metrics.nvlink_gbs(problem, remote, remote, us)
        if baseline is not None:
            row["baseline"] = BASELINE
            row["baseline_version"] = tl_megamoe.__version__
            row["baseline_us"] = baseline.median_us
            row["ratio_to_baseline"] = us / baseline.median_us
        return row
