"""One schedule of ours beside baselines: compile, check, time interleaved, record.

The GPU side and the compiler come in as arguments, so that all of this runs in tests without
either.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

import tl_megamoe
from tl_megamoe import frozen
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import NAME_PREFIXES, Schedule, default_schedule
from tl_megamoe.synthetic import routing_name

from ..farm import NOT_BUILT, BuildResult, Farm, kernel_digest, package_version
from ..messages import CellInfo, CheckResult, WorkerConfig
from ..protocol import Bench, Failure, Measurement, Rules, run_rounds
from ..record import layer_columns, new_run, ranks_text, state_columns
from ..table import append_rows, read_table, table_path
from .base import Baseline
from .unfused import Unfused, unfused_specs

NAME = re.compile(
    r"(?P<math_mode>pp-|sw-)?m(?P<block_m>\d+)-n(?P<linear1_block_n>\d+)\.(?P<linear2_block_n>\d+)"
    r"-s(?P<stages>\d+)-(?:w(?P<experts_per_wave>\d+)|lag(?P<lag>\d+))"
    r"-d(?P<dispatch_warps>\d+)l(?P<load_warps>\d+)"
    r"-r(?P<load_registers>\d+)\.(?P<math_registers>\d+)-f(?P<rows_in_flight>\d+)"
    r"-sm(?P<num_sms>\d+)-p(?P<prefetch>\d+)(?:-e(?P<evict_first>\d+))?(?:-c(?P<cluster_size>\d+))?"
)
"""`Schedule.name`, taken apart."""


class BesideBench(Bench, Protocol):
    """`protocol.Bench` with the checks around it, of candidates and of baselines by name."""

    def start(self) -> dict[str, str]: ...
    def cell(self, num_tokens: int, routing: str) -> CellInfo: ...
    def check(self, name: str, schedule: Schedule) -> CheckResult: ...
    def recheck(self, name: str) -> CheckResult: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to time.

    Attributes:
        problem: the layer as it runs: one rank's view, or over all its ranks.
        rank_mode: `one`, or `real`: a GPU a rank.
        schedules: token count -> ours.
        capacity: tokens of the buffers.
        results: folder of the tables.
        routing: as for `random_inputs`.
        commit: recorded with every row.
    """

    problem: Problem
    schedules: dict[int, Schedule]
    capacity: int
    results: Path
    rank_mode: str = "one"
    recipe: Recipe = Recipe()
    routing: str = "uniform"
    seed: int = 0
    commit: str = ""
    rules: Rules = Rules()

    @property
    def config(self) -> WorkerConfig:
        """What the GPU worker is built for."""
        return WorkerConfig(
            problem=self.problem,
            capacity=self.capacity,
            rank_mode=self.rank_mode,
            recipe=self.recipe,
            seed=self.seed,
            rules=self.rules,
        )


@dataclass(frozen=True, slots=True)
class Entrant:
    """What one cell found of ours or of a baseline.

    Attributes:
        name, version: whose.
        status: `ok`, or why there is no time.
        reason: why it is not ok.
        notes: what its check saw.
        time: None when it is not ok.
    """

    name: str
    version: str
    status: str
    reason: str = ""
    notes: str = ""
    time: Measurement | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell: ours first, then the baselines in their order.

    Attributes:
        schedule: ours.
        yardstick_tflops: highest of the cell; 0 when nothing was timed.
    """

    num_tokens: int
    schedule: Schedule
    info: CellInfo
    ours: Entrant
    baselines: list[Entrant] = field(default_factory=list)
    yardstick_tflops: float = 0.0


def schedule_of(problem: Problem, name: str) -> Schedule:
    """The schedule of a name, as `tl-megamoe list --names` prints it.

    Raises:
        ValueError: not the name of a schedule.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"--schedule {name}: not a schedule's name. Write one as tl-megamoe list --names "
            "prints it, or frozen, or default"
        )
    values: dict[str, Any] = {
        key: int(text)
        for key, text in found.groupdict().items()
        if text is not None and key != "math_mode"
    }
    modes = {prefix: mode for mode, prefix in NAME_PREFIXES.items()}
    values["math_mode"] = modes.get(found["math_mode"], "cooperative")
    if "lag" in values:
        values |= {"order": "lag", "experts_per_wave": problem.num_local_experts}
    return Schedule(**values)


def choose(
    problem: Problem,
    device: str,
    tokens: Sequence[int],
    name: str,
    recipe: Recipe,
    rank_mode: str = "one",
) -> dict[int, Schedule]:
    """Our schedule for each token count.

    Args:
        problem: the layer as it runs.
        device: whose frozen choices.
        tokens: of a rank.
        name: `frozen` (the built-in default where nothing is frozen), `default`, or a schedule's.
        recipe: of the kernels.
        rank_mode: how the ranks run, as for `frozen.lookup`.

    Raises:
        ScheduleError: not valid for the problem.
    """

    def one(num_tokens: int) -> Schedule:
        if name == "frozen":
            found = frozen.lookup(problem, device, num_tokens, rank_mode=rank_mode)
            if found is not None and not found.schedule.violations(problem, recipe):
                return found.schedule
        if name in ("frozen", "default"):
            return default_schedule(problem, num_tokens, recipe=recipe)
        return schedule_of(problem, name)

    chosen = {num_tokens: one(num_tokens) for num_tokens in tokens}
    for schedule in chosen.values():
        schedule.check(problem, recipe)
    return chosen


def bench_specs(options: BenchOptions, schedule: Schedule, unfused: bool) -> list[KernelSpec]:
    """The kernels of a cell, the fused one first."""
    size = (options.problem, schedule, options.capacity, options.recipe)
    fused = KernelSpec(
        problem=options.problem,
        schedule=schedule,
        capacity=options.capacity,
        recipe=options.recipe,
    )
    return [fused, *(unfused_specs(*size) if unfused else ())]


def build(
    options: BenchOptions, baselines: Sequence[Baseline], farm: Farm
) -> dict[KernelSpec, BuildResult]:
    """Compile what a bench needs; a progress bar goes to stderr. Results by `KernelSpec.key`.

    Raises:
        ValueError: the farm may not compile, and a kernel is not there.
    """
    unfused = any(baseline.name == Unfused.name for baseline in baselines)
    specs = [
        spec
        for schedule in options.schedules.values()
        for spec in bench_specs(options, schedule, unfused)
    ]
    total = len({spec.key() for spec in specs})
    with tqdm(total=total, desc="compile", unit="kernel", file=sys.stderr) as bar:
        results = farm.run(specs, lambda spec, result: _tick(bar))
    missing = [spec for spec in results if results[spec].status == NOT_BUILT]
    if missing:
        names = ", ".join(f"{spec.phase} {spec.schedule.name}" for spec in missing)
        raise ValueError(
            f"{len(missing)} of {total} kernels are not in the cache: {names}. Compile them with "
            "the same command and --compile-only in place of --prebuilt"
        )
    return results


def run_beside(
    options: BenchOptions,
    baselines: Sequence[Baseline],
    farm: Farm,
    make_bench: Callable[[WorkerConfig, Schedule], BesideBench],
    device_name: str,
    on_cell: Callable[[CellResult], None],
) -> Path:
    """Time ours beside the baselines, a cell for each token count, and append the rows.

    Args:
        options: what to time.
        baselines: all are able to run here.
        farm: compiles our kernels.
        make_bench: a GPU worker from its config and the schedule that runs after a failure.
        device_name: the GPU's name, for example `NVIDIA H200`.
        on_cell: called with each cell when its rows are written.

    Returns:
        The table.

    Raises:
        ValueError: as `build`.
        measure.GpuUnusable: the GPU does not run even the control; written rows are kept.
    """
    builds = build(options, baselines, farm)
    device, run = frozen.device_key(device_name), new_run()
    problem, mode = options.problem, options.rank_mode
    path = table_path(options.results, device, problem.name, mode, problem.num_ranks)
    control = default_schedule(options.problem, max(options.schedules), recipe=options.recipe)
    usable = [s for s in options.schedules.values() if _built(options, s, builds).status == "ok"]
    bench = make_bench(options.config, usable[0] if usable else control)
    try:
        versions = bench.start()
        for num_tokens, schedule in options.schedules.items():
            built = _built(options, schedule, builds)
            result = _run_cell(options, num_tokens, schedule, baselines, builds, bench)
            common = {
                **_common(options, result, built),
                "run": run,
                "device": device,
                **{name: versions.get(name, "") for name in ("torch", "card", "driver")},
            }
            append_rows(path, _numbered(path, [{**common, **row} for row in rows_of(result)]))
            on_cell(result)
    finally:
        bench.close()
    return path


def _run_cell(
    options: BenchOptions,
    num_tokens: int,
    schedule: Schedule,
    baselines: Sequence[Baseline],
    builds: dict[KernelSpec, BuildResult],
    bench: BesideBench,
) -> CellResult:
    info = bench.cell(num_tokens, options.routing)
    ours = f"{tl_megamoe.__version__} {kernel_digest()}"
    versions = {schedule.name: ours} | {b.name: b.version() for b in baselines}
    checks: dict[str, CheckResult] = {}
    label = f"{num_tokens} tokens"
    for name in tqdm(versions, desc=f"{label}: check", unit="", file=sys.stderr):
        bad = _bad_build(options, schedule, name, builds)
        checks[name] = (
            bench.check(name, schedule) if bad is None else CheckResult(bad.status, "", bad.reason)
        )
    good = [name for name, check in checks.items() if check.status == "ok"]
    total = options.rules.rounds * len(good)
    with tqdm(total=total, desc=f"{label}: time", unit="block", file=sys.stderr) as bar:
        timed = run_rounds(
            bench, good, rules=options.rules, seed=options.seed, on_block=lambda name: _tick(bar)
        )

    def entrant(name: str) -> Entrant:
        check, found = checks[name], timed.get(name)
        if isinstance(found, Failure):
            check = CheckResult(found.status, check.observation, found.reason)
        elif found is not None:
            after = bench.recheck(name)
            if after.status != "ok":
                check = after
        time = found if isinstance(found, Measurement) and check.status == "ok" else None
        return Entrant(name, versions[name], check.status, check.reason, check.observation, time)

    mine, *theirs = (entrant(name) for name in versions)
    yardstick = max(
        (m.max_yardstick_tflops for m in timed.values() if isinstance(m, Measurement)), default=0.0
    )
    return CellResult(num_tokens, schedule, info, mine, theirs, yardstick)


def _built(
    options: BenchOptions, schedule: Schedule, builds: dict[KernelSpec, BuildResult]
) -> BuildResult:
    return builds[bench_specs(options, schedule, unfused=False)[0].key()]


def _bad_build(
    options: BenchOptions, schedule: Schedule, name: str, builds: dict[KernelSpec, BuildResult]
) -> BuildResult | None:
    """The first kernel of ours or of the unfused baseline that is not good."""
    if name not in (schedule.name, Unfused.name):
        return None
    fused, *phases = bench_specs(options, schedule, unfused=name == Unfused.name)
    results = [builds[spec.key()] for spec in phases or [fused]]
    return next((result for result in results if result.status != "ok"), None)


# ---- rows


def layer_rates(options: BenchOptions, cell: CellResult, us: float) -> dict[str, float]:
    """Floor, its ratio and rates of a layer of this cell that took `us` microseconds."""
    how = (options.problem, options.rank_mode)
    return layer_columns(*how, cell.num_tokens, cell.info, us, cell.yardstick_tflops)


def rows_of(cell: CellResult) -> list[dict[str, Any]]:
    """What differs between the rows of a cell: one for each baseline, one alone without any.

    A baseline that failed has a row too: without a time, its status and why in `notes`.
    """
    ours = cell.ours
    if not cell.baselines or ours.time is None:
        return [{"notes": ours.notes}]
    rows = []
    for other in cell.baselines:
        row: dict[str, Any] = {"baseline": other.name, "baseline_version": other.version}
        if other.time is None:
            said = f"baseline {other.status}: {other.reason}"
        else:
            row["baseline_us"] = other.time.median_us
            row["ratio_to_baseline"] = ours.time.median_us / other.time.median_us
            said = (
                f"baseline_p10_us={other.time.p10_us:.1f} baseline_p90_us={other.time.p90_us:.1f} "
                f"baseline_yardstick_tflops={other.time.yardstick_tflops:.0f} {other.notes}"
            )
            if other.time.ranks_us:
                said += f" baseline_ranks_us={ranks_text(other.time)}"
        row["notes"] = f"{ours.notes}; {said}".strip("; ")
        rows.append(row)
    return rows


def _common(options: BenchOptions, cell: CellResult, built: BuildResult) -> dict[str, Any]:
    """What the rows of a cell share: ours, and where it ran."""
    p, ours = options.problem, cell.ours
    row: dict[str, Any] = {
        "problem": p.name,
        "num_tokens": cell.num_tokens,
        "num_ranks": p.table_num_ranks,
        "rank_mode": options.rank_mode,
        "routing": routing_name(options.routing),
        "seed": options.seed,
        "stage": "bench",
        "candidate": cell.schedule.name,
        "phase": "fused",
        "recipe": str(options.recipe),
        "status": ours.status,
        "reason": ours.reason,
        "source": "measured",
        "hidden": p.hidden,
        "intermediate": p.intermediate,
        "num_local_experts": p.num_local_experts,
        "num_topk": p.num_topk,
        "touched_experts": cell.info.touched,
        "pairs": cell.info.pairs,
        "capacity": options.capacity,
        "tilelang": package_version("tilelang"),
        "kernel": kernel_digest(),
        "commit": options.commit,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        **cell.schedule.to_dict(),
    }
    if built.report is not None:
        for name in ("registers", "spill_bytes", "smem_bytes", "num_wgmma", "source_hash"):
            row[name] = getattr(built.report, name)
    time = ours.time
    if time is not None:
        row |= {
            "median_us": time.median_us,
            "p10_us": time.p10_us,
            "p90_us": time.p90_us,
            "num_samples": time.num_samples,
            "ranks_us": ranks_text(time),
            "yardstick_tflops": time.yardstick_tflops,
            **layer_rates(options, cell, time.median_us),
            **state_columns(time.state, time.end),
        }
    return row


def _numbered(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a candidate with the next observation numbers of its bench rows."""
    frame = read_table(path)
    first = rows[0]
    for name in ("stage", "num_tokens", "routing", "seed", "candidate"):
        frame = frame[frame[name] == first[name]]
    start = 0 if frame.empty else int(frame["observation"].max()) + 1
    return [{**row, "observation": start + number} for number, row in enumerate(rows)]


def _tick(bar: Any) -> None:
    bar.update()
