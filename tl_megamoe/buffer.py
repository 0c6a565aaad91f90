"""The symmetric buffer of one rank: inputs, pools and counters in one allocation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layout import Layout, make_layout
from .problem import SCALE_BLOCK, Problem
from .scaling import E4M3, E4M3_NAN_CODE
from .schedule import Schedule

if TYPE_CHECKING:
    from .kernel import CompiledKernel

REPORT_SLOT = 8
"""Integers of one report; the slot of a wait starts at its tag times this."""
REPORT_LENGTH = 64
TIMEOUT_TAGS = {
    1: "dispatch: exchange of the counts, grid barrier",
    4: "linear1: pool block {info} waits for its tokens",
    5: "linear2: pool block {info} waits for linear1",
    6: "combine: grid barrier before the sum",
}
"""What a wait of device/barriers.py was for, by the tag it reports."""
_DTYPES = {
    "float8_e4m3fn": E4M3,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}


class MegaMoeTimeout(RuntimeError):  # noqa: N818 - a timeout is the word its callers know
    """A wait in the kernel exceeded its bound; the message says which. The CUDA context is lost."""


class SymmBuffer:
    """One rank's buffer, zeroed once; the kernel needs no memset between launches.

    Attributes (all views of one allocation, see layout.py for the shapes):
        x, x_sf, topk_idx, topk_weights: inputs, filled by the caller; `topk_idx` starts at -1.
        l1_acts, l1_acts_sf, l1_topk_weights, token_src_metadata: receive pool of linear1.
        l2_acts, l2_acts_sf: pool of linear2.
        combine_acts: (topk, capacity, hidden) bf16, rows that came back.
        src_routes, recv_stats, workspace: routing lists, cumulative counts, counters.
        expert_recv_count_sum: (local experts,) int32, rows each expert received in the last launch.
        l1_arrival_count, l2_arrival: (pool blocks,) int32, zero between launches.
        peers: (num_ranks,) int64, base address of every rank's buffer.
        report: (64,) int32 in pinned host memory, a slot of 8 for each tag of a timed-out wait.
        num_sms: multiprocessors of the device, None on a CPU.
        schedules: schedule chosen for a token count, kept by op.py.
        kernels: kernels loaded for this buffer, kept by op.py.

    Args:
        problem: the layer; one rank (`num_ranks` of 1).
        capacity: the most tokens of a launch.
        device: CUDA device; the current one when None. A CPU buffer serves tests.
        timeout_s: bound of every wait of a launch, in seconds.

    Raises:
        ValueError: more than one rank, a bad capacity or timeout.
    """

    x: Tensor
    x_sf: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    src_routes: Tensor
    l1_acts: Tensor
    l1_acts_sf: Tensor
    l1_topk_weights: Tensor
    token_src_metadata: Tensor
    l2_acts: Tensor
    l2_acts_sf: Tensor
    combine_acts: Tensor
    recv_stats: Tensor
    workspace: Tensor

    def __init__(
        self,
        problem: Problem,
        capacity: int,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if problem.num_ranks != 1:
            raise ValueError(
                f"num_ranks={problem.num_ranks} of problem {problem.name!r}: this buffer serves "
                "one rank. Use problem.one_rank(), the layer as one of its ranks sees it."
            )
        if not 0 < timeout_s < 2**31 / 1000:
            raise ValueError(f"timeout_s={timeout_s} must be positive and below {2**31 // 1000}")
        self.problem = problem
        self.capacity = capacity
        self.timeout_s = timeout_s
        self.timeout_ms = max(1, round(timeout_s * 1000))
        self.rank = 0
        self.layout: Layout = make_layout(problem, capacity)
        if device is None:
            if not torch.cuda.is_available():
                raise ValueError(
                    "device=None means the current CUDA device, and torch sees none. The kernel "
                    "needs an SM90 GPU; device='cpu' makes a buffer to look at."
                )
            device = torch.device("cuda", torch.cuda.current_device())
        self.raw = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self.device = self.raw.device
        for section in self.layout.sections.values():
            part = self.raw[section.offset : section.offset + section.num_bytes]
            setattr(self, section.name, part.view(_DTYPES[section.dtype]).view(section.shape))
        blocks = self.layout.max_pool_blocks
        self.expert_recv_count_sum = self._counter(
            "expert_recv_count_sum", problem.num_local_experts
        )
        self.l1_arrival_count = self._counter("l1_arrival_count", blocks)
        self.l2_arrival = self._counter("l2_arrival", blocks)
        self.peers = torch.tensor([self.raw.data_ptr()], dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.report = torch.zeros(REPORT_LENGTH, dtype=torch.int32, pin_memory=on_gpu)
        self.topk_idx.fill_(-1)
        self.device_name = torch.cuda.get_device_name(self.device) if on_gpu else "cpu"
        self.num_sms: int | None = None
        if on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            self.num_sms = properties.multi_processor_count
        self.schedules: dict[int, Schedule] = {}
        self.kernels: dict[Hashable, CompiledKernel] = {}

    def _counter(self, name: str, length: int) -> Tensor:
        start = self.layout.workspace_offsets[name]
        return self.workspace[start : start + length]

    @property
    def num_bytes(self) -> int:
        """Size of the allocation."""
        return self.layout.num_bytes

    def fill(self, x: Tensor, x_sf: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> int:
        """Copy the tokens of a launch into the first rows, on the current stream.

        Args:
            x: (tokens, hidden) e4m3.
            x_sf: (tokens, hidden/128) float32.
            topk_idx: (tokens, topk) int64, -1 for a dropped route.
            topk_weights: (tokens, topk) float32.

        Returns:
            The number of tokens.

        Raises:
            ValueError: a shape, dtype or device that breaks these rules, or more tokens than the
                capacity.
        """
        p = self.problem
        if x.dim() != 2:
            raise ValueError(f"x of shape {tuple(x.shape)} must be (tokens, hidden={p.hidden})")
        tokens = x.shape[0]
        if tokens > self.capacity:
            raise ValueError(
                f"x has {tokens} tokens, more than capacity={self.capacity} of the buffer. Make "
                "the buffer with a larger capacity or split the batch."
            )
        groups = p.hidden // SCALE_BLOCK
        arguments = (
            ("x", x, self.x, p.hidden, "hidden"),
            ("x_sf", x_sf, self.x_sf, groups, "hidden/128"),
            ("topk_idx", topk_idx, self.topk_idx, p.num_topk, "num_topk"),
            ("topk_weights", topk_weights, self.topk_weights, p.num_topk, "num_topk"),
        )
        for name, value, target, columns, what in arguments:
            if tuple(value.shape) != (tokens, columns):
                raise ValueError(
                    f"{name} of shape {tuple(value.shape)} must be (tokens, {what}) = "
                    f"{(tokens, columns)}; tokens is the number of rows of x"
                )
            if value.dtype != target.dtype:
                raise ValueError(f"{name} of dtype {value.dtype} must be {target.dtype}")
            if value.device != self.device:
                raise ValueError(f"{name} is on {value.device}, the buffer on {self.device}")
        for _, value, target, _, _ in arguments:
            target[:tokens].copy_(value)
        return tokens

    def poison(self) -> None:
        """Fill the pools with NaN and impossible sources, so that a read of a stale row shows."""
        for codes in (self.l1_acts, self.l2_acts):
            codes.view(torch.uint8).fill_(E4M3_NAN_CODE)
        for values in (self.l1_acts_sf, self.l1_topk_weights, self.l2_acts_sf, self.combine_acts):
            values.fill_(torch.nan)
        self.token_src_metadata.fill_(-1)
        self.src_routes.fill_(-1)

    def check_report(self) -> None:
        """Raise MegaMoeTimeout if a wait timed out; reads host memory only.

        Call it after the launch has ended, also when the end was a CUDA error.
        """
        slots = self.report.view(-1, REPORT_SLOT).tolist()
        stuck = [slot for slot in slots if slot[0]]
        if not stuck:
            return
        # Phases in order of their tags: the earliest is the cause, the others wait for it.
        tag, rank, block, thread, info, have, want = stuck[0][:7]
        what = TIMEOUT_TAGS.get(tag, f"unknown wait, tag {tag}").format(info=info)
        others = ", ".join(TIMEOUT_TAGS.get(s[0], str(s[0])).split(":")[0] for s in stuck[1:])
        raise MegaMoeTimeout(
            f"{what}: rank {rank}, block {block}, thread {thread} counted {have} of {want} in "
            f"{self.timeout_s:g} s{f' (stuck behind it: {others})' if others else ''}. Every block "
            "of the grid must be resident at once: is another stream or process holding SMs, or "
            "did a rank not launch? The CUDA context is lost."
        )

    def describe(self) -> str:
        """Where the bytes are: the layout's sections, and the device."""
        return f"{self.layout.describe()}\n  on {self.device}"

    def __repr__(self) -> str:
        return (
            f"SymmBuffer({self.problem.name!r}, capacity={self.capacity}, "
            f"{self.num_bytes:,} bytes on {self.device})"
        )
