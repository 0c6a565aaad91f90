"""`tl-megamoe bench` with a fake compiler and GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tl_megamoe.explorer import bench as command
from tl_megamoe.explorer.baselines.base import Layer, Prepared, Tolerance
from tl_megamoe.explorer.baselines.beside import (
    BenchOptions,
    CellResult,
    choose,
    run_beside,
)
from tl_megamoe.explorer.farm import BuildResult, Farm, ReportCache, classify
from tl_megamoe.explorer.messages import CellInfo, CheckResult
from tl_megamoe.explorer.protocol import Block, CandidateFailed, GpuState, Rules
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.problem import PRESETS, Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.schedule import Schedule

VIEW = PRESETS["deepseek-v4-flash"].one_rank()
TINY = Problem(name="t", hidden=256, intermediate=128, num_experts=4, num_topk=2, num_ranks=1)
OURS_US = 100.0


class Named:
    """A baseline that is only a name: the fake GPU knows its time."""

    what = "a name"
    tested = ""
    tolerance: Tolerance | None = None

    def __init__(self, name: str, reason: str | None = None):
        self.name = name
        self.reason = reason

    def available(self) -> str | None:
        return self.reason

    def refuses(self, problem: Problem, recipe: Recipe) -> str | None:
        return "it rounds otherwise" if recipe.scale == "pow2" else None

    def version(self) -> str:
        return f"{self.name} 1.2"

    def prepare(self, layer: Layer) -> Prepared:
        raise AssertionError("prepared in the parent process")


class InlineFarm(Farm):
    """Builds in this process; spills in the phases named."""

    def __init__(self, folder: Path, spills: Sequence[str] = ()):
        super().__init__(cache=ReportCache(folder))
        self.spills = spills
        self.built: list[str] = []

    def run(self, specs: Any, on_done: Any = None) -> dict[KernelSpec, BuildResult]:
        out = {}
        for spec in {s.key(): s for s in specs}.values():
            self.built.append(spec.phase)
            spilled = 64 if spec.phase in self.spills else 0
            report = KernelReport(168, spilled, 200_000, 8, (), f"hash of {spec.phase}", "13.0.88")
            out[spec.key()] = classify(spec, report)
        return out


class FakeGpu:
    """A `BesideBench`: a name's time, or how it fails."""

    def __init__(self, times: dict[str, float | str]):
        self.times = times
        self.log: list[str] = []
        self.closed = False

    def start(self) -> dict[str, str]:
        return {"device": "NVIDIA H200", "torch": "2.11.0", "card": "0badcafe", "driver": "580.1"}

    def cell(self, num_tokens: int, routing: str) -> CellInfo:
        self.log.append(f"cell {num_tokens} {routing}")
        return CellInfo(31, num_tokens * 6)

    def found(self, name: str) -> float | str:
        return self.times.get(name, OURS_US)

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        self.log.append(f"check {name}")
        found = self.found(name)
        if found in ("incorrect", "oom"):
            return CheckResult(str(found), "rel_error=9e-01", f"it is {found}")
        return CheckResult("ok", f"rel_error=2e-03 of={name}")

    def recheck(self, name: str) -> CheckResult:
        moved = self.found(name) == "moves"
        return CheckResult("nondeterministic", "", "moved") if moved else CheckResult("ok")

    def warm_up(self, name: str) -> None: ...

    def block(self, name: str) -> Block:
        self.log.append(f"block {name}")
        found = self.found(name)
        if found == "hangs":
            raise CandidateFailed("timeout", "block took over 300 s")
        us = OURS_US if isinstance(found, str) else found
        samples = tuple(us + n / 10 for n in range(-10, 11))
        return Block(samples, GpuState(1500.0, 2600.0, 690.0, 60.0), GpuState(1450.0))

    def yardstick(self) -> float:
        return 1400.0

    def close(self) -> None:
        self.closed = True


def options(tmp_path: Path, tokens: Sequence[int] = (512,), **changes: Any) -> BenchOptions:
    schedules = choose(VIEW, "nvidia-h200", tokens, "default", Recipe())
    return BenchOptions(
        problem=VIEW,
        schedules=schedules,
        capacity=max(tokens),
        results=tmp_path / "results",
        commit="abc",
        rules=Rules(rounds=2),
        **changes,
    )


def beside(
    opts: BenchOptions, baselines: Sequence[Any], gpu: FakeGpu, farm: Farm
) -> tuple[Path, list[CellResult]]:
    cells: list[CellResult] = []
    path = run_beside(
        opts, baselines, farm, lambda config, control: gpu, "NVIDIA H200", cells.append
    )
    assert gpu.closed
    return path, cells


def parse(*arguments: str) -> argparse.Namespace:
    parsers = argparse.ArgumentParser().add_subparsers()

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        parser = parsers.add_parser(name)
        parser.set_defaults(command=run)
        return parser

    command.add_parser(add)
    return parsers.choices["bench"].parse_args(arguments)
