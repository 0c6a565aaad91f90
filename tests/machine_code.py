"""What ptxas made of a kernel and what it said: one run of nvcc for all tests of a kernel."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tilelang
from host_model import make_plan
from sass import check_roles, disassemble
from tilelang.contrib import nvcc

from tl_megamoe.device.matmul import shares
from tl_megamoe.device.plan import Plan
from tl_megamoe.kernel import KernelReport, KernelSpec, compile_cubin, compile_kernel, parse_report
from tl_megamoe.problem import Problem
from tl_megamoe.schedule import Schedule
from tl_megamoe.shared_memory import SMEM_LIMIT_BYTES


@dataclass(frozen=True)
class MachineCode:
    """A kernel's report, as `inspect_kernel` gives it, and nvdisasm's text of the same cubin."""

    report: KernelReport
    sass: str


class NvccRuns(logging.Handler):
    """Cubins of tilelang's runs of nvcc, and what it said of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cubins: list[bytes] = []
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said += record.getMessage()


@contextmanager
def recorded() -> Iterator[NvccRuns]:
    """Adds ptxas' report to tilelang's runs of nvcc, and keeps what comes out."""
    runs, compile_cuda = NvccRuns(), nvcc.compile_cuda

    def with_report(code: str, form: str, arch: list[str], options: list[str], **_: Any) -> Any:
        assert form == "cubin", form
        wanted = [*options, "--ptxas-options=--verbose"]
        binary = compile_cuda(code, form, arch, options=wanted, verbose=True)
        runs.cubins.append(bytes(binary))
        return binary

    tilelang.logger.addHandler(runs)
    try:
        with mock.patch.object(nvcc, "compile_cuda", with_report):
            yield runs
    finally:
        tilelang.logger.removeHandler(runs)


def machine_code(spec: KernelSpec) -> MachineCode:
    """Of the compile that launches the kernel; one built before, or on disk, is compiled again."""
    with recorded() as runs:
        kernel = compile_kernel(spec)
    with tempfile.TemporaryDirectory(prefix="tl_megamoe_") as folder:
        cubin = Path(folder) / "kernel.cubin"
        if runs.cubins:
            (binary,), said = runs.cubins, runs.said
            cubin.write_bytes(binary)
        else:
            said = compile_cubin(spec, cubin)
        text = disassemble(cubin)
    report = parse_report(said, kernel.source(), str(kernel.kernel.get_host_source()))
    return MachineCode(report, text)


def num_products(plan: Plan) -> int:
    """Products in the text of a fused kernel, which both math warpgroups share: one for each unit
    of each kind of tile, and in linear2 for each scale of a K block."""

    def units(linear: int) -> int:
        if plan.schedule.swapped:
            return 2 * len(plan.tile_rows(linear))
        return sum(len(share.units) for share in shares(plan, linear, 0))

    return units(1) + units(2) * plan.recipe.scales_per_k_block


def check_report(report: KernelReport, schedule: Schedule, problem: Problem) -> None:
    assert report.spill_bytes == 0
    assert not report.serialised, report.warnings
    assert report.num_wgmma == num_products(make_plan(problem, schedule, 1))
    assert report.smem_bytes <= schedule.smem_bytes(problem) <= SMEM_LIMIT_BYTES
    assert schedule.smem_bytes(problem) - report.smem_bytes < 2048
    assert report.registers * schedule.threads <= 65536


def check_code(spec: KernelSpec) -> None:
    """Compiles a kernel: no spills, no wait behind every WGMMA, and roles that share no branch."""
    code, schedule = machine_code(spec), spec.schedule
    check_report(code.report, schedule, spec.problem)
    roles = check_roles(code.sass, schedule.threads)
    assert roles.load_registers == schedule.load_registers
    assert roles.math_registers == schedule.math_registers
