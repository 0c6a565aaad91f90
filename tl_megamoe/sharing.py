"""Which buffer a module runs on: one that it is given, or one that modules of its shape share."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .arguments import check_timeout
from .buffer import SymmBuffer
from .calls import Buffer
from .devices import pick_device
from .handshake import bare_card, gather, refuse_together
from .loading import has_peers
from .problem import Problem
from .recipe import Recipe, RecipeLike, as_recipe
from .reference_buffer import ReferenceBuffer

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "kernel", "reference")
DEFAULT_CAPACITY = 8192


class _Key(NamedTuple):
    """All that decides whether two modules may share a buffer."""

    backend: str
    device: torch.device
    sizes: tuple[int, ...]
    capacity: int
    recipe: Recipe
    group: int | None
    kernels: str | None


_buffers: weakref.WeakValueDictionary[_Key, Buffer] = weakref.WeakValueDictionary()
"""Buffers that modules made and still hold."""
_lock = threading.RLock()
_said: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOptions:
    """What a module says about its buffer; None where it says nothing.

    Attributes:
        group: process group.
        capacity: the most tokens of a call.
        recipe: numeric recipe, or one of DeepGEMM's tuples.
        backend: one of `BACKENDS`.
        device: of weights and buffer.
        timeout_s: bound of every wait.
        kernels: folder of exported kernels.
    """

    group: Any
    capacity: int | None
    recipe: RecipeLike
    backend: str
    device: torch.device | str | None
    timeout_s: float | None
    kernels: str | Path | None


def rank_in(group: Any) -> tuple[int, int]:
    """Size of a process group, and this process' rank in it; (1, 0) of None.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    if group is None:
        return 1, 0
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "a process group needs torch.distributed: call torch.distributed.init_process_group "
            "first, in a process that torchrun started"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "this process is not in the process group: make the module on the ranks of its group"
        )
    return dist.get_world_size(group), rank


def rank_of(buffer: Any) -> tuple[int, int]:
    """Ranks of a buffer's layer, and whose buffer it is.

    Raises:
        ValueError: it is no buffer.
    """
    backend_of(buffer)
    return buffer.problem.num_ranks, buffer.rank


def tell_ranks(error: Exception, group: Any, buffer: Any) -> None:
    """Raise `error` on the ranks that wait for this one in `find_buffer`, or to warm a buffer up.

    Args:
        error: why this rank makes no module.
        group: that of the module.
        buffer: that it was given, if any.
    """
    if buffer is not None:
        if isinstance(buffer, SymmBuffer) and has_peers(buffer):
            refuse_together(error, buffer.group, buffer.device)
        return
    try:
        num_ranks, _ = rank_in(group)
    except Exception:
        return  # it is in no group whose ranks could wait
    if num_ranks > 1:
        gather({**bare_card(error), "found": False}, group)


def find_buffer(problem: Problem, options: BufferOptions) -> Buffer:
    """The buffer of a new module: one that such modules hold already, else a new one.

    Args:
        problem: the layer with its shared experts.
        options: of the module.

    Raises:
        ValueError: there is no such backend, device or capacity, the reference is to run several
            ranks or exported kernels, or the shared buffer has another timeout; with several ranks
            the error of one is raised on all of them.
    """
    with _lock:
        if problem.num_ranks == 1:
            key, found = _look_up(problem, options)
        else:
            key, found = _look_up_together(problem, options)
        if found is None:
            found = _make(problem, key, options)
            _buffers[key] = found
    return found


def _look_up(problem: Problem, options: BufferOptions) -> tuple[_Key, Buffer | None]:
    """What a module's buffer is kept under, and the buffer if a module holds one."""
    backend, device = _pick(problem, options)
    folder = None if options.kernels is None else str(Path(options.kernels).resolve())
    key = _Key(
        backend,
        device,
        tuple(problem.key().values()),
        DEFAULT_CAPACITY if options.capacity is None else options.capacity,
        as_recipe(options.recipe),
        # The buffer holds its group, so no other group has its id while the entry is there.
        None if options.group is None else id(options.group),
        folder,
    )
    found = _buffers.get(key)
    if isinstance(found, SymmBuffer):
        if found.destroyed:
            return key, None
        if options.timeout_s not in (None, found.timeout_s):
            raise ValueError(
                f"timeout_s={options.timeout_s} differs from timeout_s={found.timeout_s} of the "
                "buffer that modules of this shape share. Pass the same, or buffer=, one of its "
                "own."
            )
    return key, found


def _look_up_together(problem: Problem, options: BufferOptions) -> tuple[_Key, Buffer | None]:
    """`_look_up` on all ranks: to make a buffer takes all of them, so all find one or none does.

    When the last module of a buffer dies is up to each process' garbage collector.
    """
    key, found, failure = None, None, None
    try:
        key, found = _look_up(problem, options)
    except Exception as error:  # the others wait for this rank's card
        failure = error
    card = {**bare_card(failure), "found": found is not None}
    cards = gather(card, options.group, None if key is None else key.device)
    failed = [f"rank {rank}: {c['error']}" for rank, c in enumerate(cards) if c["error"]]
    if failed:
        raise ValueError(f"no rank has a buffer. {'; '.join(failed)}")
    assert key is not None
    return key, found if all(c["found"] for c in cards) else None


def _make(problem: Problem, key: _Key, options: BufferOptions) -> Buffer:
    if key.backend == "reference":
        return ReferenceBuffer(problem, key.capacity, key.device, recipe=key.recipe)
    given: dict[str, Any] = {
        "device": key.device,
        "recipe": key.recipe,
        "kernels": options.kernels,
    }
    if options.timeout_s is not None:
        given["timeout_s"] = options.timeout_s
    if options.group is None:
        return SymmBuffer(problem, key.capacity, **given)
    return SymmBuffer.from_process_group(problem, key.capacity, options.group, **given)


def _pick(problem: Problem, options: BufferOptions) -> tuple[str, torch.device]:
    """`kernel` or `reference`, and where."""
    _check_backend(options.backend)
    if options.timeout_s is not None:
        check_timeout(options.timeout_s)
    if options.device is None:
        here = torch.cuda.is_available() and _is_sm90(pick_device(None))
        device = pick_device(None if here else "cpu")
    else:
        device = pick_device(options.device)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device={str(device)!r} must be a CUDA device or the CPU")
    fits = device.type == "cuda" and _is_sm90(device)
    if options.backend == "kernel" and not fits:
        raise ValueError(
            f"backend='kernel' on {_describe(device)}: the kernel needs an SM90 GPU (H100, H200). "
            "backend='reference' computes the same layer in float32, slowly."
        )
    if options.backend == "kernel" or (options.backend == "auto" and fits):
        return "kernel", device
    if problem.num_ranks > 1:
        raise ValueError(
            f"the reference computes one rank, and the process group has {problem.num_ranks}: "
            f"backend={options.backend!r} on {_describe(device)}. Run on SM90 GPUs, or pass "
            "group=None, one rank with all experts."
        )
    if options.kernels is not None:
        raise ValueError(
            f"kernels={str(options.kernels)!r} on {_describe(device)} with backend="
            f"{options.backend!r}: the reference runs no kernels. Leave kernels away, or run on an "
            "SM90 GPU"
        )
    if options.backend == "auto":
        _say_once(
            f"MegaMoE runs the float32 reference on {_describe(device)}, orders of magnitude "
            "slower than the kernel, which needs an SM90 GPU"
        )
    return "reference", device


def check_buffer(buffer: Any, problem: Problem, options: BufferOptions) -> None:
    """Raise ValueError unless a given buffer is what a module asks for.

    Args:
        buffer: given by the caller.
        problem: the layer with its shared experts, over as many ranks as the buffer's.
        options: of the module; what it leaves open is the buffer's.
    """
    if buffer.problem.key() != problem.key():
        raise ValueError(
            f"buffer is of {_sizes(buffer.problem)}, and the module needs {_sizes(problem)}; "
            "shared experts count as experts of every rank and as routes. Make the buffer with "
            "tl_megamoe.with_shared(problem, num_shared_experts), or pass none."
        )
    _check_backend(options.backend)
    backend = backend_of(buffer)
    if options.backend not in ("auto", backend):
        raise ValueError(
            f"backend={options.backend!r} with a {type(buffer).__name__}, which is of backend "
            f"{backend!r}: leave one of the two away"
        )
    device = buffer.device if options.device is None else pick_device(options.device)
    group = getattr(buffer, "group", None)
    for word, wish, held in (
        ("capacity", options.capacity, buffer.capacity),
        ("timeout_s", options.timeout_s, getattr(buffer, "timeout_s", options.timeout_s)),
        ("recipe", None if options.recipe is None else as_recipe(options.recipe), buffer.recipe),
        ("device", device, buffer.device),
    ):
        if wish is not None and wish != held:
            raise ValueError(
                f"{word}={wish} differs from the buffer's, {held}: leave {word} away or pass "
                "another buffer"
            )
    if options.group is not None and options.group is not group:
        raise ValueError(
            "group is not that of the buffer: leave group away or make the buffer with "
            "SymmBuffer.from_process_group(problem, capacity, group)"
        )
    if options.kernels is not None:
        raise ValueError(
            f"kernels={str(options.kernels)!r} together with a buffer, which has its kernels: pass "
            "kernels to the buffer"
        )


def backend_of(buffer: Any) -> str:
    """`kernel` or `reference`.

    Raises:
        ValueError: it is no buffer.
    """
    if isinstance(buffer, SymmBuffer):
        return "kernel"
    if isinstance(buffer, ReferenceBuffer):
        return "reference"
    raise ValueError(
        f"buffer must be a SymmBuffer or a ReferenceBuffer, found {type(buffer).__name__}"
    )


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")


def _is_sm90(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def _describe(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _sizes(problem: Problem) -> str:
    return ", ".join(f"{word}={size}" for word, size in problem.key().items())


def _say_once(message: str) -> None:
    with _lock:
        if message in _said:
            return
        _said.add(message)
    logger.warning(message)
