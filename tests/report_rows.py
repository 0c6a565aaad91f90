"""Rows of whole searches, and the report on them."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from tl_megamoe.explorer import report
from tl_megamoe.explorer.schema import COLUMNS, SCHEMA, typed_frame
from tl_megamoe.explorer.table import append_rows, table_path
from tl_megamoe.problem import PRESETS
from tl_megamoe.schedule import Schedule

FLASH = PRESETS["deepseek-v4-flash"].one_rank()
DEVICE = "nvidia-h200"
TOKENS = (16, 64, 256, 512, 1024, 4096, 8192)
FLOORS = (164.6, 175.7, 176.2, 176.9, 233.2, 868.6, 1779.2)
RUN = "20261129-211502-3fa9"
FAST, SLOW = (
    Schedule(experts_per_wave=32, stages=3),
    Schedule(experts_per_wave=32, rows_in_flight=2),
)


def result_row(tokens: int, schedule: Schedule, us: float | None, **fields: Any) -> dict[str, Any]:
    """A row of this schema; a time makes it `ok`, with the rest of its numbers."""
    floor = float(fields.get("floor_us", 100.0 + tokens))
    row: dict[str, Any] = {
        "problem": FLASH.name,
        "num_tokens": tokens,
        "num_ranks": 8,
        "rank_mode": "one",
        "routing": "uniform",
        "seed": 0,
        "stage": "screen",
        "observation": 0,
        "run": RUN,
        "candidate": schedule.name,
        "phase": "fused",
        "recipe": "exact-128",
        "status": "ok",
        "source": "measured",
        "hidden": FLASH.hidden,
        "intermediate": FLASH.intermediate,
        "num_local_experts": FLASH.num_local_experts,
        "num_topk": FLASH.num_topk,
        "capacity": 8192,
        "device": DEVICE,
        "card": "5be1a2c3",
        "tilelang": "0.1.15",
        "nvcc": "13.0.88",
        "torch": "2.11.0",
        "driver": "580.1",
        "kernel": "abc",
        "commit": "945bd32",
        "measured_at": "2026-11-29T21:15:02+00:00",
        **schedule.to_dict(),
    }
    if us is not None:
        row |= {
            "median_us": us,
            "p10_us": us * 0.99,
            "p90_us": us * 1.02,
            "num_samples": 40,
            "floor_us": floor,
            "ratio_to_floor": us / floor,
            "yardstick_tflops": 1400.0,
            "tflops": 100.0,
            "hbm_gbs": 3000.0,
        }
    return {**row, **fields}


def frame_of(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows as `read_table` gives them."""
    lines = [
        ["" if row.get(name) is None else str(row[name]) for name in COLUMNS]
        for row in ({"schema": SCHEMA, **row} for row in rows)
    ]
    return typed_frame(lines, COLUMNS)


def confirm_rows(
    tokens: int, schedule: Schedule, us: float, ratio: float, **fields: Any
) -> list[dict[str, Any]]:
    """Three seeds of three observations, a percent apart."""
    return [
        result_row(
            tokens,
            schedule,
            us * (1 + 0.01 * (observation - 1)),
            stage="confirm",
            seed=seed,
            observation=observation,
            baseline="default_schedule",
            baseline_us=us / ratio,
            ratio_to_baseline=ratio * (1 + 0.01 * (observation - 1)),
            **fields,
        )
        for seed in range(3)
        for observation in range(3)
    ]


def synthetic_rows(
    problem: str = FLASH.name, scale: float = 1.0, seed: int = 0
) -> list[dict[str, Any]]:
    """A whole search: 40 candidates screened at 7 token counts, failures, 5 confirmed, a bench."""
    rng = random.Random(seed)
    base = Schedule(experts_per_wave=32)
    some = [
        replace(base, block_m=m, stages=stages, rows_in_flight=rows, num_sms=sms)
        for m in (64, 128)
        for stages in (3, 4, 5)
        for rows in (1, 2, 3, 4)
        for sms in (128, 132)
    ][:40]
    clock = 0
    out = []

    def add(tokens: int, schedule: Schedule, us: float | None, **fields: Any) -> None:
        nonlocal clock
        clock += 1
        heat = 1 - math.exp(-clock / 150)
        seconds = 2 * clock
        stamp = f"2026-11-29T{21 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        if us is not None:
            fields = {
                "yardstick_tflops": 1490 - 220 * heat + rng.gauss(0, 12),
                "sm_clock_mhz": 1850 - 400 * heat + rng.gauss(0, 25),
                "sm_clock_end_mhz": 1780 - 400 * heat + rng.gauss(0, 25),
                "power_w": 693 + rng.gauss(0, 2),
                "power_end_w": 695 + rng.gauss(0, 2),
                "tflops": 24.0 * tokens**0.4,
                "floor_us": floor,
                "ratio_to_floor": us / floor,
                **fields,
            }
        row = result_row(tokens, schedule, us, problem=problem, **fields)
        out.append({**row, "measured_at": f"{stamp}+00:00"})

    for tokens, floor in zip(TOKENS, (scale * f for f in FLOORS), strict=True):
        default = floor * (1.25 + 0.9 * math.exp(-(math.log2(tokens / 1024) ** 2) / 2))
        wide = tokens >= 512
        times = {}
        for index, schedule in enumerate(some):
            if index % 13 == 5:
                add(tokens, schedule, None, status="spilled", reason="24 bytes of register spills")
            elif index % 17 == 9:
                add(tokens, schedule, None, status="duplicate", reason="as m128-n256.256")
            elif tokens == 16 and index == 20:
                add(tokens, schedule, None, status="timeout", reason="<no> answer | in `180` s & x")
            else:
                part = 1.0 + 0.15 * ((schedule.block_m == 64) == wide)
                part += 0.02 * abs(schedule.rows_in_flight - 3) + 0.03 * abs(schedule.stages - 4)
                part *= 0.97 * (1 + rng.gauss(0, 0.006))
                times[schedule] = part
                named = {"baseline": "default_schedule", "baseline_us": default}
                add(tokens, schedule, part * default, ratio_to_baseline=part, **named)
        chosen = sorted(times, key=lambda s: times[s])[:5]
        for number in range(9):
            now = default * (1 + rng.gauss(0, 0.01))
            for schedule in chosen:
                part = times[schedule] * (1 + rng.gauss(0, 0.003))
                place = {"stage": "confirm", "seed": number // 3, "observation": number % 3}
                named = {"baseline": "default_schedule", "baseline_us": now}
                add(tokens, schedule, part * now, ratio_to_baseline=part, **place, **named)
        for name, worse in (("deepgemm", 1.06), ("triton", 1.02 if tokens < 256 else 1.4)):
            us = times[chosen[0]] * default
            named = {"baseline": name, "baseline_version": "1.2", "baseline_us": worse * us}
            add(tokens, chosen[0], us, stage="bench", ratio_to_baseline=1 / worse, **named)
    return out


def write_table(results: Path, rows: Sequence[dict[str, Any]], problem: str = FLASH.name) -> Path:
    path = table_path(results, DEVICE, problem)
    append_rows(path, rows)
    return path


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()

    def add(name: str, command: Any, text: str) -> Any:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(command=command)
        return sub

    report.add_parser(add)
    args = parser.parse_args(["report", *map(str, argv)])
    return int(args.command(args))
