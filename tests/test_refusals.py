"""A rank that fails alone: the others hear of it where they would wait. Two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tl_megamoe import PRESETS, Problem, SymmBuffer, VirtualGroup, get_symm_buffer_for_mega_moe

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo",
    init_method=f"file://{store}",
    rank=rank,
    world_size=2,
    timeout=timedelta(seconds=30),
)
group = dist.group.WORLD
problem = Problem(
    name="p", hidden=512, intermediate=256, num_experts=16, num_topk=2, num_ranks=2
)


def say(what, call):
    try:
        text = f"returned {call()}"
    except Exception as error:
        text = f"{type(error).__name__} {error}"
    print(what, " ".join(text.split()), flush=True)


# A GPU that is not there: memory and cards stay on the CPU.
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.device = lambda device: nullcontext()
torch.cuda.synchronize = lambda *_: None
"""
END = """
dist.barrier()
os._exit(0)  # all is said; the threads of libraries need not end in order
"""


def two_ranks(tmp_path: Path, code: str) -> list[dict[str, str]]:
    """What the processes of two ranks print, by the first word of the line."""
    script = tmp_path / "rank.py"
    script.write_text(START + code + END)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TL_MEGAMOE", "TORCH"))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out + err
    return [dict(line.split(" ", 1) for line in out.splitlines()) for out, _ in outputs]


LAUNCH = """
from tl_megamoe import fp8_mega_moe, loading, op

compiled = []
loading.compile_kernel = lambda spec: compiled.append(spec) or spec
loading.check_resident = lambda *_: None


def buffer():
    made = VirtualGroup(2, "cpu").buffers(problem, 512)[rank]
    made.group, made.rank_mode, made.num_sms = group, "real", 132
    made.device, made.device_name = torch.device("cuda", 0), "unknown"
    return made


def prepare(made, tokens=8, **options):
    return op.prepare(made, tokens, **options)[1].name and "a kernel"


bad = rank == 1  # rank 1 makes the mistakes
made = buffer()
say("bound", lambda: prepare(made, 100 if bad else 8, token_bound=64))
say("recipe", lambda: prepare(made, recipe=(1, 2, 3) if bad else None))
say("clamp", lambda: prepare(made, activation_clamp=-1.0 if bad else 1.0))
say("type", lambda: prepare(made, "8" if bad else 8))
if bad:
    os.environ["TL_MEGAMOE_KERNEL"] = "fast"
made = buffer()  # a buffer reads the variable once
say("variable", lambda: prepare(made))
os.environ.pop("TL_MEGAMOE_KERNEL", None)
made = buffer()
y = torch.empty(3, 512 if bad else 256, dtype=torch.bfloat16)
say("output", lambda: fp8_mega_moe(y, None, None, made))
assert not made.kernels and not compiled
say("right", lambda: prepare(made, token_bound=64))
# Loaded: a rank that refuses is alone with it, and whatever is loaded next is not.
say("loaded", lambda: prepare(made, 100 if bad else 8, token_bound=64))
say("again", lambda: prepare(made, activation_clamp="x" if bad else None, token_bound=64))
say("next", lambda: prepare(made, 512 if bad else 8, token_bound=300))
say("last", lambda: prepare(made, token_bound=300))
assert len(compiled) == len(made.kernels) == 2
made = buffer()
made.num_sms -= 4 * rank
say("grid", lambda: prepare(made))
"""


def test_arguments_that_one_rank_refuses(tmp_path: Path) -> None:
    for rank, said in enumerate(two_ranks(tmp_path, LAUNCH)):
        for what, message in (
            ("bound", "token_bound=64 must be an integer from num_tokens=100"),
            ("recipe", "recipe=(1, 2, 3) must be a tl_megamoe.Recipe"),
            ("clamp", "activation_clamp=-1.0 must be a positive number"),
            ("type", "TypeError: "),
            ("variable", "TL_MEGAMOE_KERNEL='fast' must be one of cooperative, pingpong"),
            ("next", "token_bound=300 must be an integer from num_tokens=512"),
        ):
            assert said[what].startswith("ScheduleError no rank may launch. "), said[what]
            assert f"rank 1: {message}" in said[what]
        assert "rank 0: y must have shape" in said["output"]
        assert "rank 1: y must be on cuda:0" in said["output"]
        assert said["right"] == said["last"] == "returned a kernel"
        alone = {
            "loaded": "ValueError token_bound=64 must be an integer from num_tokens=100",
            "again": "ValueError activation_clamp='x' must be a positive number",
        }
        for what, message in alone.items():
            assert said[what].startswith(message if rank else "returned a kernel")
        assert "num_sms differs (rank 0: 132, rank 1: 128)" in said["grid"]
        assert "pass a schedule that fits the smallest" in said["grid"]


MAKE = """
import torch.distributed._symmetric_memory as symmetric

gpu = SimpleNamespace(uuid=f"GPU-{rank}", multi_processor_count=132)


def properties(device):
    if device.index == 9:
        raise AssertionError("Invalid device id")
    return gpu


def allocate(num_bytes, **_):
    if failing == "memory" and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return torch.ones(num_bytes, dtype=torch.uint8)


def rendezvous(raw, group):
    met.append(rank)
    addresses = [1 << 20, 1 << 20]
    addresses[rank] = raw.data_ptr() - 64 + (failing == "address" and rank == 0)
    return SimpleNamespace(buffer_ptrs=addresses, offset=64)


torch.cuda.get_device_properties = properties
symmetric.empty, symmetric.rendezvous = allocate, rendezvous
failing, met, right = "", [], {"capacity": 64, "device": "cuda:0"}


def make(fails="", **wrong):
    global failing
    failing = fails
    made = SymmBuffer.from_process_group(problem, **{**right, **(wrong if rank == 1 else {})})
    assert not made.workspace.any() and made.peers[rank] == made.raw.data_ptr()
    return f"{made.rank_mode} {made.recipe}"


say("right", lambda: make(recipe=(128, 128, 128)))
say("timeout", lambda: make(timeout_s="60"))
say("recipe", lambda: make(recipe=(1, 1, 1)))
say("device", lambda: make(device="cuda:9"))
say("nonsense", lambda: make(device=3.5))
if rank == 1:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "0"
say("multicast", make)
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
met.clear()
say("memory", lambda: make("memory"))
assert not met
say("address", lambda: make("address"))
failing, sizes = "", (16, 64, 2, 512, 256)
say("activation", lambda: get_symm_buffer_for_mega_moe(
    group, *sizes, activation="gelu" if rank else "swiglu", device="cuda:0"))
say("compat", lambda: get_symm_buffer_for_mega_moe(
    group, *sizes, device="cuda:0", recipe=(1, 128, 128)).capacity)
"""


def test_buffers_that_one_rank_cannot_make(tmp_path: Path) -> None:
    for said in two_ranks(tmp_path, MAKE):
        assert said["right"] == "returned real exact-128"
        assert said["compat"] == "returned 128"
        for what, message in (
            ("timeout", "timeout_s='60' must be a positive number"),
            ("recipe", "recipe=(1, 1, 1) must be a tl_megamoe.Recipe"),
            ("device", "AssertionError: Invalid device id"),
            ("nonsense", "TypeError: "),
            ("multicast", "TORCH_SYMM_MEM_DISABLE_MULTICAST='0' asks torch symmetric memory"),
            ("activation", "activation='gelu' must be 'swiglu'"),
        ):
            assert said[what].startswith(f"ValueError no rank may launch. rank 1: {message}")
        assert said["memory"] == (
            "RuntimeError no rank may launch. rank 1: OutOfMemoryError: CUDA out of memory"
        )
        assert "rank 0: RuntimeError: symmetric memory gave the addresses" in said["address"]


@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_is_not_held_up(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    import torch

    from tl_megamoe import Problem, VirtualGroup, loading, op

    problem = Problem(
        name="p", hidden=512, intermediate=256, num_experts=16, num_topk=2, num_ranks=2
    )
    buffer = VirtualGroup(2, "cpu").buffers(problem, 64)[0]
    buffer.group = "group"
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(loading, "refuse_together", lambda error, *_: told.append(str(error)))
    with pytest.raises(ValueError, match="num_tokens=65"):
        op.prepare(buffer, 65)
    assert len(told) == (not capturing)


WARM_UP = (
    LAUNCH.partition("bad = rank == 1")[0]
    + """
bad = rank == 1
if bad:
    os.environ["TL_MEGAMOE_KERNEL"] = "fast"
made = buffer()
say("variable", lambda: made.warmup(num_shared=None))
os.environ.pop("TL_MEGAMOE_KERNEL", None)
os.environ["TL_MEGAMOE_COOPERATIVE_THRESHOLD"] = "100000" if bad else "200"
made = buffer()
say("threshold", lambda: made.warmup(num_shared=None))
os.environ.pop("TL_MEGAMOE_COOPERATIVE_THRESHOLD", None)
made = buffer()
say("shared", lambda: made.warmup(num_shared=3 if bad else 0))
from tl_megamoe import mega_moe
made = buffer()
x = torch.zeros(4, 512 if bad else 256, dtype=torch.bfloat16)
say("input", lambda: mega_moe(x, None, torch.zeros(4, 2).long(), torch.zeros(4, 2), None, made))
"""
)


def test_warming_up_that_one_rank_refuses(tmp_path: Path) -> None:
    for said in two_ranks(tmp_path, WARM_UP):
        assert "TL_MEGAMOE_KERNEL='fast' must be" in said["variable"]
        assert "would load different kernels" in said["threshold"]
        assert "rank 1: ValueError: num_shared=3 must be below num_topk=2" in said["shared"]
        assert said["input"].startswith(("RuntimeError", "ScheduleError")), said["input"]


MODULE = """
from tl_megamoe import MegaMoE, Recipe, sharing

sharing._pick = lambda *_: ("kernel", torch.device("cpu"))
SymmBuffer.from_process_group = classmethod(lambda *_, **__: 1 / 0)  # nobody gets here
bad = rank == 1
sizes = dict(hidden=512, intermediate=256, num_experts=16, top_k=2, group=group, capacity=64)


def make(**wrong):
    return MegaMoE(**{**sizes, **(wrong if bad else {})})


say("clamp", lambda: make(activation_clamp=-1.0))
say("recipe", lambda: make(recipe=(1, 2, 3)))
say("shared", lambda: make(num_shared_experts=-1))
say("sizes", lambda: make(hidden=500))
say("experts", lambda: make(num_experts=15))
"""


def test_a_module_that_one_rank_refuses(tmp_path: Path) -> None:
    for rank, said in enumerate(two_ranks(tmp_path, MODULE)):
        for what, message in (
            ("clamp", "activation_clamp=-1.0 must be a positive number"),
            ("recipe", "recipe=(1, 2, 3) must be a tl_megamoe.Recipe"),
            ("shared", "num_shared_experts=-1 must be an integer from 0"),
            ("sizes", "hidden=500"),
            ("experts", "num_experts=15"),
        ):
            assert message in said[what], said[what]
            assert said[what].startswith("ValueError")
            assert rank == 1 or "no rank has a buffer. rank 1: " in said[what]
