"""The ranks of a layer behind one interface: one rank, virtual ranks on one GPU, or a GPU a rank.

Whoever checks or times a layer launches `for every rank here`, waits and compares; which ranks live
in this process, on which streams, and how their results meet is decided here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from tl_megamoe.buffer import SymmBuffer
from tl_megamoe.frozen import RANK_MODES
from tl_megamoe.handshake import disable_multicast, leader_of, own_host
from tl_megamoe.problem import Problem
from tl_megamoe.recipe import Recipe
from tl_megamoe.timeouts import check_reports
from tl_megamoe.virtual import VirtualGroup

from .messages import WorkerConfig
from .protocol import NUM_SETS

T = TypeVar("T")

KERNEL_TIMEOUT_S = 5.0
"""Bound of a wait inside a kernel; the child's own deadline is longer."""


class Ranks(ABC):
    """The ranks of one layer, and which of them live in this process.

    Attributes:
        problem: the layer over all ranks.
        num_ranks: how many there are.
        mode: `one`, `virtual` or `real`.
        here: ranks of this process.
        buffers: the buffer of each rank here.
        device: where they lie.
    """

    mode: str

    def __init__(self, problem: Problem, buffers: Mapping[int, SymmBuffer]) -> None:
        self.problem = problem
        self.num_ranks = problem.num_ranks
        self.buffers = dict(buffers)
        self.here = tuple(sorted(self.buffers))

    @property
    def first(self) -> SymmBuffer:
        """The buffer of the lowest rank here."""
        return self.buffers[self.here[0]]

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def num_sms(self) -> int | None:
        """Multiprocessors that one rank may use; None on a CPU."""
        return self.first.num_sms

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all: it holds rank 0."""
        return 0 in self.here

    @abstractmethod
    def run(self, launch: Callable[[int], object]) -> None:
        """Call `launch(r)` for every rank here, on the stream of that rank; nothing waits.

        What `launch` needs is loaded and allocated before: a rank's kernel may already spin.
        """

    def synchronize(self) -> None:
        """Wait for the GPU.

        Raises:
            MegaMoeTimeout: a wait of a rank here timed out.
            RuntimeError: another CUDA error.
        """
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            check_reports(list(self.buffers.values()))
            raise

    def barrier(self) -> None:
        """Return when every rank has come here and its GPU is idle; raises as `synchronize`."""
        self.synchronize()

    def gather(self, values: Mapping[int, T]) -> list[T]:
        """The values of all ranks, in rank order, from those of the ranks here."""
        return [values[rank] for rank in range(self.num_ranks)]

    def in_turn(self, work: Callable[[], T]) -> T:
        """`work()` in one process a host, then in the others: what one compiles, the others load.

        Called by every process; what one raises, all raise.
        """
        return work()


class OneRank(Ranks):
    """One rank on the current stream."""

    mode = "one"

    def run(self, launch: Callable[[int], object]) -> None:
        launch(0)


class VirtualRanks(Ranks):
    """All ranks on one GPU, a stream each."""

    mode = "virtual"

    def __init__(
        self, problem: Problem, buffers: Mapping[int, SymmBuffer], group: VirtualGroup
    ) -> None:
        super().__init__(problem, buffers)
        self.group = group

    def run(self, launch: Callable[[int], object]) -> None:
        self.group.run(launch)


class RankFailed(RuntimeError):  # noqa: N818 - says what happened, like MegaMoeTimeout
    """Another rank failed; `kind` is the name of its exception's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class RealRanks(Ranks):
    """The rank of this process, one of a torchrun job."""

    mode = "real"

    def run(self, launch: Callable[[int], object]) -> None:
        launch(self.here[0])

    def barrier(self) -> None:
        self._together(self.synchronize)

    def gather(self, values: Mapping[int, T]) -> list[T]:
        return exchange(values[self.here[0]])

    def in_turn(self, work: Callable[[], T]) -> T:
        first = leads_host(self.here[0])
        out: list[T] = []

        def take_turn(mine: bool) -> None:
            if mine:
                out.append(work())

        for mine in (first, not first):
            self._together(partial(take_turn, mine))
        return out[0]

    def _together(self, work: Callable[[], None]) -> None:
        """`work()` on every rank; what one of them raises, all of them raise.

        So ranks stay in step: nobody waits for one that has given up.
        """
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        told = None if failure is None else (type(failure).__name__, str(failure))
        every = exchange(told)
        if failure is not None:
            raise failure
        for rank, other in enumerate(every):
            if other is not None:
                raise RankFailed(other[0], f"rank {rank}: {other[0]}: {other[1]}")


@lru_cache(maxsize=1)
def _control_group() -> Any:
    """A group over the CPU: ranks still meet and tell what went wrong when their GPUs cannot."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def exchange(value: T) -> list[T]:
    """The values of all processes of the job, in rank order."""
    import torch.distributed as dist

    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value, group=_control_group())
    return out


def leads_host(rank: int) -> bool:
    """Whether `rank`, this process', is the lowest on its machine: it compiles, the others load.

    A collective call, like `exchange`.
    """
    return leader_of([{"host": host} for host in exchange(own_host())], rank) == rank


def world_size() -> int:
    """Processes of the torchrun job that this one belongs to; 1 outside of one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """This process' rank in its torchrun job, 0 outside of one."""
    return int(os.environ.get("RANK", "0"))


def join_job() -> torch.device:
    """This process' GPU in its torchrun job; starts torch.distributed unless it is running.

    Raises:
        ValueError: not started by torchrun.
    """
    import torch.distributed as dist

    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise ValueError(
            f"mode 'real' has a process a rank, and {', '.join(missing)} is not set: start it with "
            "torchrun --nproc_per_node=N"
        )
    disable_multicast()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=device)
    return device


def open_ranks(
    problem: Problem,
    capacity: int,
    *,
    mode: str,
    recipe: Recipe | None = None,
    timeout_s: float = 60.0,
    device: torch.device | str | None = None,
    debug: bool = False,
) -> Ranks:
    """Make the buffers of a layer's ranks.

    Args:
        problem: the layer over all ranks.
        capacity: the most tokens that a rank contributes.
        mode: `one`; `virtual`: all ranks on one GPU; `real`: this process is one rank of a torchrun
            job, whose every process calls this.
        recipe: `Recipe()` when None.
        timeout_s: bound of every wait of a launch, in seconds.
        device: CUDA device; the current one when None. `real` takes that of LOCAL_RANK.
        debug: as for `SymmBuffer`.

    Raises:
        ValueError: unknown mode, a number of ranks that does not fit it, or what the makers of
            buffers refuse.
        RuntimeError: what the makers of buffers refuse.
    """
    if mode == "one":
        one = SymmBuffer(problem, capacity, device, timeout_s, recipe=recipe, debug=debug)
        return OneRank(problem, {0: one})
    if mode == "virtual":
        group = VirtualGroup(problem.num_ranks, device)
        buffers = group.buffers(problem, capacity, timeout_s, recipe=recipe, debug=debug)
        return VirtualRanks(problem, dict(enumerate(buffers)), group)
    if mode != "real":
        raise ValueError(f"mode={mode!r} of ranks must be one of {', '.join(RANK_MODES)}")
    own = join_job() if device is None else torch.device(device)
    buffer = SymmBuffer.from_process_group(
        problem, capacity, device=own, timeout_s=timeout_s, recipe=recipe, debug=debug
    )
    return RealRanks(problem, {buffer.rank: buffer})


def open_rank_sets(config: WorkerConfig, device: str) -> list[Ranks]:
    """The ranks of each of the three sets: buffers of their own, the same streams.

    Args:
        config: of the worker.
        device: of the ranks here. With rank_mode `real` this process is one of a
            torch.distributed job, all of which call this.
    """
    problem, capacity = config.problem, config.capacity
    options: dict[str, Any] = {"timeout_s": KERNEL_TIMEOUT_S, "recipe": config.recipe}
    if config.rank_mode != "virtual":
        return [
            open_ranks(problem, capacity, mode=config.rank_mode, device=device, **options)
            for _ in range(NUM_SETS)
        ]
    group = VirtualGroup(problem.num_ranks, device)
    return [
        VirtualRanks(problem, dict(enumerate(group.buffers(problem, capacity, **options))), group)
        for _ in range(NUM_SETS)
    ]
