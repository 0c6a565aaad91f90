"""The GPU side of a trace: the profiling build beside the shipped kernel, in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from tl_megamoe.device.trace import trace_shape
from tl_megamoe.kernel import CompiledKernel
from tl_megamoe.schedule import Schedule

from .child import Child
from .farm import quiet_tilelang
from .messages import WorkerConfig, kernel_specs
from .worker import Worker

if TYPE_CHECKING:
    import numpy as np

SHIPPED = "shipped"
PROFILING = "profiling"


@dataclass(frozen=True, slots=True)
class Stamped:
    """What a traced launch left; travels to the parent.

    Attributes:
        words: as `trace.read_trace` takes them.
        received: rows that each local expert received.
        shipped_us, profiling_us: median times of a launch, in blocks one after the other.
        same: whether the profiling build's result is the shipped kernel's to the bit.
    """

    words: np.ndarray[Any, Any]
    received: tuple[int, ...]
    shipped_us: float
    profiling_us: float
    same: bool


class Profiled:
    """A kernel of the profiling build with the memory that it stamps into."""

    def __init__(self, kernel: CompiledKernel, words: torch.Tensor):
        self.kernel = kernel
        self.words = words

    def launch(self, *arguments: Any) -> None:
        """As `CompiledKernel.launch`."""
        self.kernel.launch(*arguments, trace=self.words)


class TraceWorker(Worker):
    """A worker of one rank that runs a schedule's profiling build beside its shipped kernel."""

    def trace(self, schedule: Schedule) -> Stamped:
        """Check the schedule, time both builds, and take the last launch of the profiling build.

        It is the last of some 100 ms of launches over the three sets, back to back: the card is in
        its sustained state, and the sets' memory is not in L2.

        Raises:
            RuntimeError: the shipped kernel failed, or its result is wrong.
        """
        for name in (SHIPPED, PROFILING):
            self.drop(name)  # with the graphs of a schedule before, which stamp into its memory
        found = self.check(SHIPPED, schedule)
        if found.status != "ok":
            raise RuntimeError(f"{found.status}: {found.reason}")
        spec = replace(kernel_specs(self.config, schedule)["fused"], profile=True)
        shape = trace_shape(schedule.num_sms)
        words = torch.zeros(shape, dtype=torch.int32, device=self._device)
        kernel: Any = Profiled(self._compile(spec), words)
        self.kernels[PROFILING], self.schedules[PROFILING] = {"fused": kernel}, schedule
        self.bench.cell[PROFILING] = partial(self._launch, PROFILING, "fused")
        with self._reports():
            same = torch.equal(self._run_once(PROFILING), self.results[SHIPPED])
        for name in (SHIPPED, PROFILING):
            self.warm_up(name)
        shipped, profiling = (median(self.block(n).samples_us) for n in (SHIPPED, PROFILING))
        most = int(words[:, :, 0, 0].max().clamp(max=shape[2] - 1))
        return Stamped(
            words[:, :, : most + 1].cpu().numpy(),
            tuple(self.received[0]),
            shipped,
            profiling,
            same,
        )


def make_trace_worker(config: WorkerConfig) -> TraceWorker:
    """The factory that a child process imports."""
    quiet_tilelang()
    return TraceWorker(config)


def spawn_trace_worker(config: WorkerConfig) -> Child:
    """A fresh GPU process."""
    return Child(make_trace_worker, (config,))
