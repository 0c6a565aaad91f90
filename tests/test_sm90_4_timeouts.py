"""Tier 4, timeouts: every kind of wait that cannot end is told by a process that lives on.

On one GPU only, the ranks virtual. A timeout costs the CUDA context, so every case has a process of
its own; the processes of a torchrun job would have to leave it and come back, and a peer whose
context is lost takes the memory behind the others' addresses with it. What waits and reports is the
same text on a GPU a rank; only the addresses differ.

A tag has one slot over all virtual ranks. Where several waits of a tag never end, one of the lowest
pool block fills it; of those without a block, or of one, whichever times out first, and the test
says no more than what they have in common.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import ON_RANKS, RESERVE, rank_schedules
from gpu_timeouts import BEHIND, CASES, STUCK_COUNT, waits_left

pytestmark = pytest.mark.sm90

AT_ONCE = 6
"""Processes at a time: most of their seconds go into imports."""
BOTH = ("l1_arrival_count", "l2_arrival", "pool_ring", "intermediate_ring")
"""Waits of the load and dispatch warps behind the math warps, which take turns in pingpong."""
RUNS = [(case, "wide128") for case in CASES] + [(case, "pingpong") for case in BOTH]


def provoke(
    run: tuple[str, str], script: str = "gpu_timeouts.py"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *run],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(RUNS, pool.map(provoke, RUNS), strict=True))


def told_by(runs: Any, case: str, schedule: str, tags: list[int]) -> dict[str, Any]:
    """What a case told; `reports` holds the slots by tag, of exactly these tags."""
    run = runs[case, schedule]
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert "in 1.5 s" in told["message"]
    assert "CUDA context is lost" in told["message"]
    # A tag is told by one wait, in the report of the rank that waited.
    assert sorted(slot["tag"] for slot in told["reports"]) == tags, told
    assert all(slot["report_of"] == slot["rank"] for slot in told["reports"]), told
    told["reports"] = {slot["tag"]: slot for slot in told["reports"]}
    return told


def place(slot: dict[str, Any]) -> tuple[int, int, int]:
    return slot["rank"], slot["pool_block"], slot["expert"]


@pytest.mark.parametrize(
    ("case", "tags", "phase", "what"),
    [
        ("dispatch_sync", [1, 6], "dispatch", "exchange of the counts, grid barrier"),
        ("combine_sync", [6], "combine", "grid barrier before the sum"),
    ],
)
def test_a_grid_barrier(runs: Any, case: str, tags: list[int], phase: str, what: str) -> None:
    """The sum of all arrivals is one short of the flip: all blocks but one seem to be there."""
    told = told_by(runs, case, "wide128", tags)
    assert (told["phase"], told["rank"], told["peer"]) == (phase, 0, None)
    assert (told["have"], told["want"]) == (told["num_sms"] - 1, told["num_sms"])
    assert told["message"].startswith(f"{phase}: {what}")
    if case == "dispatch_sync":  # the block that passes waits at the end of its launch
        assert told["reports"][6]["have"] == 1


@pytest.mark.parametrize(
    ("case", "tag", "phase"), [("held_sms", 1, "dispatch"), ("held_sms_few", 6, "combine")]
)
def test_sms_that_another_stream_holds(runs: Any, case: str, tag: int, phase: str) -> None:
    """Those of its blocks that run wait for those that cannot start; with few routes at the end."""
    told = told_by(runs, case, "wide128", [tag])
    assert (told["phase"], told["rank"], told["peer"]) == (phase, 0, None)
    assert (told["have"], told["want"]) == (told["num_sms"] - RESERVE, told["num_sms"])
    assert "is another stream or process holding SMs" in told["message"]


def test_a_rank_that_never_launches(runs: Any) -> None:
    told = told_by(runs, "never_launches", "wide128", [2])
    assert (told["phase"], told["rank"], told["peer"]) == ("dispatch", 0, 1)
    assert (told["have"], told["want"], told["expert"], told["tile"]) == (0, 1, None, None)
    assert told["message"].startswith("dispatch: rank 1 has not arrived with its counts: rank 0")
    assert "counted 0 of 1 launches" in told["message"]


def test_two_ranks_that_never_launch(runs: Any) -> None:
    """Whichever of the four waits tells, its words belong together: lane p waits for peer p."""
    told = told_by(runs, "two_never_launch", "wide128", [2])
    slot = told["reports"][2]
    assert slot["rank"] in (0, 2)
    assert slot["peer"] in (1, 3)
    assert slot["thread"] % 32 == slot["peer"]
    assert (slot["have"], slot["want"]) == (0, 1)
    assert (told["rank"], told["peer"]) == (slot["rank"], slot["peer"])


@pytest.mark.parametrize(
    ("case", "tags", "phase", "what"),
    [("dispatch_signal", [2, 7], "dispatch", "counts"), ("combine_signal", [7], "combine", "rows")],
)
def test_a_peer_behind_with_its_launches(
    runs: Any, case: str, tags: list[int], phase: str, what: str
) -> None:
    told = told_by(runs, case, "wide128", tags)
    assert (told["phase"], told["rank"], told["peer"]) == (phase, 1, 0)
    assert (told["have"], told["want"]) == (BEHIND + 1, 1)
    assert told["message"].startswith(f"{phase}: rank 0 has not arrived with its {what}")
    if case == "dispatch_signal":  # rank 0 goes on, and waits for rank 1 before its sum
        assert (told["reports"][7]["rank"], told["reports"][7]["peer"]) == (0, 1)
        assert "(stuck behind it: rank 0 combine)" in told["message"]


@pytest.mark.parametrize("schedule", ["wide128", "pingpong"])
@pytest.mark.parametrize(
    ("case", "tags", "phase", "what"),
    [
        ("l1_arrival_count", [4, 5, 7], "linear1", "its tokens"),
        ("l2_arrival", [5, 7], "linear2", "linear1"),
    ],
)
def test_a_block_that_waits_for_the_phase_before(
    runs: Any, case: str, tags: list[int], phase: str, what: str, schedule: str
) -> None:
    told = told_by(runs, case, schedule, tags)
    assert (told["phase"], told["rank"], told["peer"]) == (phase, 1, None)
    assert (told["pool_block"], told["expert"]) == (0, told["experts"][1][0])
    assert told["tile"] in (0, 1)
    assert told["have"] == STUCK_COUNT + told["want"]
    assert told["message"].startswith(f"{phase}: pool block 0 waits for {what} (expert ")
    assert told["reports"][7]["peer"] == 1  # of its own blocks, or of rank 0


@pytest.mark.parametrize("schedule", ["wide128", "pingpong"])
def test_rows_of_the_pool_that_do_not_become_free(runs: Any, schedule: str) -> None:
    """Linear2 of the block that holds the rows waits too, and is the cause. So may linear2 of a
    later block, whose linear1 tile was claimed by a grid block that is stuck: the first is named.
    """
    told = told_by(runs, "pool_ring", schedule, [3, 4, 5, 7])
    _, last = told["experts"][1]
    assert place(told["reports"][3]) == (1, told["ring_blocks"], last)
    assert place(told["reports"][4]) == (1, told["ring_blocks"], last)
    assert place(told["reports"][5])[:2] == (1, 0)
    assert told["reports"][3]["have"] == STUCK_COUNT + told["reports"][3]["want"]
    assert told["reports"][7]["peer"] == 1
    assert (told["phase"], told["rank"], told["pool_block"]) == ("linear2", 1, 0)
    assert "(stuck behind it: rank 1 dispatch, rank 1 linear1, rank " in told["message"]


@pytest.mark.parametrize("schedule", ["wide128", "pingpong"])
def test_rows_of_the_intermediate_that_do_not_become_free(runs: Any, schedule: str) -> None:
    """Linear2 of the same block waits for linear1."""
    told = told_by(runs, "intermediate_ring", schedule, [5, 7, 8])
    ring, last = told["ring_blocks"], told["experts"][1][-1]
    chosen = rank_schedules(ON_RANKS[2])[schedule]
    assert waits_left(ON_RANKS[2], chosen, ring, {(8, ring)}) == {(8, ring), (5, ring)}
    assert place(told["reports"][8]) == place(told["reports"][5]) == (1, ring, last)
    assert (told["phase"], told["rank"], told["pool_block"]) == ("linear1", 1, ring)
    assert told["expert"] == last
    assert told["have"] == STUCK_COUNT + told["want"]
    assert "waits for linear2 to free its ring rows" in told["message"]


@pytest.mark.parametrize(
    ("bounds", "blocks", "told"),
    [
        ("0,49,98,147", "3,2,1,0", {2, 3}),
        ("0,60,120,180", "3,2,1,0", {3}),
        ("0,10,20,30", "3,2,1,0", {0}),
        ("0,0,0,0", "3,0,2,1", {0}),
        ("0,49,98,147", "0,1,2,3", {0}),
    ],
)
def test_waits_that_time_out_one_after_the_other(bounds: str, blocks: str, told: set[int]) -> None:
    """One of them tells, whatever is between; within 50 ms the lowest block does."""
    run = provoke((bounds, blocks), "gpu_waits.py")
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert "illegal memory access" in found["error"]
    (slot,) = found["reports"]
    assert (slot["tag"], slot["have"], slot["want"]) == (5, 0, 1)
    assert slot["pool_block"] in told
