"""The symmetric buffer of a rank: inputs, pools and counters in one allocation.

Three makers, one class: the constructor for one rank, `SymmBuffer.from_process_group` for ranks on
GPUs of their own, `VirtualGroup.buffers` (virtual.py) for ranks that share one GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .arguments import check_timeout, copy_inputs
from .debug import BufferDebug
from .devices import allocate, pick_device
from .exported import ExportedKernels
from .handshake import bare_card, check_multicast_off, exchange_cards, in_step, own_card
from .launch import Launcher
from .layout import LINE, Layout, make_layout
from .problem import Problem
from .recipe import RecipeLike, as_recipe
from .registry import register
from .scaling import E4M3, E4M3_NAN_CODE
from .schedule import Schedule
from .timeouts import REPORT_LENGTH
from .timeouts import TIMEOUT_TAGS as TIMEOUT_TAGS
from .timeouts import MegaMoeTimeout as MegaMoeTimeout
from .timeouts import check_reports as check_reports

if TYPE_CHECKING:
    from .kernel import CompiledKernel
    from .quantize import QuantizeKernel

_DTYPES = {
    "float8_e4m3fn": E4M3,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}
INPUTS = ("x", "x_sf", "topk_idx", "topk_weights")
"""Sections that the caller fills."""


class SymmBuffer:
    """One rank's buffer, zeroed once; the kernel needs no memset between launches.

    Attributes (views of one allocation, see layout.py; what `evict_first` drops holds anything):
        x, x_sf, topk_idx, topk_weights: inputs, filled by the caller; `topk_idx` starts at -1.
        l1_acts, l1_acts_sf, l1_topk_weights, token_src_metadata: receive pool of linear1.
        l2_acts, l2_acts_sf: pool of linear2.
        combine_acts: (topk, capacity, hidden) bf16, rows that came back.
        src_routes, recv_stats, workspace: routing lists, cumulative counts, counters.
        expert_recv_count_sum: (local experts,) int32, rows each expert received in the last launch.
        l1_arrival_count, l2_arrival, l2_done: (pool blocks,) int32, zero between launches.
        dispatch_signal, combine_signal: (32,) int32, by rank: launches in which it has arrived.
        peers: (num_ranks,) int64, base address of every rank's buffer as this GPU sees it.
        report: (256,) int32 in pinned host memory, a slot of 16 for each tag of a timed-out wait.
        rank: this rank, 0 to num_ranks - 1.
        rank_mode: `one`, `virtual` (ranks share this GPU) or `real` (a GPU a rank).
        group: process group of a `real` buffer, else None.
        recipe: the numeric recipe that the pools are laid out for.
        num_sms: multiprocessors that this rank may use, None on a CPU.
        key: name of this buffer for the operators of library.py.
        lock: held while a call brings its tokens in and launches.
        schedules: what a launch may run, by forced math mode, kept by loading.py.
        kernels: kernels loaded for this buffer, kept by loading.py.
        quantizers: those that quantise activations, by shared experts, kept by calls.py.
        exported: where kernels come from; they are compiled when None.
        launcher: what repeated launches need, kept by calls.py.
        debug: the checks of debug mode, None without it.

    Args:
        problem: the layer; one rank (`num_ranks` of 1).
        capacity: the most tokens of a launch.
        device: CUDA device; the current one when None. A CPU buffer serves tests.
        timeout_s: bound of every wait of a launch, in seconds.
        recipe: `Recipe()` when None or one of DeepGEMM's tuples.
        kernels: a folder that `tl-megamoe export` wrote: its kernels run, and none is compiled.
        debug: check every launch, which then waits: experts outside of the layer are refused, pools
            are poisoned before and guards looked at after (docs/debugging.md). Not in CUDA graphs.

    Raises:
        ValueError: more than one rank, a bad capacity, timeout or recipe, or a folder that is no
            export.
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
        *,
        recipe: RecipeLike = None,
        kernels: Path | str | None = None,
        debug: bool = False,
    ) -> None:
        if problem.num_ranks != 1:
            raise ValueError(
                f"num_ranks={problem.num_ranks} of problem {problem.name!r}: SymmBuffer(...) makes "
                "the buffer of one rank. Use SymmBuffer.from_process_group(problem, ...) with a "
                f"GPU a rank, VirtualGroup({problem.num_ranks}).buffers(problem, ...) with all "
                "ranks on one GPU, or problem.one_rank(), the layer as one of its ranks sees it."
            )
        check_timeout(timeout_s)
        layout = make_layout(problem, capacity, as_recipe(recipe))
        exported = None if kernels is None else ExportedKernels.open(kernels)
        raw = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=pick_device(device))
        peers = [raw.data_ptr()]
        self._set_up(layout, raw, peers, timeout_s=timeout_s, exported=exported, debug=debug)

    @classmethod
    def from_process_group(
        cls,
        problem: Problem,
        capacity: int,
        group: Any = None,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
        *,
        recipe: RecipeLike = None,
        kernels: Path | str | None = None,
        debug: bool = False,
    ) -> SymmBuffer:
        """The buffer of this process' rank, in torch symmetric memory; all ranks call it.

        The ranks compare what they were called with before anything is allocated, and when this
        returns every rank's buffer is zeroed: any rank may launch. Multicast is kept off, by
        variables that are set for the whole process (`handshake.disable_multicast`).

        Args:
            problem: the layer over all ranks; `num_ranks` is the size of `group`.
            capacity: the most tokens that a rank contributes, the same on all ranks.
            group: process group of the ranks; the default group when None.
            device: this rank's GPU; the current one when None.
            timeout_s: bound of every wait of a launch, in seconds; may differ between ranks.
            recipe: `Recipe()` when None or one of DeepGEMM's tuples; the same on all ranks.
            kernels: a folder that `tl-megamoe export` wrote, on every rank or on none.
            debug: as for the class; may differ between ranks.

        Raises:
            ValueError: an argument is wrong or differs between the ranks, or multicast is switched
                on; raised on all of them.
            RuntimeError: torch.distributed is not initialised; or, raised on all of them, a rank
                could not allocate its buffer or reach its peers'.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "from_process_group needs torch.distributed: call "
                "torch.distributed.init_process_group first, in a process that torchrun started"
            )
        group = dist.group.WORLD if group is None else group
        size = dist.get_world_size(group)
        card = bare_card()
        layout, exported, where = None, None, torch.device("cpu")
        try:  # an error of one rank must reach all: the others wait for its card
            check_multicast_off()
            card = own_card(problem, capacity, as_recipe(recipe))
            if problem.num_ranks != size:
                raise ValueError(
                    f"num_ranks={problem.num_ranks} of problem {problem.name!r} is not the size of "
                    f"the process group, {size}. Start {problem.num_ranks} processes "
                    f"(torchrun --nproc_per_node={problem.num_ranks}), or load the problem with "
                    f"num_ranks={size}."
                )
            check_timeout(timeout_s)
            layout = make_layout(problem, capacity, as_recipe(recipe))
            exported = None if kernels is None else ExportedKernels.open(kernels)
            gpu = pick_device(device)
            if gpu.type != "cuda":
                raise ValueError(
                    f"device={str(gpu)!r} of a process group's buffer must be a CUDA device: "
                    "symmetric memory is GPU memory"
                )
            properties = torch.cuda.get_device_properties(gpu)
            card["device"] = str(getattr(properties, "uuid", gpu.index))
            where = gpu  # one that exists: the cards may travel through it
        except Exception as error:
            card = {**card, **bare_card(error)}
        exchange_cards(card, group, where)
        assert layout is not None
        num_bytes = layout.num_bytes
        with torch.cuda.device(where):
            # A step of all ranks before the next begins: none enters a rendezvous that another,
            # out of memory, does not come to.
            raw = in_step(lambda: allocate(num_bytes, where, size), group, where)
            buffer = cls.__new__(cls)
            in_step(
                lambda: buffer._meet(layout, raw, group, timeout_s, exported, debug), group, where
            )
        return buffer

    def _meet(
        self,
        layout: Layout,
        raw: Tensor,
        group: Any,
        timeout_s: float,
        exported: ExportedKernels | None,
        debug: bool,
    ) -> None:
        """Exchange addresses with the other ranks and set up; the GPU is idle at the end."""
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        handle, peers = None, [raw.data_ptr()]
        if size > 1:
            import torch.distributed._symmetric_memory as symmetric

            handle = symmetric.rendezvous(raw, group)
            offset = getattr(handle, "offset", 0)  # of this tensor in torch's allocation
            peers = [int(address) + offset for address in handle.buffer_ptrs]
            if len(peers) != size or peers[rank] != raw.data_ptr():
                raise RuntimeError(
                    f"symmetric memory gave the addresses {[hex(p) for p in peers]} to {size} "
                    f"ranks, and rank {rank} allocated {raw.data_ptr():#x}: the kernel adds one "
                    "offset to every rank's address and needs its own among them"
                )
        self._set_up(
            layout,
            raw,
            peers,
            rank=rank,
            rank_mode="real" if size > 1 else "one",
            timeout_s=timeout_s,
            group=group,
            keep=handle,
            exported=exported,
            debug=debug,
        )
        torch.cuda.synchronize()  # nobody writes into a buffer that its rank still zeroes

    def _set_up(
        self,
        layout: Layout,
        raw: Tensor,
        peers: Sequence[int],
        *,
        timeout_s: float,
        rank: int = 0,
        rank_mode: str = "one",
        num_sms: int | None = None,
        group: Any = None,
        keep: Any = None,
        exported: ExportedKernels | None = None,
        debug: bool = False,
    ) -> None:
        """Lay the views over a zeroed allocation.

        Args:
            layout: of this rank.
            raw: (layout.num_bytes,) uint8, all zero.
            peers: base address of every rank's buffer.
            timeout_s: checked already.
            rank, rank_mode, group: see the attributes.
            num_sms: multiprocessors of this rank; all of the device when None.
            keep: kept alive with the buffer, since others' memory hangs on it.
            exported: where kernels come from; they are compiled when None.
            debug: as for the class.
        """
        self.problem = layout.problem
        self.capacity = layout.capacity
        self.recipe = layout.recipe
        self.layout = layout
        self.timeout_s = timeout_s
        self.timeout_ms = max(1, round(timeout_s * 1000))
        self.exported = exported
        self.rank = rank
        self.rank_mode = rank_mode
        self.group = group
        self._keep = keep
        self.raw = raw
        self.device = raw.device
        for section in layout.sections.values():
            part = raw[section.offset : section.offset + section.num_bytes]
            if section.name in INPUTS:
                # A storage of its own over the same memory: torch.compile refuses code that writes
                # to views of one storage with different dtypes, which these would be.
                with torch.cuda.device(raw.device) if raw.is_cuda else nullcontext():
                    part = from_dlpack(part)
            setattr(self, section.name, part.view(_DTYPES[section.dtype]).view(section.shape))
        blocks = layout.max_pool_blocks
        self.expert_recv_count_sum = self._counter(
            "expert_recv_count_sum", self.problem.num_local_experts
        )
        self.l1_arrival_count = self._counter("l1_arrival_count", blocks)
        self.l2_arrival = self._counter("l2_arrival", blocks)
        self.l2_done = self._counter("l2_done", blocks)
        self.dispatch_signal = self._counter("dispatch_signal", LINE)
        self.combine_signal = self._counter("combine_signal", LINE)
        self.peers = torch.tensor(list(peers), dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.report = torch.zeros(REPORT_LENGTH, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.topk_idx.fill_(-1)
        self.device_name = torch.cuda.get_device_name(self.device) if on_gpu else "cpu"
        if num_sms is None and on_gpu:
            num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_sms = num_sms
        self.schedules: dict[str | None, list[tuple[int, Schedule]]] = {}
        self.kernels: dict[Hashable, CompiledKernel] = {}
        self.quantizers: dict[int, QuantizeKernel] = {}
        self.launcher = Launcher(
            self.recv_stats, (self.x, self.x_sf, self.topk_idx, self.topk_weights)
        )
        self.debug = BufferDebug(self) if debug else None
        self.lock = threading.RLock()
        self.key = register(self)

    def _counter(self, name: str, length: int) -> Tensor:
        start = self.layout.workspace_offsets[name]
        return self.workspace[start : start + length]

    @property
    def num_max_tokens_per_rank(self) -> int:
        """The capacity, under DeepGEMM's name."""
        return self.capacity

    @property
    def destroyed(self) -> bool:
        """Whether `destroy` has let go of the memory."""
        return "raw" not in vars(self)

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
        self.launcher.enter_stream()
        return copy_inputs(self, x, x_sf, topk_idx, topk_weights)

    def quantize(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_shared: int = 0
    ) -> int:
        """Quantise the tokens of a launch into the first rows: one kernel, on the current stream.

        What it writes is `quantize.quantize_activations` and `quantize.add_shared_routes`, to the
        bit. The first call compiles its kernel (`warmup` does before).

        Args:
            x: (tokens, hidden) bfloat16.
            topk_idx: (tokens, topk - num_shared) int64 or int32, routed experts; -1 for a dropped
                route.
            topk_weights: (tokens, topk - num_shared) float32 or bfloat16.
            num_shared: experts of each rank, its last ones, that every token of the rank is routed
                to with weight 1; the buffer's problem counts them, and their routes.

        Returns:
            The number of tokens.

        Raises:
            ValueError: as `fill`, and for a number of shared experts that the problem cannot have.
        """
        from .calls import bring_in

        return bring_in(self, x, None, topk_idx, topk_weights, num_shared)

    def warmup(
        self,
        *,
        activation_clamp: bool = False,
        fast_math: bool = True,
        num_shared: int | None = 0,
    ) -> list[tuple[int, Schedule]]:
        """Load every kernel that a call on this buffer may choose, so that no call compiles one.

        Where they are not in tilelang's disk cache they are compiled, about 10 s each. With a
        process group all ranks call it, alike.

        Args:
            activation_clamp: whether the calls will clamp.
            fast_math: as the calls will have it.
            num_shared: shared experts of calls with BF16 activations, whose kernel is loaded too;
                None: there will be none.

        Returns:
            (last token bound, schedule), ascending, the last one up to the capacity.

        Raises:
            ValueError: the buffer is on a CPU, or an exported folder lacks a kernel.
            ScheduleError: the ranks choose differently.
        """
        from .calls import load_quantizer
        from .loading import check_kernel_buffer, warm_up

        check_kernel_buffer(self)
        if num_shared is not None and num_shared not in self.quantizers:
            load_quantizer(self, num_shared)
        return warm_up(self, activation_clamp=activation_clamp, fast_math=fast_math)

    def reload_schedules(self) -> None:
        """Read the frozen table and the environment anew at the next call; kernels stay loaded.

        A buffer reads them once. With several ranks all of them do this between the same calls.
        """
        self.schedules.clear()
        self.launcher.known.clear()

    def poison(self, *, local: bool = False) -> None:
        """Fill the pools with NaN and impossible sources, so that a read of a stale row shows.

        Inputs, counters and signals stay. With more than one rank no rank may be running, nor
        launch before all have been poisoned: launches of peers write into this buffer.

        Args:
            local: leave alone what peers write; then they may be running, and launch.
        """
        for codes in (self.l1_acts, self.l2_acts):
            codes.view(torch.uint8).fill_(E4M3_NAN_CODE)
        for values in (self.l1_acts_sf, self.l1_topk_weights, self.l2_acts_sf):
            values.fill_(torch.nan)
        self.token_src_metadata.fill_(-1)
        if not local:
            self.combine_acts.fill_(torch.nan)
            self.src_routes.fill_(-1)

    def check_guards(self) -> None:
        """Wait for the current stream, and look at the bytes that nobody may write.

        Launches of a debug buffer do it; after the replay of a CUDA graph it is the caller's.

        Raises:
            ValueError: the buffer is not in debug mode, whose guards have a pattern.
            BufferOverwrittenError: names the guard, the offset and what stands there.
        """
        if self.debug is None:
            raise ValueError(f"{self!r} has no guards to look at: make it with debug=True")
        self.debug.check_guards(self)

    def check_report(self) -> None:
        """Raise MegaMoeTimeout if a wait of this rank timed out; reads host memory only.

        Call it after the launch has ended, also when the end was a CUDA error. Ranks that share a
        GPU lose it together: `check_reports` names the likeliest cause among them.

        Raises:
            MegaMoeTimeout: names the likeliest cause; its attributes hold the details.
        """
        check_reports((self,))

    def destroy(self) -> None:
        """Let go of the memory; nothing of the buffer can be used after. All ranks must be idle."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                delattr(self, name)
        self._keep = self.debug = None
        self.kernels.clear()
        self.quantizers.clear()
        del self.launcher

    def describe(self) -> str:
        """Where the bytes are: the layout's sections, the rank and the device."""
        where = f"rank {self.rank} of {self.problem.num_ranks}, mode {self.rank_mode}"
        return f"{self.layout.describe()}\n  {where}, on {self.device}"

    def __repr__(self) -> str:
        rank = f"rank={self.rank} of {self.problem.num_ranks} ({self.rank_mode}), "
        return (
            f"SymmBuffer({self.problem.name!r}, {'' if self.rank_mode == 'one' else rank}"
            f"capacity={self.capacity}, {self.num_bytes:,} bytes on {self.device})"
        )
