"""Tables in the T4 format: its fields, its words, and no value that was not measured."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from table_rows import row

from tl_megamoe.explorer.t4 import INVALIDITY, add_parser, metadata_of, results_of
from tl_megamoe.explorer.table import STATUSES, append_rows, read_table
from tl_megamoe.schedule import Schedule

PUBLISHED = Path(__file__).resolve().parents[1] / "results/nvidia-h200/deepseek-v4-flash.csv"
WORDS = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
TIMES = {"compilation_time", "runtimes", "framework", "search_algorithm", "validation"}
FIELDS = {
    "timestamp": str,
    "configuration": dict,
    "objectives": list,
    "times": dict,
    "invalidity": str,
    "correctness": int,
    "measurements": list,
}


def assert_results(data: dict[str, Any]) -> None:
    """What both versions of the results schema, 1.0.0 and 1.1.0, ask."""
    assert set(data) == {"schema_version", "metadata", "results"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", data["schema_version"])
    metadata = data["metadata"]
    assert metadata["compute_api"] in ("OpenCL", "CUDA", "Vulkan")
    assert metadata["timeunit"] in ("nanoseconds", "microseconds", "milliseconds", "seconds")
    known = {"compute_api", "platform", "device", "autotuner", "autotuner_version", "timestamp"}
    assert set(metadata) - {"timeunit"} <= known
    assert all(isinstance(value, str) for value in metadata.values())
    for result in data["results"]:
        assert set(result) == set(FIELDS)
        for name, kind in FIELDS.items():
            assert isinstance(result[name], kind), name
        assert result["invalidity"] in WORDS
        assert result["correctness"] in (0, 1)
        assert set(result["times"]) <= TIMES
        assert all(type(t) is float for t in result["times"]["runtimes"])
        assert all(type(v) in (int, str) for v in result["configuration"].values())
        for measurement in result["measurements"]:
            assert set(measurement) == {"name", "value", "unit"}
            assert type(measurement["value"]) in (int, float, str)
            assert isinstance(measurement["unit"], str)
        names = [m["name"] for m in result["measurements"]]
        assert len(names) == len(set(names))
        if result["invalidity"] == "correct":
            assert set(result["objectives"]) <= set(names)


def assert_metadata(data: dict[str, Any]) -> None:
    """What the metadata schema 1.0.0 asks."""
    assert set(data) == {"schema_version", "metadata"}
    assert data["schema_version"] == "1.0.0"
    assert set(data["metadata"]) <= {"zenodo", "hardware", "environment"}
    assert isinstance(data["metadata"]["hardware"]["hardware_description"], list)
    environment = data["metadata"]["environment"]
    assert isinstance(environment["device_query"], dict)
    assert all(isinstance(text, str) for text in environment["requirements"])


def values(result: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {m["name"]: (m["value"], m["unit"]) for m in result["measurements"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "p.csv"
    versions = {"tilelang": "0.1.15", "torch": "2.11.0", "driver": "580.1", "card": "0a1b2c3d"}
    default = {"baseline": "default_schedule", "baseline_version": "0.1.0", "capacity": 8192}
    when = "2026-11-29T15:59:34+00:00"
    rows = [
        row(p10_us=200.25, num_samples=80, measured_at=when, baseline_us=210, **default),
        row(num_tokens=64, stage="confirm", observation=1, seed=3, **default),
        row(num_tokens=64, status="spilled", median_us=None, reason="8 bytes", **default),
        row(num_tokens=64, source="model", median_us=None, predicted_us=1, **default),
    ]
    append_rows(path, [{**r, **versions} for r in rows])
    return path


def command(*words: str) -> int:
    """Run the verb as cli.py does."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)

    def add(name: str, run: Any, text: str) -> Any:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(command=run)
        return sub

    add_parser(add)
    args = parser.parse_args(["t4", *words])
    return int(args.command(args))


def test_results_fit_the_schema_and_the_table(path: Path) -> None:
    data = results_of(read_table(path))
    assert_results(data)
    assert data["metadata"] == {
        "compute_api": "CUDA",
        "platform": "NVIDIA CUDA",
        "device": "nvidia-h200",
        "autotuner": "tl-megamoe",
        "autotuner_version": "0.1.0",
        "timestamp": "2026-11-29T15:59:34+00:00",
        "timeunit": "milliseconds",
    }
    first, second, third = data["results"]  # the model's row never ran
    assert first["timestamp"] == "2026-11-29T15:59:34+00:00"
    assert first["times"] == {"runtimes": [0.2055]}
    assert (first["invalidity"], first["correctness"]) == ("correct", 1)
    found = values(first)
    assert found["time"] == (0.2055, "ms")
    assert found["time_p10"] == (0.20025, "ms")
    assert found["time_baseline"] == (0.21, "ms")
    assert found["num_samples"] == (80, "")
    assert found["card"] == ("0a1b2c3d", "")
    assert "time_p90" not in found  # empty in the table
    assert second["configuration"] == {
        "num_tokens": 64,
        "num_ranks": 8,
        "rank_mode": "one",
        "routing": "uniform",
        "seed": 3,
        "phase": "fused",
        "recipe": "exact-128",
        "capacity": 8192,
        "hidden": 4096,
        "intermediate": 2048,
        "num_local_experts": 32,
        "num_topk": 6,
        **Schedule().to_dict(),
    }
    assert values(second)["stage"] == ("confirm", "")
    assert values(second)["observation"] == (1, "")
    assert (third["invalidity"], third["correctness"]) == ("compile", 0)
    assert third["times"] == {"runtimes": []}
    assert values(third)["reason"] == ("8 bytes", "")
    assert "time" not in values(third)


EXPECTED = {
    "ok": "correct",
    "invalid": "constraints",
    "compile_error": "compile",
    "spilled": "compile",
    "no_wgmma": "compile",
    "serialized_wgmma": "compile",
    "launch_error": "runtime",
    "timeout": "timeout",
    "incorrect": "correctness",
    "nondeterministic": "correctness",
    "oom": "runtime",
    "duplicate": "constraints",
}


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_a_word(tmp_path: Path, status: str) -> None:
    append_rows(tmp_path / "t.csv", [row(status=status, median_us=None, capacity=1)])
    [result] = results_of(read_table(tmp_path / "t.csv"))["results"]
    assert result["invalidity"] == EXPECTED[status]
    assert result["correctness"] == (1 if status == "ok" else 0)
    assert values(result)["status"] == (status, "")
    assert set(INVALIDITY) == set(STATUSES)


def test_metadata_fits_the_schema_and_the_table(path: Path) -> None:
    data = metadata_of(read_table(path))
    assert_metadata(data)
    assert data["metadata"]["environment"] == {
        "device_query": {
            "tl-megamoe": {"device": ["nvidia-h200"], "card": ["0a1b2c3d"], "driver": ["580.1"]}
        },
        "requirements": ["tilelang==0.1.15", "torch==2.11.0"],
    }


def test_the_command_writes_files(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, metadata = tmp_path / "t4.json", tmp_path / "metadata.json"
    words = [str(path), "--out", str(out), "--metadata", str(metadata)]
    assert command(*words) == 0
    assert json.loads(out.read_text()) == results_of(read_table(path))
    assert_metadata(json.loads(metadata.read_text()))
    said = capsys.readouterr()
    assert said.out == f"{out}: 3 results\n"
    assert said.err == "1 rows of the cost model are left out: they never ran\n"


@pytest.mark.parametrize(
    ("words", "results"),
    [
        ((), 3),
        (("--tokens", "16"), 1),
        (("--tokens", "64,16", "--stage", "screen"), 2),
        (("--stage", "confirm"), 1),
    ],
)
def test_the_command_prints_a_part(
    path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], results: int
) -> None:
    assert command(str(path), *words) == 0
    data = json.loads(capsys.readouterr().out)
    assert_results(data)
    assert len(data["results"]) == results


def test_nothing_to_write_is_said(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "t4.json"
    words = ["--out", str(out)]
    with pytest.raises(ValueError, match="p.csv: no rows of --tokens 99; there are rows of 16, 64"):
        command(str(path), *words, "--tokens", "16,99")
    with pytest.raises(ValueError, match="no rows left of --stage confirm; there are rows of scr"):
        command(str(path), *words, "--tokens", "16", "--stage", "confirm")
    model = tmp_path / "model.csv"
    append_rows(model, [row(source="model", median_us=None, predicted_us=1, capacity=1)])
    with pytest.raises(ValueError, match="none of 1 rows was measured"):
        command(str(model), *words)
    with pytest.raises(ValueError, match="none.csv: there is no such table"):
        command(str(tmp_path / "none.csv"), *words)
    with pytest.raises(SystemExit):
        command(str(path), "--format", "t4")
    assert not out.exists()


def test_a_number_that_json_cannot_say_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append_rows(path, [row(tflops=float("inf"), capacity=1)])
    [result] = results_of(read_table(path))["results"]
    assert "tflops" not in values(result)
    assert command(str(path)) == 0


def test_the_published_table_fits() -> None:
    frame = read_table(PUBLISHED)
    data = results_of(frame)
    assert_results(data)
    assert len(data["results"]) == (frame["source"] == "measured").sum()
    words = [result["invalidity"] for result in data["results"]]
    assert words.count("correct") == (frame["status"] == "ok").sum()
    assert_metadata(metadata_of(frame))
