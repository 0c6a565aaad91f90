"""A fake compiler and a fake GPU for searches: times follow from a schedule's fields."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from tl_megamoe.explorer.farm import BuildResult, Farm, ReportCache, classify
from tl_megamoe.explorer.messages import CellInfo, CheckResult
from tl_megamoe.explorer.protocol import Block, CandidateFailed, GpuState, Rules
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.problem import PRESETS
from tl_megamoe.schedule import Schedule

VIEW = PRESETS["deepseek-v4-flash"].one_rank()
SPACE = """
[[base]]
[vary]
stages = [3, 4]
rows_in_flight = [1, 2, 3, 4, 5]
num_sms = [132, 128]
"""


class InlineFarm(Farm):
    """Builds in this process; rows_in_flight 5 spills; a text of its own for each kernel."""

    def __init__(self, folder: Path, texts: dict[str, str] | None = None):
        super().__init__(cache=ReportCache(folder))
        self.built: list[str] = []
        self.texts = texts or {}

    def run(self, specs: Any, on_done: Any = None) -> dict[KernelSpec, BuildResult]:
        out = {}
        for spec in {s.key(): s for s in specs}.values():
            name = spec.key().schedule.name
            self.built.append(spec.schedule.name)
            spills = 64 if spec.schedule.rows_in_flight == 5 else 0
            report = KernelReport(
                168, spills, 200_000, 8, (), self.texts.get(name, name), "13.0.88"
            )
            out[spec.key()] = classify(spec, report)
            if on_done is not None:
                on_done(spec.key(), out[spec.key()])
        return out


def time_of(schedule: Schedule) -> float:
    """Microseconds that a schedule takes on the fake GPU."""
    return 250.0 + 10 * abs(schedule.rows_in_flight - 2) + (132 - schedule.num_sms)


class FakeGpu:
    """A `CellBench`.

    Args:
        bad: rows_in_flight -> a status of the check, `timeout_later` (while timed) or
            `differs_later` (after it).
        interrupt_after: blocks after which it raises KeyboardInterrupt.
        noise: relative standard deviation of a block's time.
        pause_s: seconds that a block takes.
    """

    def __init__(
        self,
        bad: dict[int, str] | None = None,
        interrupt_after: int | None = None,
        noise: float = 0.0,
        pause_s: float = 0.0,
    ):
        self.bad = bad or {}
        self.interrupt_after = interrupt_after
        self.noise = noise
        self.pause_s = pause_s
        self.random = random.Random(1)
        self.cells: list[tuple[int, str, int | None]] = []
        self.rules: list[Rules | None] = []
        self.checked: list[str] = []
        self.schedules: dict[str, Schedule] = {}
        self.blocks = 0
        self.starts = 0
        self.closed = False

    @property
    def tokens(self) -> list[int]:
        """Token counts in the order in which they were begun, each once in a row."""
        found = [tokens for tokens, _, _ in self.cells]
        return [t for i, t in enumerate(found) if i == 0 or found[i - 1] != t]

    def start(self) -> dict[str, str]:
        self.starts += 1
        return self.facts()

    def facts(self) -> dict[str, str]:
        return {"device": "NVIDIA H200", "torch": "2.11.0", "card": "0badcafe", "driver": "570.1"}

    def cell(
        self, num_tokens: int, routing: str, seed: int | None = None, rules: Rules | None = None
    ) -> CellInfo:
        self.cells.append((num_tokens, routing, seed))
        self.rules.append(rules)
        self.schedules.clear()
        return CellInfo(31, num_tokens * 6)

    def check(self, name: str, schedule: Schedule) -> CheckResult:
        self.checked.append(name)
        self.schedules[name] = schedule
        status = self.bad.get(schedule.rows_in_flight, "ok")
        if status in ("timeout_later", "differs_later"):
            status = "ok"
        return CheckResult(status, "rel_error=2e-03", "" if status == "ok" else f"it is {status}")

    def recheck(self, name: str) -> CheckResult:
        if self.bad.get(self.schedules[name].rows_in_flight) == "differs_later":
            return CheckResult("nondeterministic", "", "3 values differ after timing")
        return CheckResult("ok")

    def warm_up(self, name: str) -> None:
        assert name in self.schedules

    def block(self, name: str) -> Block:
        self.blocks += 1
        time.sleep(self.pause_s)
        if self.interrupt_after is not None and self.blocks > self.interrupt_after:
            raise KeyboardInterrupt
        schedule = self.schedules[name]
        if self.bad.get(schedule.rows_in_flight) == "timeout_later":
            raise CandidateFailed("timeout", "killed")
        us = time_of(schedule) * (1 + self.noise * self.random.gauss(0, 1))
        return Block(
            (us,) * 20,
            GpuState(1500.0, 3201.0, 690.0, 55.0),
            GpuState(1480.0, 3201.0, 700.0, 56.0),
        )

    def yardstick(self) -> float:
        return 1400.0 + self.blocks % 7

    def close(self) -> None:
        self.closed = True
