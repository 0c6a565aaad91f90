"""Workers of ranks that have a GPU each: a process a rank, driven like one worker.

Every call goes to all ranks at once and comes back merged. The kernels of the ranks wait for each
other, so the ranks must get the same calls, launch the same number of times and stay alive
together: whoever is late, dies or raises takes the others with it.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

from .child import Child, ChildDied, ChildError, ChildTimeout
from .gpu_state import card_id
from .messages import CellInfo, CheckResult, WorkerConfig, merge_checks
from .protocol import Block
from .worker import Worker

HOST = "127.0.0.1"
GRACE_S = 10.0
"""Time for the other ranks to answer once one has raised: longer than a wait inside a kernel, so
that they can say what they waited for."""


class RankChild(Child):
    """A child whose calls are sent and answered apart, so that all ranks can work at once."""

    @property
    def connection(self) -> Connection[Any, Any]:
        """Readable when there is an answer, or the child has ended."""
        return self._connection

    def begin(self, method: str, *payload: Any) -> None:
        """Send a call.

        Raises:
            OSError: the child has ended.
        """
        self._connection.send((method, payload))

    def answer(self) -> Any:
        """The answer to the call, once `connection` is readable.

        Raises:
            EOFError, OSError: the child has ended.
            ChildError: the method raised.
        """
        reply = self._connection.recv()
        if reply[0] == "error":
            raise ChildError(reply[1], reply[2])
        return reply[1]

    def exit_code(self) -> int | None:
        """The child's own exit code if it has ended; None if it lives."""
        self._process.join(1.0)
        return self._process.exitcode


class RealRanksProcess:
    """The workers of all ranks behind the methods of one: `measure.Process`.

    Args:
        children: by rank.
        keep: kept alive as long as they are, as the store through which they meet.
        grace_s: time for the other ranks to answer once one has raised.
    """

    def __init__(
        self, children: Sequence[RankChild], *, keep: Any = None, grace_s: float = GRACE_S
    ) -> None:
        self._children = list(children)
        self._keep = keep
        self._grace_s = grace_s

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        """Run a method on all ranks and merge the answers (`merge`).

        Raises:
            ChildTimeout: a rank did not answer in time; all are dead now.
            ChildDied: a rank ended; all are dead.
            ChildError: the method raised on a rank. They live if all of them have answered.
        """
        for rank, child in enumerate(self._children):
            try:
                child.begin(method, *payload)
            except OSError as error:
                raise self._died(rank, method) from error
        answers: dict[int, Any] = {}
        errors: dict[int, ChildError] = {}
        deadline = time.monotonic() + timeout_s
        while missing := self._missing(answers, errors):
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                if errors:
                    break  # the others wait for a rank that has given up
                raise ChildTimeout(
                    f"{_ranks(missing.values())} gave no answer to {method!r} in {timeout_s:g} s"
                )
            for connection in ready:
                rank = missing[connection]
                try:
                    answers[rank] = self._children[rank].answer()
                except ChildError as error:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + self._grace_s)
                except (EOFError, OSError) as error:
                    raise self._died(rank, method) from error
        if errors:
            raise _first_cause(errors)
        return merge(method, [answers[rank] for rank in range(len(self._children))])

    def kill(self) -> None:
        """End all ranks; harmless if they have ended."""
        for child in self._children:
            child.kill()
        self._keep = None

    def _missing(
        self, answers: Mapping[int, Any], errors: Mapping[int, ChildError]
    ) -> dict[Any, int]:
        """Ranks that have not answered, by connection."""
        return {
            child.connection: rank
            for rank, child in enumerate(self._children)
            if rank not in answers and rank not in errors
        }

    def _died(self, rank: int, method: str) -> ChildDied:
        code = self._children[rank].exit_code()
        self.kill()
        return ChildDied(f"rank {rank}: process ended during {method!r} with exit code {code}")


def _ranks(ranks: Any) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _first_cause(errors: Mapping[int, ChildError]) -> ChildError:
    """The error of a rank that failed by itself, rather than of one that heard of it."""
    rank = min(errors, key=lambda rank: (errors[rank].kind == "RankFailed", rank))
    return ChildError(errors[rank].kind, f"rank {rank}: {errors[rank]}")


def merge(method: str, answers: Sequence[Any]) -> Any:
    """One answer of a layer from those of its ranks.

    Checks: the worst, with its rank. Blocks: those of the slowest rank by median, with the samples
    of all. Cells: sums, and the maximum over ranks. The yardstick: the mean. The card: one name for
    all cards together, in rank order.

    Args:
        method: of `Worker`.
        answers: by rank.
    """
    first = answers[0]
    if isinstance(first, CheckResult):
        return merge_checks(answers)
    if isinstance(first, Block):
        slowest = max(answers, key=lambda block: median(block.samples_us))
        return replace(slowest, ranks=tuple(block.samples_us for block in answers))
    if isinstance(first, CellInfo):
        return CellInfo(
            touched=sum(info.touched for info in answers),
            pairs=sum(info.pairs for info in answers),
            max_remote_pairs=max(info.max_remote_pairs for info in answers),
            max_touched=max(info.max_touched for info in answers),
            max_pairs=max(info.max_pairs for info in answers),
        )
    if method == "yardstick":
        return sum(answers) / len(answers)
    if method == "describe":
        return _describe(answers)
    return first


def _describe(answers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all ranks say alike, and one card for all.

    Raises:
        ValueError: the GPUs differ.
    """
    devices = [answer["device"] for answer in answers]
    if len(set(devices)) > 1:
        listed = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(devices))
        raise ValueError(
            f"the ranks have different GPUs ({listed}): a time would be of none of them. Choose "
            "GPUs of one kind with CUDA_VISIBLE_DEVICES"
        )
    cards = [answer["card"] for answer in answers]
    return {**answers[0], "card": card_id("/".join(cards)) if all(cards) else ""}


# ---- the processes


def open_store(port: int, *, holds: bool) -> Any:
    """The store through which the ranks meet: held by the caller of the ranks, joined by them.

    Args:
        port: on this machine; 0 for a free one (`store.port`).
        holds: whether this process is the one that holds it.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    return distributed.TCPStore(HOST, port, is_master=holds, wait_for_workers=False)


def join_job(rank: int, num_ranks: int, port: int, backend: str, device: Any = None) -> None:
    """Make this process a rank of the job whose store the caller of the ranks holds.

    Args:
        rank, num_ranks: of the job.
        port: of the store on this machine.
        backend: of torch.distributed, `nccl` or, for ranks on the CPU, `gloo`.
        device: this rank's GPU.
    """
    import torch.distributed as dist

    # The ranks are on one machine, whose name need not lead back to it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = open_store(port, holds=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, device_id=device)


def join_real_ranks(config: WorkerConfig, rank: int, port: int) -> Any:
    """Make this process a rank with a GPU; all ranks call it at the same time. Gives the GPU.

    Args:
        config: of the worker that it will hold.
        rank: of the config's problem.
        port: of the store (`join_job`).

    Raises:
        ValueError: fewer GPUs than ranks.
    """
    import torch

    from tl_megamoe.handshake import disable_multicast

    from .farm import quiet_tilelang

    disable_multicast()  # before anything starts CUDA
    quiet_tilelang()
    num_ranks, found = config.problem.num_ranks, torch.cuda.device_count()
    if found < num_ranks:
        raise ValueError(
            f"num_ranks={num_ranks} with rank_mode='real' needs a GPU a rank, and torch sees "
            f"{found}. Run fewer ranks, or share a GPU with rank_mode='virtual'"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    join_job(rank, num_ranks, port, "nccl", device)
    return device


def make_real_worker(config: WorkerConfig, rank: int, port: int) -> Worker:
    """The factory that the child of a rank imports; as `join_real_ranks`."""
    device = join_real_ranks(config, rank, port)
    return Worker(config, device=str(device))


def spawn_real_ranks(
    config: WorkerConfig,
    *,
    factory: Callable[[WorkerConfig, int, int], Worker] = make_real_worker,
) -> RealRanksProcess:
    """Fresh GPU processes, one for each rank of the config's problem.

    They meet through a store that this process holds on a free port of the machine.

    Args:
        config: with rank_mode `real`.
        factory: makes the worker of a rank from the config, the rank and the port; a spawned
            process imports it.
    """
    store = open_store(0, holds=True)
    children = [
        RankChild(factory, (config, rank, store.port)) for rank in range(config.problem.num_ranks)
    ]
    return RealRanksProcess(children, keep=store)
