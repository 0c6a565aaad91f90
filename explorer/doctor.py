"""What this machine can do: compile, run, and which schedules it has."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from tl_megamoe.frozen import device_key, frozen_paths, schedules_root
from tl_megamoe.kernel import nvcc_of
from tl_megamoe.layout import MAX_RANKS

from .farm import ReportCache, package_version

PROBE = "#include <cuda/atomic>\n__global__ void probe(int* p) { *p = 1; }\n"
"""With a header of cccl, as kernels have: it refuses a compiler and headers of two releases."""


def find_gpu() -> str | None:
    """Name of the current CUDA device if it is an SM90 one."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return str(torch.cuda.get_device_name())


def check_nvcc() -> tuple[bool, str]:
    """Whether a kernel can be compiled for sm_90a here, and by what or why not."""
    try:
        from tilelang.contrib.nvcc import default_compile_options, get_nvcc_compiler

        nvcc, options = str(get_nvcc_compiler()), default_compile_options()
    except Exception as error:  # tilelang missing, or finding no CUDA raises its own kinds
        return False, f"nvcc not found: {error}. Install it with: pip install 'tilelang[nvcc]'"
    with tempfile.TemporaryDirectory(prefix="tl_megamoe_") as folder:
        source = Path(folder) / "probe.cu"
        source.write_text(PROBE, encoding="utf-8")
        cubin = source.with_suffix(".cubin")
        target = ["-cubin", "-gencode", "arch=compute_90a,code=sm_90a"]
        command = [nvcc, *target, *options, "-o", str(cubin), str(source)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=120.0
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, f"{nvcc} does not run: {error}"
        if done.returncode:
            said = (done.stdout + done.stderr)[-500:]
            return False, (
                f"{nvcc} cannot compile for sm_90a: {said}. nvcc and its headers must be of one "
                "CUDA release: pip install 'cuda-toolkit[crt,cudart,nvcc,nvvm]<13.5'"
            )
        version = nvcc_of(cubin.read_bytes())
    return True, f"{nvcc} {version} compiles for sm_90a"


def diagnose(root: Path | None = None) -> tuple[bool, list[tuple[str, str]]]:
    """Findings as (subject, text), and whether kernels can be compiled.

    Args:
        root: folder of the frozen files; the package's when None.
    """
    root = root or schedules_root()
    found = [("python", platform.python_version())]
    for name in ("torch", "tilelang", "apache-tvm-ffi", "tl_megamoe"):
        found.append((name, package_version(name) or "not installed"))
    compiles, text = check_nvcc()
    found.append(("nvcc", text))
    compiler = shutil.which("c++") or shutil.which("g++")
    found.append(("c++", compiler or "not found: nvcc needs one"))
    found.append(("kernel cache", str(ReportCache().root.parents[1])))
    gpus = gpu_lines()
    found += gpus or [("gpu", "none: search compiles and ranks by the cost model")]
    found.append(("real ranks", real_ranks(count_gpus())))
    found.append(("virtual ranks", virtual_ranks(os.environ)))
    for device, paths in groupby(frozen_paths(root), lambda path: path.parent.name):
        found.append((f"frozen for {device}", ", ".join(path.stem for path in paths)))
    gpu = find_gpu()
    if gpu is not None and not list((root / device_key(gpu)).glob("*.json")):
        found.append((f"frozen for {device_key(gpu)}", "none: the built-in default runs"))
    return compiles, found


def count_gpus() -> int:
    """SM90 GPUs of this machine."""
    return sum(text.endswith("kernels run here") for _, text in gpu_lines())


def real_ranks(num_gpus: int) -> str:
    """How many ranks with a GPU each can run here."""
    if num_gpus < 2:
        return f"{num_gpus} SM90 GPUs here, at least 2 needed"
    return f"up to {min(num_gpus, MAX_RANKS)}, on {num_gpus} SM90 GPUs of this machine"


def virtual_ranks(environment: Mapping[str, str]) -> str:
    """Whether CUDA_DEVICE_MAX_CONNECTIONS allows ranks that share a GPU."""
    from tl_megamoe.virtual import CONNECTIONS, MIN_CONNECTIONS

    connections = environment.get(CONNECTIONS)
    shown = f"{CONNECTIONS}={connections}"
    if connections is None:
        return (
            f"{CONNECTIONS} is not set: search and check set it to {MIN_CONNECTIONS} for "
            "themselves, other programs must before CUDA starts"
        )
    if not connections.isdigit() or int(connections) < MIN_CONNECTIONS:
        return f"no: {shown}, set it to {MIN_CONNECTIONS} or unset it"
    return f"up to {MAX_RANKS} on an SM90 GPU: {shown}"


def gpu_lines() -> list[tuple[str, str]]:
    """Every CUDA device and whether the kernels run on it."""
    import torch

    if not torch.cuda.is_available():
        return []
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sm90 = (properties.major, properties.minor) == (9, 0)
        runs = "SM90, kernels run here" if sm90 else "not SM90: kernels do not run here"
        sms = properties.multi_processor_count
        lines.append((f"gpu {index}", f"{properties.name}, {sms} SMs, {runs}"))
    return lines
