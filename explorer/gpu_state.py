"""Clocks, power and temperature of a card, an anonymous name for it, and its driver.

NVML comes with the optional nvidia-ml-py. Without it, or where a card or driver does not have a
reading, the reading is empty: nothing here raises.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuState:
    """The card while a block ran; None where it cannot be read.

    Attributes:
        sm_clock_mhz, mem_clock_mhz: MHz.
        power_w: watts.
        temperature_c: degrees Celsius.
    """

    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """A card as NVML knows it: the bindings and their handle."""

    nvml: Any
    card: Any


def card_id(uuid: str) -> str:
    """An anonymous name of a physical card: 8 hex digits of the SHA-256 of its UUID.

    Empty for an empty UUID: an unknown card is not the same card as another unknown one.
    """
    return hashlib.sha256(uuid.encode()).hexdigest()[:8] if uuid else ""


def device_uuid(device: Any) -> str:
    """The UUID of a CUDA device as NVML writes it, `GPU-...`; empty where torch does not tell it.

    Args:
        device: a torch device or its index; the current one when None.
    """
    import torch

    try:
        index = torch.cuda.current_device() if device is None else device
        uuid = str(torch.cuda.get_device_properties(index).uuid)
    except Exception as error:  # no CUDA, or a torch whose properties have no UUID
        logger.info("the card has no UUID: %s", error)
        return ""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def open_handle(uuid: str) -> Handle | None:
    """NVML's handle of a card, found by UUID: NVML numbers all cards of the host, CUDA the visible.

    Args:
        uuid: from `device_uuid`.

    Returns:
        None, with a log line, without NVML or if NVML does not know the card.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    try:  # a card may be visible to CUDA and not to NVML, or the bindings be old
        return Handle(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception as error:
        logger.info("NVML does not know the device, clocks and power are not recorded: %s", error)
        return None


def read_state(handle: Handle | None) -> GpuState:
    """The card now; takes about a millisecond. Empty without a handle."""
    if handle is None:
        return GpuState()
    nvml = handle.nvml

    def read(function: Callable[..., Any], *args: Any, scale: float = 1.0) -> float | None:
        try:
            return float(function(handle.card, *args)) * scale
        except Exception:  # a reading that this card or driver does not have
            return None

    return GpuState(
        sm_clock_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        mem_clock_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        power_w=read(nvml.nvmlDeviceGetPowerUsage, scale=1e-3),
        temperature_c=read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    )


def driver_version() -> str:
    """The NVIDIA driver of this host, for example `580.65.06`; empty where NVML does not say."""
    nvml = _nvml()
    if nvml is None:
        return ""
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception as error:
        logger.info("NVML does not tell the driver: %s", error)
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def _nvml() -> Any:
    """The bindings, initialised; None where they are not installed or find no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        logger.info("no NVML, clocks and power are not recorded: %s", error)
        return None
    return pynvml
