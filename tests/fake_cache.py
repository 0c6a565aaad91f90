"""A compiler that leaves what tilelang and ptxas would, and a GPU process without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from tl_megamoe.explorer.kernel_store import KernelStore, namespace
from tl_megamoe.explorer.messages import WorkerConfig
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.native import cache_root
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule

SMALL = Problem(name="s", hidden=512, intermediate=512, num_experts=4, num_topk=2, num_ranks=1)

# What the compiler does, by rows_in_flight.
WORKS, FAILS, SPILLS, HANGS, CRASHES = 1, 2, 3, 4, 5


def spec(behaviour: int = WORKS, *, stages: int = 2, problem: Problem = SMALL) -> KernelSpec:
    schedule = Schedule(stages=stages, prefetch=2, rows_in_flight=behaviour)
    return KernelSpec(problem=problem, schedule=schedule, capacity=64)


def text_of(wanted: KernelSpec) -> str:
    return f"// {wanted.schedule.kernel_key().name} of {wanted.problem.key()}\nvoid kernel() {{}}\n"


def write_entry(root: Path, text: str, host: str = "host") -> Path:
    """A kernel in tilelang's disk cache."""
    key = hashlib.sha256(f"{text}{host}".encode()).hexdigest()
    entry = root / namespace() / "kernels" / key
    entry.mkdir(parents=True, exist_ok=True)
    files = {
        "device_kernel.cu": text.encode(),
        "host_kernel.cu": host.encode(),
        "executable.so": b"\x7fELF" + text.encode() * 40,
        "params.json": b"[]",
    }
    for name, data in files.items():
        (entry / name).write_bytes(data)
    (entry / "executable.so").chmod(0o755)
    listed = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for name, data in files.items()
    }
    (entry / "manifest.json").write_text(json.dumps({"files": listed, "version": 1}))
    return entry


def build(wanted: KernelSpec, root: Path | None = None) -> KernelReport:
    """`farm.Build`; into the active cache when root is None."""
    behaviour = wanted.schedule.rows_in_flight
    if behaviour == FAILS:
        raise RuntimeError("nvcc failed with exit code 1: no such thing")
    if behaviour == HANGS:
        time.sleep(600)
    if behaviour == CRASHES:
        os._exit(11)
    text = text_of(wanted)
    write_entry(root or cache_root(), text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return KernelReport(168, 812 if behaviour == SPILLS else 0, 200_000, 8, (), digest)


EVERY_KERNEL = [spec(WORKS, stages=2), spec(WORKS, stages=3), spec(SPILLS)]


class UnpicklableError(RuntimeError):
    def __reduce__(self) -> Any:
        raise TypeError("does not travel")


class FakeWorker:
    """What a GPU process holds; its kernels are those in the cache of its node."""

    def __init__(self, config: WorkerConfig):
        if config.seed < 0:
            raise ValueError("no such seed")
        self.calls = 0
        self.config = config

    def check(self, name: str, schedule: Schedule) -> tuple[str, bool]:
        self.calls += 1
        wanted = KernelSpec(problem=self.config.problem, schedule=schedule, capacity=64)
        report = KernelStore().reports.get(wanted)
        entries = [] if report is None else KernelStore().entries_of(report.source_hash)
        texts = [(entry / "device_kernel.cu").read_text() for entry in entries]
        return f"{name} {self.calls}", texts == [text_of(wanted)]

    def misbehave(self, how: str) -> None:
        self.calls += 1
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os._exit(7)
        if how == "unpicklable":
            raise UnpicklableError("but it is told")
        raise MemoryError("no room")


def build_with_lost_node(wanted: KernelSpec) -> KernelReport:
    """Kills the node's worker process the first time, as a machine out of memory does."""
    mark = Path(os.environ["TILELANG_CACHE_DIR"]) / "lost"
    if not mark.exists():
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        os.kill(os.getppid(), 9)
        time.sleep(60)
    return build(wanted)


def build_nothing(wanted: KernelSpec) -> KernelReport:
    raise AssertionError("compiled again")


def name_gpu() -> str:
    return "NVIDIA H200"
