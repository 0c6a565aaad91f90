"""Virtual ranks: the ranks of a layer side by side on one GPU, for tests, debugging and search.

Every rank has its own buffer, a stream and an equal share of the multiprocessors; peers' addresses
are plain addresses of the same GPU, and the kernels are those of real ranks. They wait for each
other, so all of them must run at once. Three things could keep one from starting:

- Hardware queues. With CUDA's default of 8, two streams may share one and a kernel stands behind
  another that spins. CUDA_DEVICE_MAX_CONNECTIONS=32 must be set before CUDA starts, be it by torch
  or by another library in the process; if it was not, launches time out and the report asks so.
- Loading. CUDA may load a kernel at its first launch, which can wait until the device is idle. The
  ranks of a group run the same kernel (they choose one schedule, `token_bound` being the same), and
  it is loaded with the first rank's launch, when nothing spins yet. All else that `launch(r)` does
  must be loaded and allocated before `run`.
- Multiprocessors. A rank's grid has at most `num_sms` blocks; nobody else may hold SMs for long.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from .arguments import check_timeout
from .buffer import SymmBuffer, check_reports
from .devices import pick_device
from .exported import ExportedKernels
from .layout import MAX_RANKS, make_layout
from .problem import Problem
from .recipe import RecipeLike, as_recipe

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MIN_CONNECTIONS = 32
T = TypeVar("T")


class VirtualGroup:
    """`num_ranks` ranks on one GPU.

    Attributes:
        num_ranks: ranks, 1 to 16.
        device: the GPU of all ranks. A CPU group makes buffers and cannot run.
        num_sms: multiprocessors of one rank, device's // num_ranks; None on a CPU.
        streams: a stream a rank; empty on a CPU.

    Args:
        num_ranks: how many.
        device: CUDA device; the current one when None.

    Raises:
        ValueError: num_ranks outside 1..16, or no CUDA device.
        RuntimeError: CUDA_DEVICE_MAX_CONNECTIONS is below 32, or unset though CUDA has started.
            What it was when CUDA started cannot be seen: set later, it passes and has no effect.
    """

    def __init__(self, num_ranks: int, device: torch.device | str | None = None) -> None:
        if type(num_ranks) is not int or not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(
                f"num_ranks={num_ranks!r} of a VirtualGroup must be an integer in 1..{MAX_RANKS}"
            )
        self.num_ranks = num_ranks
        if device is None or torch.device(device).type == "cuda":
            ensure_connections()
        self.device = pick_device(device)
        self.num_sms: int | None = None
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self._debugged: weakref.WeakSet[SymmBuffer] = weakref.WeakSet()
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self.num_sms = properties.multi_processor_count // num_ranks
            self.streams = tuple(torch.cuda.Stream(self.device) for _ in range(num_ranks))

    def buffers(
        self,
        problem: Problem,
        capacity: int,
        timeout_s: float = 60.0,
        *,
        recipe: RecipeLike = None,
        kernels: Path | str | None = None,
        debug: bool = False,
    ) -> tuple[SymmBuffer, ...]:
        """The buffers of all ranks, zeroed, rank r at index r. Waits until the device is idle.

        Args:
            problem: the layer over all ranks; `num_ranks` is that of the group.
            capacity: the most tokens that a rank contributes.
            timeout_s: bound of every wait of a launch, in seconds.
            recipe: `Recipe()` when None or one of DeepGEMM's tuples.
            kernels: a folder that `tl-megamoe export --rank-mode virtual` wrote; None: compile.
            debug: as for `SymmBuffer`; `run` looks at the guards when all ranks are launched.

        Raises:
            ValueError: another number of ranks than the group's, a bad capacity or timeout, or a
                folder that is no export.
        """
        if problem.num_ranks != self.num_ranks:
            raise ValueError(
                f"num_ranks={problem.num_ranks} of problem {problem.name!r} is not that of the "
                f"VirtualGroup, {self.num_ranks}. Make a VirtualGroup({problem.num_ranks}), or "
                f"load the problem with num_ranks={self.num_ranks}."
            )
        check_timeout(timeout_s)
        layout = make_layout(problem, capacity, as_recipe(recipe))
        exported = None if kernels is None else ExportedKernels.open(kernels)
        # An allocation a rank, as with real ranks: a write past its end does not hit the next rank.
        raws = [
            torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
            for _ in range(self.num_ranks)
        ]
        addresses = [raw.data_ptr() for raw in raws]
        out = []
        for rank, raw in enumerate(raws):
            buffer = SymmBuffer.__new__(SymmBuffer)
            buffer._set_up(
                layout,
                raw,
                addresses,
                rank=rank,
                rank_mode="virtual",
                timeout_s=timeout_s,
                num_sms=self.num_sms,
                keep=raws,
                exported=exported,
                debug=debug,
            )
            out.append(buffer)
        if debug:
            self._debugged.update(out)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(out)

    def prepare(
        self, buffers: Sequence[SymmBuffer], num_tokens: int | Sequence[int], **options: Any
    ) -> list[Any]:
        """Compile and keep the kernel of every rank, before any runs; see `loading.prepare`.

        Args:
            buffers: from `buffers`.
            num_tokens: of every rank, or one number for all.
            **options: those of `loading.prepare`, the same for all ranks.

        Returns:
            What `loading.prepare` returns, by rank.

        Raises:
            ValueError, ScheduleError: as `loading.prepare`; or the ranks would run different
                kernels.
        """
        from .op import prepare

        counts = [num_tokens] * len(buffers) if isinstance(num_tokens, int) else num_tokens
        prepared = [prepare(b, n, **options) for b, n in zip(buffers, counts, strict=True)]
        names = [schedule.name for _, schedule in prepared]
        if len({schedule.kernel_key() for _, schedule in prepared}) > 1:
            raise ValueError(
                f"the ranks would run different kernels ({', '.join(names)}), of which the second "
                "may wait for the first to end before it can load. Pass one token_bound or one "
                "schedule for all."
            )
        return prepared

    def run(self, launch: Callable[[int], T]) -> list[T]:
        """Call `launch(r)` for every rank with its stream current; returns without waiting.

        The ranks start after what is on the current stream now, and what comes later on it waits
        for all of them, also while a CUDA graph is captured. `launch` must launch rank r and
        nothing that is not yet loaded or allocated: outputs are made before. Should it raise for a
        rank, the ranks launched before it wait for their `timeout_s` and the CUDA context is lost;
        so check arguments before (`prepare` does).

        Args:
            launch: gets the rank.

        Returns:
            What `launch` returned, by rank.

        Raises:
            RuntimeError: the group is on a CPU.
            BufferOverwrittenError: a buffer in debug mode was written outside of its sections.
        """
        if not self.streams:
            raise RuntimeError(
                f"a VirtualGroup on {self.device} cannot run: the kernel needs an SM90 GPU"
            )
        current = torch.cuda.current_stream(self.device)
        start = torch.cuda.Event()
        start.record(current)
        results = []
        try:
            for rank, stream in enumerate(self.streams):
                stream.wait_event(start)
                with torch.cuda.stream(stream):
                    results.append(launch(rank))
        finally:
            for stream in self.streams:
                current.wait_stream(stream)
        for buffer in self._debugged:
            if buffer.debug is not None and buffer.debug.due:
                buffer.check_guards()
        return results

    def check_reports(self, buffers: Sequence[SymmBuffer]) -> None:
        """Raise MegaMoeTimeout for the likeliest cause among all ranks; see `check_report`."""
        check_reports(buffers)

    def __repr__(self) -> str:
        return f"VirtualGroup({self.num_ranks}, {str(self.device)!r}, num_sms={self.num_sms})"


def ensure_connections() -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS while torch has not started CUDA; else look at its value now.

    Raises:
        RuntimeError: CUDA runs without them, or the variable asks for fewer.
    """
    value = os.environ.get(CONNECTIONS)
    if value is None and not torch.cuda.is_initialized():
        os.environ[CONNECTIONS] = str(MIN_CONNECTIONS)
        return
    if value is None or not value.isdigit() or int(value) < MIN_CONNECTIONS:
        state = "CUDA has started" if torch.cuda.is_initialized() else "CUDA would start"
        raise RuntimeError(
            f"{CONNECTIONS}={'unset' if value is None else value}: virtual ranks need "
            f"{MIN_CONNECTIONS}, and {state} with that. With fewer hardware queues (8 when unset) "
            "streams share one, and a kernel can wait behind another that waits for it. Set "
            f"{CONNECTIONS}={MIN_CONNECTIONS} before starting python."
        )
