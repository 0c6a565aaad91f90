"""Seeds from the test id, and the rule that no `sm90` test is skipped on an SM90 machine.

Under torchrun every process runs the same tests in the same order: those of as many ranks as there
are processes (`multi_gpu`), and nothing else. A test that hangs there ends its process, and with it
the job: a rank that fails alone leaves its peers in an exchange.

Under `-n auto` (pytest-xdist) a machine without an SM90 GPU runs the tests in a process a core, the
compiles first, so that what is left in the end is short. One process's tests share a GPU.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import zlib
from collections.abc import Iterator
from functools import lru_cache

import pytest

from tl_megamoe.handshake import disable_multicast

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
TEST_LIMIT_S = 300.0
"""Limit of a test under torchrun: time to compile a dozen kernels that were not built before."""
_STDERR = pytest.StashKey[int]()
# Both are read when CUDA starts, which no test does while it is imported.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
disable_multicast()
# Processes share the cores, and so do their threads. Read when torch or numpy is imported.
XDIST_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
MAX_XDIST_WORKERS = 8
"""Each holds torch and tilelang, a gigabyte and more."""
if XDIST_WORKERS:
    threads = max(1, (os.cpu_count() or 1) // XDIST_WORKERS)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


@lru_cache(maxsize=1)
def num_sm90_gpus() -> int:
    """H100 or H200 GPUs of this machine."""
    import torch

    return sum(
        torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count())
    )


def gpus_needed(item: pytest.Item) -> int:
    """GPUs that the markers of a test ask for."""
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None:
        return int(multi.args[0]) if multi.args else 2
    return 1 if item.get_closest_marker("sm90") is not None else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n auto`; 0 runs the tests in this one."""
    return 0 if num_sm90_gpus() else min(len(os.sched_getaffinity(0)), MAX_XDIST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WORLD_SIZE > 1:
        of_this_size = [
            item
            for item in items
            if item.get_closest_marker("multi_gpu") is not None and gpus_needed(item) == WORLD_SIZE
        ]
        config.hook.pytest_deselected(items=[i for i in items if i not in of_this_size])
        items[:] = of_this_size
    if XDIST_WORKERS:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        needed = gpus_needed(item)
        if needed and num_sm90_gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} SM90 GPU(s)"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno()) if WORLD_SIZE > 1 else -1


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(_STDERR, -1) >= 0:
        os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if WORLD_SIZE > 1:
        stderr = item.config.stash[_STDERR]
        faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        if WORLD_SIZE > 1:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Iterator[None]:
    report = yield
    needed = gpus_needed(item)
    if report.skipped and not hasattr(report, "wasxfail") and needed and num_sm90_gpus() >= needed:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped although this machine can run it"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.skipped and num_sm90_gpus():  # a skipped module hides its sm90 tests
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped as a whole on a machine with an SM90 GPU"
    return report


def seed_from(node_id: str) -> int:
    """The seed of a test id."""
    return zlib.crc32(node_id.encode()) & 0x7FFFFFFF


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that is the same in every run and differs between tests and their parameters."""
    return seed_from(request.node.nodeid)


@pytest.fixture
def shared_seed(request: pytest.FixtureRequest) -> int:
    """A seed like `seed` that the math modes of a test share, so that their results compare."""
    return seed_from(re.sub("pingpong|swapped|cooperative", "mode", request.node.nodeid))
