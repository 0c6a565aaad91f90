"""Tier 4, timeouts: every kind of wait that cannot end is told by a process that lives on."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpu_timeouts import BEHIND, CASES, STUCK_COUNT

pytestmark = pytest.mark.sm90

AT_ONCE = 6
"""Processes at a time: most of their seconds go into imports."""
BOTH = ("l1_arrival_count", "l2_arrival", "pool_ring", "intermediate_ring")
"""Waits of the load and dispatch warps behind the math warps, which take turns in pingpong."""
RUNS = [(case, "wide128") for case in CASES] + [(case, "pingpong") for case in BOTH]


def provoke(run: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("gpu_timeouts.py")
    return subprocess.run(
        [sys.executable, str(script), *run],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(RUNS, pool.map(provoke, RUNS), strict=True))


def told_by(runs: Any, case: str, schedule: str = "wide128") -> dict[str, Any]:
    run = runs[case, schedule]
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert "in 1.5 s" in told["message"]
    assert "CUDA context is lost" in told["message"]
    return told


def test_a_grid_barrier_before_the_counts(runs: Any) -> None:
    told = told_by(runs, "dispatch_sync")
    assert told["tags"][0] == 1
    assert (told["phase"], told["rank"], told["peer"]) == ("dispatch", 0, None)
    assert told["want"] == told["num_sms"]
    assert told["message"].startswith("dispatch: exchange of the counts, grid barrier")


def test_a_grid_barrier_before_the_sum(runs: Any) -> None:
    told = told_by(runs, "combine_sync")
    assert told["tags"] == [6]
    assert (told["phase"], told["rank"], told["peer"]) == ("combine", 0, None)
    assert told["want"] == told["num_sms"]
    assert told["message"].startswith("combine: grid barrier before the sum")


def test_a_rank_that_never_launches(runs: Any) -> None:
    told = told_by(runs, "never_launches")
    assert told["tags"] == [2]
    assert (told["phase"], told["rank"], told["peer"]) == ("dispatch", 0, 1)
    assert (told["have"], told["want"], told["expert"], told["tile"]) == (0, 1, None, None)
    assert told["message"].startswith("dispatch: rank 1 has not arrived with its counts: rank 0")
    assert "counted 0 of 1 launches" in told["message"]


@pytest.mark.parametrize(
    ("case", "tag", "phase", "what"),
    [("dispatch_signal", 2, "dispatch", "counts"), ("combine_signal", 7, "combine", "rows")],
)
def test_a_peer_behind_with_its_launches(
    runs: Any, case: str, tag: int, phase: str, what: str
) -> None:
    told = told_by(runs, case)
    assert told["tags"][0] == tag
    assert (told["phase"], told["rank"], told["peer"]) == (phase, 1, 0)
    assert (told["have"], told["want"]) == (BEHIND + 1, 1)
    assert told["message"].startswith(f"{phase}: rank 0 has not arrived with its {what}")


@pytest.mark.parametrize("schedule", ["wide128", "pingpong"])
@pytest.mark.parametrize(
    ("case", "tag", "phase", "what"),
    [
        ("l1_arrival_count", 4, "linear1", "its tokens"),
        ("l2_arrival", 5, "linear2", "linear1"),
    ],
)
def test_a_block_that_waits_for_the_phase_before(
    runs: Any, case: str, tag: int, phase: str, what: str, schedule: str
) -> None:
    told = told_by(runs, case, schedule)
    assert tag in told["tags"]
    assert (told["phase"], told["rank"], told["peer"]) == (phase, 1, None)
    assert (told["pool_block"], told["expert"]) == (0, told["first_experts"][1])
    assert told["tile"] in (0, 1)
    assert told["have"] == STUCK_COUNT + told["want"]
    assert told["message"].startswith(f"{phase}: pool block 0 waits for {what} (expert ")


@pytest.mark.parametrize("schedule", ["wide128", "pingpong"])
def test_rows_of_the_pool_that_do_not_become_free(runs: Any, schedule: str) -> None:
    """Linear2 of the block that holds the rows waits too, and is the cause."""
    told = told_by(runs, "pool_ring", schedule)
    assert {3, 5} <= set(told["tags"])
    assert (told["phase"], told["rank"], told["pool_block"]) == ("linear2", told["hot_rank"], 0)
    assert "stuck behind it: " in told["message"]
    assert f"rank {told['hot_rank']} dispatch" in told["message"]


@pytest.mark.parametrize("schedule", ["wide128", "pingpong"])
def test_rows_of_the_intermediate_that_do_not_become_free(runs: Any, schedule: str) -> None:
    told = told_by(runs, "intermediate_ring", schedule)
    assert 8 in told["tags"]
    assert 3 not in told["tags"]
    assert (told["phase"], told["rank"]) == ("linear1", told["hot_rank"])
    assert told["pool_block"] == told["ring_blocks"]
    assert told["expert"] == told["first_experts"][told["hot_rank"]]
    assert told["have"] == STUCK_COUNT + told["want"]
    assert "waits for linear2 to free its ring rows" in told["message"]
