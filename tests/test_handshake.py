"""What ranks tell each other before the first launch, also between two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tl_megamoe import PRESETS, Recipe
from tl_megamoe.handshake import (
    MULTICAST_OFF,
    Card,
    check_handshake,
    check_multicast_off,
    differing,
    disable_multicast,
    leader_of,
    own_card,
)

FLASH = PRESETS["deepseek-v4-flash"]


def cards(count: int = 4) -> list[Card]:
    """Equal cards of ranks on two hosts, each with a GPU of its own."""
    out = []
    for rank in range(count):
        card = own_card(FLASH, 1024)
        card.update(host=f"host{rank // 2}", device=f"GPU-{rank % 2}")
        out.append(card)
    return out


def test_equal_cards_agree() -> None:
    for rank in range(4):
        check_handshake(rank, cards())
    named = [own_card(replace(FLASH, name=name), 1024) for name in ("a", "b")]
    check_handshake(0, named)  # sizes decide what runs, names do not


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        (lambda: own_card(FLASH, 2048), "capacity", ("1024", "2048")),
        (lambda: own_card(replace(FLASH, hidden=2048), 1024), "hidden", ("4096", "2048")),
        (lambda: own_card(replace(FLASH, num_ranks=4), 1024), "num_ranks", ("8", "4")),
        (lambda: own_card(replace(FLASH, num_topk=8), 1024), "num_topk", ("6", "8")),
        (
            lambda: own_card(FLASH, 1024, Recipe(scale="pow2")),
            "recipe",
            ("'exact-128'", "'pow2-128'"),
        ),
    ],
)
def test_a_mismatch_is_named_on_every_rank(change: Any, field: str, values: Any) -> None:
    found = cards()
    found[2] = change()
    ours, theirs = values
    expected = f"{field} differs (rank 0: {ours}, rank 1: {ours}, rank 2: {theirs}, rank 3: {ours})"
    for rank in range(4):
        with pytest.raises(ValueError, match="the ranks of one layer must agree") as caught:
            check_handshake(rank, found)
        assert expected in str(caught.value)
        assert f"found on rank {rank}" in str(caught.value)
        assert "Pass the same problem, recipe and capacity" in str(caught.value)


def test_another_version_with_other_fields() -> None:
    found = cards(2)
    found[1] = {**found[1], "version": "9.0", "new_field": 1, "hash": "other"}
    with pytest.raises(ValueError, match="new_field differs") as caught:
        check_handshake(0, found)
    assert "version differs (rank 0: '0.1.0', rank 1: '9.0')" in str(caught.value)
    assert "capacity" not in str(caught.value).split("Pass the same")[0]


def test_an_error_of_one_rank_reaches_all() -> None:
    found = cards()
    found[3]["error"] = "capacity=0 tokens a rank must be a positive integer"
    for rank in range(4):
        with pytest.raises(ValueError, match=r"no rank may launch\. rank 3: capacity=0 tokens"):
            check_handshake(rank, found)


def test_two_ranks_on_one_gpu() -> None:
    found = cards()
    found[1]["device"] = "GPU-0"
    with pytest.raises(ValueError, match="ranks 0 and 1 use one GPU .*set_device.*VirtualGroup"):
        check_handshake(2, found)


def test_the_lowest_rank_of_a_host_leads() -> None:
    assert [leader_of(cards(), rank) for rank in range(4)] == [0, 0, 2, 2]
    mixed = [{"host": host} for host in ("a", "b", "a", "b", "c")]
    assert [leader_of(mixed, rank) for rank in range(5)] == [0, 1, 0, 1, 4]


def test_differing() -> None:
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 2}]) == ""
    assert differing([{"a": 1, "b": 2}, {"a": 3, "b": 2}]) == "a differs (rank 0: 1, rank 1: 3)"


def test_multicast_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MULTICAST_OFF:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # NCCL's own use is the user's to choose
    check_multicast_off()
    assert {name: os.environ[name] for name in MULTICAST_OFF} == {
        "NCCL_NVLS_ENABLE": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    for value in ("0", ""):
        monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", value)
        with pytest.raises(RuntimeError, match="TORCH_SYMM_MEM_DISABLE_MULTICAST=.* Unset it"):
            check_multicast_off()


def test_a_launcher_needs_no_torch() -> None:
    code = (
        "import sys; from tl_megamoe.handshake import disable_multicast; disable_multicast(); "
        "import os; assert os.environ['NVSHMEM_DISABLE_NVLS'] == '1'; "
        "assert 'torch' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in MULTICAST_OFF}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert disable_multicast.__doc__


RANK = """
import os
import sys
from dataclasses import replace
import torch.distributed as dist
from tl_megamoe import PRESETS, SymmBuffer
from tl_megamoe.handshake import exchange_cards, load_together, own_card, own_host

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
problem = replace(PRESETS["deepseek-v4-flash"], num_ranks=2)
order = []


def caught(call):
    try:
        return f"returned {call()}"
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"


def fails():
    raise OSError(f"no compiler on {rank}")


def refuses():
    if rank == 1:
        raise ValueError("num_sms=200")


group = dist.group.WORLD
nothing = lambda: None
print("cards", [c["host"] == own_host() for c in exchange_cards(own_card(problem, 64), group)])
print("capacity", caught(lambda: SymmBuffer.from_process_group(problem, 64 + rank, device="cpu")))
print("ranks", caught(lambda: SymmBuffer.from_process_group(replace(problem, num_ranks=4), 64)))
print("device", caught(lambda: SymmBuffer.from_process_group(problem, 64, device="cpu")))
print("alike", caught(lambda: load_together({"stages": 4}, lambda: rank, nothing, group)))
print("choice", caught(lambda: load_together({"stages": 4 + rank}, fails, nothing, group)))
print("check", caught(lambda: load_together({}, fails, refuses, group)))
print("load", caught(lambda: load_together({}, fails, nothing, group)))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # all is said; the threads of libraries need not end in order
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    for rank, (out, err) in enumerate(outputs):
        assert processes[rank].returncode == 0, err
        said = dict(line.split(" ", 1) for line in out.splitlines())
        assert said["cards"] == "[True, True]"
        assert (
            f"found on rank {rank}: capacity differs (rank 0: 64, rank 1: 65)" in said["capacity"]
        )
        for other in range(2):
            assert f"rank {other}: num_ranks=4 of problem" in said["ranks"]
            assert f"rank {other}: device='cpu' of a process group's buffer" in said["device"]
        assert "torchrun --nproc_per_node=4" in said["ranks"]
        assert said["alike"] == f"returned {rank}"
        assert "ScheduleError the ranks of one launch must choose alike: stages" in said["choice"]
        assert said["check"] == "ScheduleError no rank may launch. rank 1: num_sms=200"
        # The leader failed, so that the other never tried.
        assert said["load"] == (
            "RuntimeError no rank may launch. rank 0: OSError: no compiler on 0"
        )
