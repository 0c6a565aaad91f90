"""`tl-megamoe t4`: a table in the results format that tools for auto-tuning share.

T4 is the JSON format that Kernel Tuner writes (schema 1.0.0, kernel_tuner/schema/T4) and that the
AutoTuning Association's methodology reads (schema 1.1.0: it adds `metadata`, among it the unit of
time, and says what the values are). Files made here are of 1.1.0 and fit 1.0.0 too. Times are in
milliseconds, which tools for 1.0.0 take for granted.

What the format asks and a table does not hold is left out, not invented: the seconds that
compilation, checks and the search took, and single samples. `times.runtimes` has one value, the
median; the quantiles and the number of samples are measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .args import counts
from .table import SCHEDULE_COLUMNS, STAGES, read_table, write_atomically

SCHEMA_VERSION = "1.1.0"
METADATA_SCHEMA_VERSION = "1.0.0"
OBJECTIVE = "time"
INVALIDITY = {
    "ok": "correct",
    "invalid": "constraints",
    "duplicate": "constraints",
    "compile_error": "compile",
    "spilled": "compile",
    "no_wgmma": "compile",
    "serialized_wgmma": "compile",
    "launch_error": "runtime",
    "oom": "runtime",
    "timeout": "timeout",
    "incorrect": "correctness",
    "nondeterministic": "correctness",
}
"""Our status -> T4's word. A duplicate was ruled out like an invalid one; kernels that spill or
lack WGMMA are refused when they are compiled."""

CELL = (
    "num_tokens",
    "num_ranks",
    "rank_mode",
    "routing",
    "seed",
    "phase",
    "recipe",
    "capacity",
    "hidden",
    "intermediate",
    "num_local_experts",
    "num_topk",
)
"""Columns beside the schedule's that stand in a configuration, as parameters that do not vary
within a cell: without them, rows of two token counts would look like one configuration."""

MEASUREMENTS: dict[str, tuple[str, str, int | None]] = {
    "median_us": ("time", "ms", 1000),
    "p10_us": ("time_p10", "ms", 1000),
    "p90_us": ("time_p90", "ms", 1000),
    "floor_us": ("time_floor", "ms", 1000),
    "baseline_us": ("time_baseline", "ms", 1000),
    "predicted_us": ("time_predicted", "ms", 1000),
    "num_samples": ("num_samples", "", None),
    "ratio_to_floor": ("ratio_to_floor", "", None),
    "ratio_to_baseline": ("ratio_to_baseline", "", None),
    "yardstick_tflops": ("yardstick", "TFLOP/s", None),
    "tflops": ("tflops", "TFLOP/s", None),
    "hbm_gbs": ("hbm", "GB/s", None),
    "nvlink_gbs": ("nvlink", "GB/s", None),
    "sm_clock_mhz": ("sm_clock", "MHz", None),
    "mem_clock_mhz": ("mem_clock", "MHz", None),
    "power_w": ("power", "W", None),
    "temperature_c": ("temperature", "degC", None),
    "sm_clock_end_mhz": ("sm_clock_end", "MHz", None),
    "mem_clock_end_mhz": ("mem_clock_end", "MHz", None),
    "power_end_w": ("power_end", "W", None),
    "temperature_end_c": ("temperature_end", "degC", None),
    "registers": ("registers", "", None),
    "spill_bytes": ("spills", "B", None),
    "smem_bytes": ("shared_memory", "B", None),
    "num_wgmma": ("num_wgmma", "", None),
    "observation": ("observation", "", None),
    **{
        name: (name, "", None)
        for name in (
            *("candidate", "stage", "run", "status", "reason", "notes", "baseline", "card"),
            *("kernel", "source_hash", "commit"),
        )
    },
}
"""Column -> (name, unit, divisor) of a measurement; only what a row holds is written."""


def results_of(frame: pd.DataFrame) -> dict[str, Any]:
    """The T4 results of measured rows, as a JSON value.

    Args:
        frame: rows of one table; rows of the model are left out, for they never ran.

    Raises:
        ValueError: there is no measured row.
    """
    rows = _measured(frame)
    metadata: dict[str, Any] = {
        "compute_api": "CUDA",
        "platform": "NVIDIA CUDA",
        "device": _joined(rows, "device"),
        "autotuner": "tl-megamoe",
        "autotuner_version": _joined(
            [row for row in rows if row["baseline"] == "default_schedule"], "baseline_version"
        ),
        "timestamp": min((row["measured_at"] for row in rows if row["measured_at"]), default=""),
        "timeunit": "milliseconds",
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {name: value for name, value in metadata.items() if value},
        "results": [_result(row) for row in rows],
    }


def metadata_of(frame: pd.DataFrame) -> dict[str, Any]:
    """The T4 metadata of measured rows: devices and libraries, as a JSON value.

    Raises:
        ValueError: as `results_of`.
    """
    rows = _measured(frame)
    libraries = [
        f"{name}=={version}"
        for name in ("tilelang", "nvcc", "torch")
        for version in _values(rows, name)
    ]
    query = {name: _values(rows, name) for name in ("device", "card", "driver")}
    return {
        "schema_version": METADATA_SCHEMA_VERSION,
        "metadata": {
            "hardware": {"hardware_description": [{"gpu": name} for name in query["device"]]},
            "environment": {"device_query": {"tl-megamoe": query}, "requirements": libraries},
        },
    }


def _measured(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = frame[frame["source"] == "measured"]
    if rows.empty:
        raise ValueError(
            f"none of {len(frame)} rows was measured: T4 holds what ran. Measure with: tl-megamoe "
            "search on a GPU"
        )
    return [{str(k): _plain(v) for k, v in row.items()} for row in rows.to_dict("records")]


def _plain(value: Any) -> Any:
    """A JSON value: nullable and numpy numbers become Python's; None for what JSON cannot say."""
    if pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isinf(value) else value


def _values(rows: Sequence[dict[str, Any]], column: str) -> list[str]:
    return sorted({str(row[column]) for row in rows} - {""})


def _joined(rows: Sequence[dict[str, Any]], column: str) -> str:
    return ", ".join(_values(rows, column))


def _result(row: dict[str, Any]) -> dict[str, Any]:
    measurements = []
    for column, (name, unit, divisor) in MEASUREMENTS.items():
        value = row[column]
        if value is not None and value != "":
            value = value if divisor is None else value / divisor
            measurements.append({"name": name, "value": value, "unit": unit})
    ok = row["status"] == "ok"
    runtimes = [row["median_us"] / 1000] if ok and row["median_us"] is not None else []
    return {
        "timestamp": row["measured_at"],
        "configuration": {name: row[name] for name in (*CELL, *SCHEDULE_COLUMNS)},
        "objectives": [OBJECTIVE],
        "times": {"runtimes": runtimes},
        "invalidity": INVALIDITY[row["status"]],
        "correctness": int(ok),
        "measurements": measurements,
    }


# ---- command


def add_parser(add: Callable[..., Any]) -> None:
    """Register the verb.

    Args:
        add: makes a sub-parser from a name, a function and a text.
    """
    parser = add("t4", run_t4, "Write a table as T4 JSON, the format of Kernel Tuner's results.")
    parser.add_argument("table", type=Path, metavar="TABLE.csv")
    parser.add_argument("--out", type=Path, help="file of the results (stdout)")
    parser.add_argument("--metadata", type=Path, help="write T4 metadata to this file too")
    parser.add_argument("--tokens", type=counts, help="only these token counts")
    parser.add_argument("--stage", choices=STAGES, help="only rows of this stage")


def run_t4(args: argparse.Namespace) -> int:
    """The verb; 0 when the file is written."""
    if not args.table.is_file():
        raise ValueError(
            f"{args.table}: there is no such table; name a <results>/<device>/<problem>.csv, as "
            "results/nvidia-h200/deepseek-v4-flash.csv"
        )
    frame = read_table(args.table)
    if args.tokens is not None:
        frame = _chosen(frame, "num_tokens", args.tokens, f"{args.table}: no rows of --tokens")
    if args.stage is not None:
        frame = _chosen(frame, "stage", (args.stage,), f"{args.table}: no rows left of --stage")
    found = results_of(frame)
    text = _json(found)
    if args.metadata is not None:
        write_atomically(args.metadata, _json(metadata_of(frame)))
    if args.out is None:
        print(text, end="")
    else:
        write_atomically(args.out, text)
        print(f"{args.out}: {len(found['results'])} results")
    left_out = len(frame) - len(found["results"])
    if left_out:
        print(f"{left_out} rows of the cost model are left out: they never ran", file=sys.stderr)
    return 0


def _chosen(
    frame: pd.DataFrame, column: str, values: Sequence[int | str], subject: str
) -> pd.DataFrame:
    """The rows with one of some values in a column.

    Raises:
        ValueError: a value that no row has.
    """
    known = sorted(frame[column].unique())
    missing = [str(value) for value in values if value not in known]
    if missing:
        there = ", ".join(map(str, known)) or "none"
        raise ValueError(f"{subject} {','.join(missing)}; there are rows of {there}")
    return frame[frame[column].isin(list(values))]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
