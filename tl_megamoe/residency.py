"""Whether all blocks of a kernel can be resident at once: the driver is asked before a launch.

Blocks of a launch wait for each other: one that cannot start keeps the others waiting until their
timeout, which costs the CUDA context. The driver is asked once a kernel and device, with a copy of
the kernel's binary that is loaded for the question; launches do not come here.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .debug import is_capturing
from .launch import raw_module
from .schedule import ScheduleError

if TYPE_CHECKING:
    from .buffer import SymmBuffer
    from .kernel import CompiledKernel
    from .schedule import Schedule

logger = logging.getLogger(__name__)

STATIC_SMEM, NUM_REGS, MAX_DYNAMIC_SMEM = 1, 4, 8
"""Of CUfunction_attribute."""
RESOURCE_TYPE_SM = 1
"""Of CUdevResourceType."""
RESOURCE_BYTES, SM_COUNT_AT = 512, 96
"""More than a CUdevResource has, and where its union begins, with the SMs of a context."""
INVALID_VALUE = 1
"""The driver's answer to more shared memory than a block may have."""
CLUSTER_DIMENSION = 4
"""Of CUlaunchAttributeID."""


class DriverError(RuntimeError):
    """The driver could not be asked."""


class Occupancy(NamedTuple):
    """What the driver says of a kernel on a device.

    Attributes:
        blocks_per_sm: blocks that one SM holds at once; 0: a block does not fit.
        registers: of a thread.
        smem_bytes: shared memory of a block, static and dynamic.
        clusters: clusters that the whole device holds at once; None of blocks without, and where
            the driver does not say.
    """

    blocks_per_sm: int
    registers: int
    smem_bytes: int
    clusters: int | None = None


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]  # noqa: RUF012


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [  # noqa: RUF012
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_known: dict[tuple[bytes, int, int], Occupancy] = {}
"""By binary, shared memory and device."""


def check_resident(kernel: CompiledKernel, buffer: SymmBuffer) -> None:
    """Raise unless all blocks of a kernel can be resident on the SMs of a rank.

    What cannot be asked (a driver without the question, a module without its binary) is logged and
    not refused. Nothing is asked while a CUDA graph is captured.

    Args:
        kernel: of the buffer, loaded.
        buffer: on a CUDA device; of virtual ranks its `num_sms` are this rank's share.

    Raises:
        ScheduleError: they cannot; names the schedule's num_sms and what there is.
    """
    spec = kernel.spec
    schedule = spec.schedule
    try:
        image, function = binary_of(kernel)
        if is_capturing(buffer):
            return
        smem = schedule.smem_bytes(spec.problem, spec.recipe)
        index = buffer.device.index
        key = (hashlib.sha256(image).digest(), smem, index)
        found = _known.get(key) or occupancy(image, function, schedule, smem, index)
        _known[key] = found
        num_sms = context_sms(index)
        if num_sms is not None and buffer.rank_mode == "virtual":
            num_sms //= spec.problem.num_ranks  # the ranks run at once
    except DriverError as error:
        logger.info("%s: not known whether all blocks are resident: %s", schedule.name, error)
        return
    if buffer.num_sms is not None:
        num_sms = min(num_sms or buffer.num_sms, buffer.num_sms)
    _check_clusters(found, kernel, buffer)
    if num_sms is None or found.blocks_per_sm * num_sms >= schedule.num_sms:
        return
    fits = found.blocks_per_sm * num_sms
    advice = (
        f"Pass a schedule with num_sms={fits} or less."
        if fits
        else "Pass a schedule with fewer stages, which takes less shared memory."
    )
    raise ScheduleError(
        f"num_sms={schedule.num_sms} of {schedule.name}: {fits} blocks can be resident at once on "
        f"{buffer.device_name} ({buffer.device}), and all {schedule.num_sms} must be: "
        f"{num_sms} SMs that this process may use x {found.blocks_per_sm} blocks of "
        f"{schedule.threads} threads, {found.registers} registers a thread and "
        f"{found.smem_bytes:,} bytes of shared memory. {advice}"
    )


def _check_clusters(found: Occupancy, kernel: CompiledKernel, buffer: SymmBuffer) -> None:
    """Raise unless all clusters of a kernel can be resident."""
    schedule = kernel.spec.schedule
    if found.clusters is None:
        return
    ranks = kernel.spec.problem.num_ranks if buffer.rank_mode == "virtual" else 1
    fits = found.clusters // ranks * schedule.cluster_size
    if fits < schedule.num_sms:
        raise ScheduleError(
            f"cluster_size={schedule.cluster_size} of {schedule.name}: {found.clusters} clusters "
            f"can be resident at once on {buffer.device_name} ({buffer.device}), of {ranks} ranks, "
            f"and {schedule.num_sms // schedule.cluster_size} a rank must be. Pass a schedule with "
            "cluster_size=1" + (f" or num_sms={fits}." if fits else ".")
        )


def binary_of(kernel: CompiledKernel) -> tuple[bytes, str]:
    """The cubin of a kernel, and the name of its function.

    Raises:
        DriverError: its module does not tell.
    """
    found = getattr(kernel, "module", None) or raw_module(kernel.kernel)
    device = [m for m in getattr(found, "imports", ()) if m.kind == "cuda"]
    if not device:
        raise DriverError(f"the kernel of {kernel.spec.schedule.name} has no module of CUDA code")
    name = getattr(kernel, "function", None)
    if name is None:
        name = str(kernel.kernel.adapter.prim_func.attrs["global_symbol"])
    try:
        device[0].inspect_source("cubin")
    except UnicodeDecodeError as error:
        # TVM-FFI gives a module's binary as the text of its source, which it is not.
        return bytes(error.object), f"{name}_kernel"
    raise DriverError(f"the module of {kernel.spec.schedule.name} holds no cubin")


@lru_cache(maxsize=1)
def driver() -> Any:
    """libcuda.

    Raises:
        DriverError: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from error


def _ask(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        DriverError: there is no such function, or it did not return 0.
    """
    try:
        function = getattr(driver(), name)
    except AttributeError as error:
        raise DriverError(f"the driver has no {name}") from error
    status = function(*arguments)
    if status:
        raise DriverError(f"{name} returned {status}")


class _Context:
    """The thread's CUDA context, else the primary one, current while the driver is asked."""

    def __init__(self, device_index: int) -> None:
        self._device = ctypes.c_int()
        self._index = device_index
        self._retained = False

    def __enter__(self) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        _ask("cuInit", ctypes.c_uint(0))
        _ask("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(self._index))
        _ask("cuCtxGetCurrent", ctypes.byref(context))
        here = ctypes.c_int(-1)
        if context.value:
            _ask("cuCtxGetDevice", ctypes.byref(here))
        if here.value != self._device.value:
            _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
            _ask("cuCtxPushCurrent_v2", context)
            self._retained = True
        return context

    def __exit__(self, *_: object) -> None:
        if self._retained:
            before = ctypes.c_void_p()
            _ask("cuCtxPopCurrent_v2", ctypes.byref(before))
            _ask("cuDevicePrimaryCtxRelease_v2", self._device)


def occupancy(
    image: bytes, function: str, schedule: Schedule, smem_bytes: int, device_index: int
) -> Occupancy:
    """Ask the driver how many blocks of a kernel an SM holds, and how many clusters the device.

    Args:
        image: its cubin.
        function: its name there.
        schedule: the kernel's: threads of a block, blocks of a cluster.
        smem_bytes: of a block, static and dynamic.
        device_index: of the GPU.

    Raises:
        DriverError: the driver cannot be asked.
    """
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    clusters = None
    registers, static, blocks = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    with _Context(device_index):
        _ask("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        try:
            name = ctypes.c_char_p(function.encode())
            _ask("cuModuleGetFunction", ctypes.byref(kernel), module, name)
            _ask("cuFuncGetAttribute", ctypes.byref(registers), ctypes.c_int(NUM_REGS), kernel)
            _ask("cuFuncGetAttribute", ctypes.byref(static), ctypes.c_int(STATIC_SMEM), kernel)
            dynamic = smem_bytes - static.value
            allow = driver().cuFuncSetAttribute(
                kernel, ctypes.c_int(MAX_DYNAMIC_SMEM), ctypes.c_int(dynamic)
            )
            if allow not in (0, INVALID_VALUE):
                raise DriverError(f"cuFuncSetAttribute returned {allow}")
            if allow == 0:
                _ask(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                    ctypes.byref(blocks),
                    kernel,
                    ctypes.c_int(schedule.threads),
                    ctypes.c_size_t(dynamic),
                )
                if schedule.cluster_size > 1:
                    clusters = _clusters(kernel, schedule, dynamic)
        finally:
            _ask("cuModuleUnload", module)
    return Occupancy(blocks.value, registers.value, smem_bytes, clusters)


def _clusters(kernel: ctypes.c_void_p, schedule: Schedule, dynamic: int) -> int | None:
    """Clusters of a kernel that the device holds at once; None if the driver does not say."""
    attribute = LaunchAttribute(id=CLUSTER_DIMENSION)
    attribute.value[:3] = (schedule.cluster_size, 1, 1)
    config = LaunchConfig(
        grid=(schedule.num_sms, 1, 1),
        block=(schedule.threads, 1, 1),
        smem=dynamic,
        attributes=ctypes.pointer(attribute),
        num_attributes=1,
    )
    found = ctypes.c_int()
    try:
        _ask("cuOccupancyMaxActiveClusters", ctypes.byref(found), kernel, ctypes.byref(config))
    except DriverError as error:
        logger.info("%s: not known how many clusters fit: %s", schedule.name, error)
        return None
    return found.value


def context_sms(device_index: int) -> int | None:
    """SMs that the current context may use, fewer than the device's in a green context or MPS.

    None where the driver does not say (before CUDA 12.4).
    """
    total = torch.cuda.get_device_properties(device_index).multi_processor_count
    resource = ctypes.create_string_buffer(RESOURCE_BYTES)
    try:
        with _Context(device_index) as context:
            _ask("cuCtxGetDevResource", context, resource, ctypes.c_int(RESOURCE_TYPE_SM))
    except DriverError as error:
        logger.debug("SMs of the context: %s", error)
        return None
    count = int.from_bytes(resource.raw[SM_COUNT_AT : SM_COUNT_AT + 4], "little")
    return count if 0 < count <= total else None
