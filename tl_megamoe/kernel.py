"""Compile, inspect and launch a program. Compiling needs no GPU: the target is always sm_90a."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .device.trace import MAX_POOL_BLOCKS
from .layout import make_layout
from .native import private_cache
from .problem import Problem
from .recipe import Recipe
from .schedule import Schedule

if TYPE_CHECKING:
    import torch

    from .buffer import SymmBuffer
    from .weights import MoEWeights

PHASES = ("fused", "dispatch", "linear1", "linear2", "combine")
TARGET = {"kind": "cuda", "arch": "sm_90a"}
SERIALISED_WGMMA = ("C7510", "C7511", "C7514", "C7517")
"""ptxas warnings that say it put a wait behind every WGMMA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """What one compiled kernel depends on.

    Attributes:
        phase: `fused` or one of `dispatch`, `linear1`, `linear2`, `combine`. Of more than one
            rank, `linear2` and `combine` alone have no barrier against the next launch of a peer:
            the ranks meet on the host between launches of them.
        schedule: its runtime fields do not matter here (`Schedule.kernel_key`).
        capacity: tokens of the buffers that the kernel will run on.
        clamp: whether gate and up are clamped; the bound is a launch argument.
        fast_math: approximate reciprocal and exponential in the epilogue.
        debug: the stand-alone linear1 also writes its FP32 accumulators (`launch`).
        profile: the profiling build of the fused kernel, which stamps what its roles do (`launch`).

    Raises:
        ValueError: unknown phase; debug of another phase than linear1; profile of another phase
            than fused, or of more pool blocks than a stamp can name.
        ScheduleError: the schedule is not valid for the problem and recipe.
    """

    problem: Problem
    schedule: Schedule
    capacity: int
    phase: str = "fused"
    recipe: Recipe = Recipe()
    clamp: bool = False
    fast_math: bool = True
    debug: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase={self.phase!r} must be one of {', '.join(PHASES)}")
        if self.debug and self.phase != "linear1":
            raise ValueError(
                f"debug=True with phase={self.phase!r}: only the stand-alone 'linear1' has "
                "accumulators to show"
            )
        if self.profile:
            self._check_profile()
        self.schedule.check(self.problem, self.recipe, self.phase)

    def _check_profile(self) -> None:
        if self.phase != "fused":
            raise ValueError(
                f"profile=True with phase={self.phase!r}: only the fused kernel has such a build"
            )
        layout = make_layout(self.problem, self.capacity, self.recipe)
        blocks = layout.pool_rows // self.schedule.block_m
        if blocks > MAX_POOL_BLOCKS:
            raise ValueError(
                f"profile=True with capacity={self.capacity}: up to {blocks} pool blocks, and a "
                f"stamp names {MAX_POOL_BLOCKS}. Profile with a smaller capacity."
            )

    def key(self) -> KernelSpec:
        """The spec with the schedule's runtime fields reset: equal keys share one kernel."""
        schedule = self.schedule.kernel_key()
        # The reset values need not be valid for every problem; only compile fields are read.
        key = object.__new__(KernelSpec)
        for name in ("capacity", "phase", "recipe", "clamp", "fast_math", "debug", "profile"):
            object.__setattr__(key, name, getattr(self, name))
        object.__setattr__(key, "schedule", schedule)
        object.__setattr__(
            key, "problem", replace(self.problem, name="kernel", from_num_ranks=None)
        )
        return key


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What ptxas says of a kernel.

    Attributes:
        registers: a thread, at launch (roles redistribute them with setmaxnreg).
        spill_bytes: spill stores plus loads, in bytes.
        smem_bytes: dynamic and static shared memory, in bytes.
        num_wgmma: products in the program text, of up to four WGMMA instructions each.
        warnings: ptxas codes found, for example C7510.
        source_hash: sha256 of the generated CUDA text, 16 digits.
        nvcc: version of the nvcc that made it, for example `13.0.88`; empty if that is not said.
    """

    registers: int
    spill_bytes: int
    smem_bytes: int
    num_wgmma: int
    warnings: tuple[str, ...]
    source_hash: str
    nvcc: str = ""

    @property
    def serialised(self) -> bool:
        """Whether ptxas serialised WGMMA."""
        return any(code in SERIALISED_WGMMA for code in self.warnings)


class CompiledKernel:
    """A loaded kernel and how to call it."""

    def __init__(self, spec: KernelSpec, kernel: Any):
        self.spec = spec
        self.kernel = kernel

    def source(self) -> str:
        """The generated CUDA text."""
        return str(self.kernel.get_kernel_source())

    def launch(
        self,
        buffer: SymmBuffer,
        weights: MoEWeights,
        y: torch.Tensor,
        num_tokens: int,
        schedule: Schedule,
        *,
        recv_stats: torch.Tensor | None = None,
        activation_clamp: float | None = None,
        l1_accumulators: torch.Tensor | None = None,
        trace: torch.Tensor | None = None,
    ) -> None:
        """Launch on torch's current stream; returns at once.

        The caller has checked the arguments (`op.fp8_mega_moe` does): nothing is checked here but
        what TVM-FFI checks, shapes and dtypes of tensors.

        Args:
            buffer: its capacity is the spec's.
            weights: from `weights.transform_weights`.
            y: (num_tokens, hidden) bfloat16, contiguous.
            num_tokens: rows of the buffer's inputs that hold tokens.
            schedule: gives the runtime fields: order, experts_per_wave or lag, prefetch,
                evict_first.
            recv_stats: (num_local_experts,) int32, to which the rows each expert received are
                added; the buffer's own when None.
            activation_clamp: the bound, iff the spec says `clamp`.
            l1_accumulators: (ring_rows, 2*intermediate) float32, iff the spec says `debug`: gets
                gate, then up columns of every row of the pool's memory, before clamp and SwiGLU.
            trace: int32 of `device.trace.trace_shape(schedule.num_sms)`, iff the spec says
                `profile`: gets the stamps.
        """
        lag_order = schedule.order == "lag"
        self.kernel(
            buffer.topk_idx,
            buffer.peers,
            buffer.workspace,
            buffer.l1_acts,
            buffer.l1_acts_sf,
            buffer.l1_topk_weights,
            buffer.token_src_metadata,
            buffer.l2_acts,
            buffer.l2_acts_sf,
            weights.l1[0],
            weights.l1[1],
            weights.l2[0],
            weights.l2[1],
            buffer.recv_stats if recv_stats is None else recv_stats,
            (y if l1_accumulators is None else l1_accumulators).data_ptr(),
            buffer.report.data_ptr(),
            buffer.timeout_ms,
            buffer.rank,
            num_tokens,
            int(lag_order),
            schedule.lag if lag_order else schedule.experts_per_wave,
            schedule.prefetch,
            schedule.evict_first,
            0.0 if activation_clamp is None else activation_clamp,
            *(() if trace is None else (trace.data_ptr(),)),
        )


def _program(spec: KernelSpec) -> Any:
    from .device.plan import Plan
    from .program import build_program

    key = spec.key()
    plan = Plan.make(
        key.phase,
        key.problem,
        key.schedule,
        key.recipe,
        key.capacity,
        key.clamp,
        key.fast_math,
        key.debug,
        key.profile,
    )
    return build_program(plan)


@lru_cache(maxsize=512)
def _compile(key: KernelSpec) -> Any:
    private_cache()
    import tilelang

    from .program import PASS_CONFIGS

    configs = {**PASS_CONFIGS, "tl.enable_fast_math": key.fast_math}
    return tilelang.compile(_program(key), target=TARGET, pass_configs=configs)


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """Compile a kernel, or load it from this process or tilelang's disk cache.

    Raises:
        RuntimeError: nvcc failed; the message holds its output.
        ValueError: as `native.private_cache`.
    """
    return CompiledKernel(spec, _compile(spec.key()))


def compile_cubin(spec: KernelSpec, path: Path) -> str:
    """Compile a kernel's text to a cubin file, as tilelang does but with ptxas' report on.

    Returns:
        What nvcc and ptxas printed.

    Raises:
        RuntimeError: nvcc failed; the message holds its output.
    """
    from tilelang.contrib.nvcc import default_compile_options, get_nvcc_compiler

    text = path.with_suffix(".cu")
    text.write_text(compile_kernel(spec).source(), encoding="utf-8")
    command = [
        get_nvcc_compiler(),
        "-cubin",
        "-O3",
        "-Xptxas=-v",
        "-w",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        *(["--use_fast_math"] if spec.fast_math else []),
        *default_compile_options(),
        "-o",
        str(path),
        str(text),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    output = run.stdout + run.stderr
    if run.returncode:
        raise RuntimeError(f"nvcc failed with exit code {run.returncode}: {output[-2000:]}")
    return output


def inspect_kernel(spec: KernelSpec) -> KernelReport:
    """Compile a kernel once more with ptxas' report on, and read it. Takes as long as compiling."""
    kernel = compile_kernel(spec)
    with tempfile.TemporaryDirectory(prefix="tl_megamoe_") as folder:
        cubin = Path(folder) / "kernel.cubin"
        output = compile_cubin(spec, cubin)
        # From the disk cache it may be another nvcc's than the one that is here now.
        cached = getattr(kernel.kernel.adapter, "libpath", None)
        nvcc = nvcc_of(Path(cached or cubin).read_bytes())
    return parse_report(output, kernel.source(), str(kernel.kernel.get_host_source()), nvcc)


def nvcc_of(binary: bytes) -> str:
    """Version of the nvcc that made a cubin, or what is in a library, for example `13.0.88`; empty
    if it does not say."""
    found = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", binary)
    return found[1].decode() if found else ""


def parse_report(output: str, source: str, host_source: str, nvcc: str = "") -> KernelReport:
    """Read ptxas' verbose output and the generated texts of a program's one kernel.

    The dynamic shared memory is the last constant of the launch, behind grid and block; the larger
    ones before it are sizes of TMA descriptors.
    """

    def largest(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, output)), default=0)

    launch = re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\)", host_source)
    dynamic = int(launch[-1]) if launch else 0
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", output)]
    return KernelReport(
        registers=largest(r"Used (\d+) registers"),
        spill_bytes=sum(spills),
        smem_bytes=dynamic + largest(r"(\d+) bytes smem"),
        num_wgmma=len(re.findall(r"tlmm_product(?:_columns)?<\d", source)),
        warnings=tuple(sorted(set(re.findall(r"\bC7\d{3}\b", output)))),
        source_hash=hashlib.sha256(source.encode()).hexdigest()[:16],
        nvcc=nvcc,
    )
