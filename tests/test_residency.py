"""Whether all blocks can be resident: what the driver is asked, and what is refused."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_cases import SMALL, SMALL_CAPACITY, fit

from tl_megamoe import ScheduleError, SymmBuffer, residency
from tl_megamoe.exported import ExportedKernel
from tl_megamoe.kernel import CompiledKernel, KernelSpec
from tl_megamoe.loading import prepare
from tl_megamoe.residency import DriverError, Occupancy, check_resident

CAPACITY = 64
SOURCE = r"""
#include <cstddef>
#include <cstring>
using Handle = void*;
struct Fake {
  int blocks, sms, limit, fails, has_context, smem, clusters;
  int loaded, contexts, asked;
};
struct Attribute { int id, pad; unsigned value[16]; };
struct Config {
  unsigned grid[3], block[3], smem;
  Handle stream;
  Attribute* attributes;
  unsigned number;
};
extern "C" {
Fake fake;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 10; return 0; }
int cuCtxGetCurrent(Handle* context) {
  *context = fake.has_context ? &fake : nullptr;
  return 0;
}
int cuCtxGetDevice(int* device) { *device = 10; return 0; }
int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  *context = &fake;
  return device != 10;
}
int cuCtxPushCurrent_v2(Handle context) { ++fake.contexts; return context != &fake; }
int cuCtxPopCurrent_v2(Handle* context) { *context = &fake; --fake.contexts; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device != 10; }
int cuModuleLoadData(Handle* module, const void* image) {
  if (std::memcmp(image, "\x7f" "ELF", 4)) return 200;
  ++fake.loaded;
  *module = &fake.loaded;
  return fake.fails;
}
int cuModuleUnload(Handle module) { --fake.loaded; return module != &fake.loaded; }
int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  *function = &fake.asked;
  return module != &fake.loaded || std::strcmp(name, "mega_moe_kernel");
}
int cuFuncGetAttribute(int* value, int attribute, Handle function) {
  *value = attribute == 4 ? 168 : attribute == 1 ? 1000 : -1;
  return function != &fake.asked;
}
int cuFuncSetAttribute(Handle function, int attribute, int value) {
  if (function != &fake.asked || attribute != 8) return 400;
  return value > fake.limit ? 1 : 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle function, int threads,
                                                size_t dynamic) {
  ++fake.asked;
  *blocks = threads == 384 && dynamic + 1000 == (size_t)fake.smem ? fake.blocks : -1;
  return function != &fake.asked;
}
int cuOccupancyMaxActiveClusters(int* clusters, Handle function, const Config* config) {
  const Attribute& size = config->attributes[0];
  bool right = config->number == 1 && size.id == 4 && size.value[0] == 2 && size.value[2] == 1;
  right &= config->block[0] == 384 && config->grid[1] == 1;
  right &= config->smem + 1000 == (unsigned)fake.smem;
  *clusters = right ? fake.clusters : -1;
  return fake.clusters < 0 || function != &fake.asked;
}
int cuCtxGetDevResource(Handle context, void* resource, int type) {
  if (context != &fake || type != 1) return 1;
  std::memcpy(static_cast<char*>(resource) + 96, &fake.sms, 4);
  return 0;
}
}
"""
SCHEDULE = fit(SMALL)
SMEM = SCHEDULE.smem_bytes(SMALL)
SPEC = KernelSpec(problem=SMALL, schedule=SCHEDULE, capacity=CAPACITY)


class State(ctypes.Structure):
    """`Fake` of the source."""

    _fields_ = [  # noqa: RUF012
        (name, ctypes.c_int)
        for name in (
            *("blocks", "sms", "limit", "fails", "has_context", "smem", "clusters"),
            *("loaded", "contexts", "asked"),
        )
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("driver")
    source, path = folder / "driver.cc", folder / "driver.so"
    source.write_text(SOURCE)
    compiler = shutil.which("c++") or "g++"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def state(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """A driver that says one block of the schedule fits an SM, of 132."""
    found = State.in_dll(library, "fake")
    values = {
        "blocks": 1,
        "sms": 132,
        "limit": 1 << 20,
        "has_context": 1,
        "smem": SMEM,
        "clusters": 66,
    }
    for name, value in values.items():
        setattr(found, name, value)
    found.fails = found.asked = 0
    monkeypatch.setattr(residency, "driver", lambda: library)
    monkeypatch.setattr(residency, "_known", {})
    monkeypatch.setattr(residency, "is_capturing", lambda _: False)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    yield found
    assert (found.loaded, found.contexts) == (0, 0)


class Binary:
    """The CUDA module of a kernel, as TVM-FFI has it."""

    kind = "cuda"

    def __init__(self, image: bytes = b"\x7fELF\xbe") -> None:
        self.image = image
        self.imports: list[Any] = []

    def inspect_source(self, _: str) -> str:
        return self.image.decode()


def exported(image: bytes = b"\x7fELF\xbe") -> ExportedKernel:
    module = SimpleNamespace(imports=[SimpleNamespace(kind="library"), Binary(image)])
    return ExportedKernel(SPEC, lambda *_: None, lambda *_: None, module, "mega_moe")


@pytest.fixture
def buffer() -> SymmBuffer:
    made = SymmBuffer(SMALL, CAPACITY, device="cpu")
    made.device, made.device_name, made.num_sms = torch.device("cuda", 0), "a GPU", 132
    return made


@pytest.mark.parametrize("has_context", [0, 1])
def test_a_grid_that_fits_is_asked_for_once(
    state: State, buffer: SymmBuffer, has_context: int
) -> None:
    state.has_context = has_context
    for _ in range(3):
        check_resident(exported(), buffer)
    assert state.asked == 1
    assert list(residency._known.values()) == [Occupancy(1, 168, SMEM)]


def test_a_process_with_fewer_sms_is_refused_with_numbers(state: State, buffer: SymmBuffer) -> None:
    state.sms = 96
    with pytest.raises(ScheduleError, match=rf"num_sms=132 of {SCHEDULE.name}") as told:
        check_resident(exported(), buffer)
    assert (
        "96 blocks can be resident at once on a GPU (cuda:0), and all 132 must be: 96 SMs that "
        "this process may use x 1 blocks of 384 threads, 168 registers a thread and "
        f"{SMEM:,} bytes of shared memory. Pass a schedule with num_sms=96 or less."
    ) in str(told.value)
    state.blocks = 2
    residency._known.clear()
    check_resident(exported(), buffer)


def test_a_virtual_rank_has_its_share(state: State, buffer: SymmBuffer) -> None:
    buffer.num_sms = 66
    with pytest.raises(ScheduleError, match="66 blocks can be resident"):
        check_resident(exported(), buffer)


def test_virtual_ranks_run_at_once(state: State, buffer: SymmBuffer) -> None:
    schedule = replace(SCHEDULE, num_sms=66, experts_per_wave=4)
    spec = replace(SPEC, problem=replace(SMALL, num_ranks=2), schedule=schedule)
    made = exported()
    made.spec = spec
    state.smem = schedule.smem_bytes(spec.problem)
    buffer.rank_mode, buffer.num_sms = "virtual", 66
    check_resident(made, buffer)
    state.sms = 66
    with pytest.raises(ScheduleError, match="33 blocks can be resident"):
        check_resident(made, buffer)


def in_clusters(state: State, num_ranks: int = 1) -> ExportedKernel:
    """A kernel of clusters, on the grid of one of so many ranks."""
    problem = replace(SMALL, num_ranks=num_ranks)
    schedule = replace(
        fit(SMALL, cluster_size=2, dispatch_warps=1),
        num_sms=132 // num_ranks,
        experts_per_wave=problem.num_local_experts,
    )
    made = exported()
    made.spec = replace(SPEC, problem=problem, schedule=schedule)
    state.smem = schedule.smem_bytes(problem)
    return made


def test_clusters_that_do_not_fit(state: State, buffer: SymmBuffer) -> None:
    made = in_clusters(state)
    check_resident(made, buffer)
    residency._known.clear()
    state.clusters = 65
    with pytest.raises(ScheduleError, match=r"65 clusters can be resident.*66 a rank.*num_sms=130"):
        check_resident(made, buffer)
    residency._known.clear()
    state.clusters = 0
    with pytest.raises(ScheduleError, match=r"Pass a schedule with cluster_size=1\.$"):
        check_resident(made, buffer)


def test_clusters_of_virtual_ranks(state: State, buffer: SymmBuffer) -> None:
    made = in_clusters(state, 2)
    buffer.rank_mode, buffer.num_sms = "virtual", 66
    check_resident(made, buffer)
    residency._known.clear()
    state.clusters = 65
    with pytest.raises(ScheduleError, match="65 clusters can be resident.*of 2 ranks"):
        check_resident(made, buffer)


def test_a_driver_that_does_not_count_clusters(state: State, buffer: SymmBuffer) -> None:
    state.clusters = -1
    check_resident(in_clusters(state), buffer)


@pytest.mark.parametrize("change", [{"blocks": 0}, {"limit": 100_000}], ids=["blocks", "limit"])
def test_a_block_that_does_not_fit(
    state: State, buffer: SymmBuffer, change: dict[str, int]
) -> None:
    for name, value in change.items():
        setattr(state, name, value)
    with pytest.raises(ScheduleError, match="0 blocks can be resident.*fewer stages"):
        check_resident(exported(), buffer)


def test_what_cannot_be_asked_is_not_refused(
    state: State,
    buffer: SymmBuffer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def none() -> Any:
        raise DriverError("libcuda.so.1: no such file")

    with caplog.at_level("INFO"):
        state.fails = 3
        check_resident(exported(), buffer)
        state.loaded = 0  # of the load that failed
        check_resident(exported(b"only text"), buffer)
        check_resident(CompiledKernel(SPEC, lambda *_: None), buffer)
        monkeypatch.setattr(residency, "driver", none)
        check_resident(exported(), buffer)
    said = [r.getMessage() for r in caplog.records]
    reasons = ("cuModuleLoadData returned 3", "holds no cubin", "no module of CUDA", "no such file")
    for message, reason in zip(said, reasons, strict=True):
        assert message.startswith(f"{SCHEDULE.name}: not known whether all blocks are resident: ")
        assert reason in message


def test_a_driver_without_resources_counts_all(state: State, buffer: SymmBuffer) -> None:
    state.sms = 0
    check_resident(exported(), buffer)
    state.sms = 4000  # not what a driver says: another layout
    check_resident(exported(), buffer)


def test_nothing_is_asked_while_a_graph_is_captured(
    state: State, buffer: SymmBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "is_capturing", lambda _: True)
    check_resident(exported(), buffer)
    assert state.asked == 0


def test_loading_asks(state: State, buffer: SymmBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_megamoe.loading.compile_kernel", lambda _: exported())
    state.sms = 131
    with pytest.raises(ScheduleError, match="131 blocks can be resident"):
        prepare(buffer, 8, schedule=SCHEDULE)
    assert not buffer.kernels
    state.sms = 132
    kernel, _ = prepare(buffer, 8, schedule=SCHEDULE)
    assert list(buffer.kernels.values()) == [kernel]


def test_the_binary_of_a_kernel_that_is_compiled_here() -> None:
    """What TVM-FFI gives is the cubin that the module will load: its ELF header says CUDA."""
    from tl_megamoe.kernel import compile_kernel

    kernel = compile_kernel(KernelSpec(problem=SMALL, schedule=fit(SMALL), capacity=SMALL_CAPACITY))
    image, function = residency.binary_of(kernel)
    assert image[:4] == b"\x7fELF"
    assert int.from_bytes(image[18:20], "little") == 190  # EM_CUDA
    assert function.encode() in image
    section_table = int.from_bytes(image[40:48], "little")
    assert section_table < len(image) < section_table + 64 * 1000
