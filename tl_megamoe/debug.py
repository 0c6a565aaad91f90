"""What `SymmBuffer(debug=True)` does around a launch: guards, poisoned pools, routes looked at.

Every layout has guard bytes before its first section and behind each of them, which nothing uses:
the kernels are the same in debug mode. Here they get a pattern, and are compared with it after
every launch. All that is looked at is copied to pinned host memory that is allocated once: a check
must neither load a kernel nor allocate while another virtual rank's kernel waits for this one's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .buffer import SymmBuffer
    from .launch import BoundLaunch

GUARD_CODE = 0xC5
"""The byte that guards are filled with: no small integer, no NaN code of the pools."""


class BufferOverwrittenError(RuntimeError):
    """Bytes of a buffer that nothing uses were written.

    Attributes:
        guard: its name in `Layout.guards`.
        offset: of the first such byte, from the start of the buffer.
        value: what it holds, 0 to 255.
    """

    def __init__(self, message: str, *, guard: str, offset: int, value: int) -> None:
        super().__init__(message)
        self.guard = guard
        self.offset = offset
        self.value = value


class BufferDebug:
    """The guards of one buffer, and the host memory that checks read.

    Attributes:
        due: whether `VirtualGroup.run` shall look at the guards.

    Args:
        buffer: laid out, its inputs set; the guards are filled.
    """

    def __init__(self, buffer: SymmBuffer) -> None:
        guards = buffer.layout.guards
        self.due = False
        self._raw = buffer.raw
        self._guards = guards
        pinned = buffer.device.type == "cuda"
        total = sum(length for _, length in guards.values())
        # On the host whatever torch's default device is.
        self._found = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._routes = torch.empty(
            buffer.topk_idx.shape,
            dtype=buffer.topk_idx.dtype,
            device="cpu",
            pin_memory=pinned,
        )
        self.fill_guards()
        buffer.poison(local=True)  # loads the kernels that fill

    def fill_guards(self) -> None:
        """Give every guard its pattern."""
        for start, length in self._guards.values():
            self._raw[start : start + length].fill_(GUARD_CODE)

    def check_guards(self, buffer: SymmBuffer) -> None:
        """Wait for the current stream and compare every guard with its pattern.

        A guard that differs is filled anew: it is told once.

        Raises:
            BufferOverwrittenError: the first byte, by address, that differs.
        """
        self.due, place, copies = False, 0, {}
        for name, (start, length) in sorted(self._guards.items(), key=lambda item: item[1]):
            copies[name] = self._found[place : place + length]
            copies[name].copy_(self._raw[start : start + length], non_blocking=True)
            place += length
        _wait(buffer)
        if bool((self._found == GUARD_CODE).all()):
            return
        self.fill_guards()
        name, found = next(
            (name, found) for name, found in copies.items() if bool((found != GUARD_CODE).any())
        )
        first = int((found != GUARD_CODE).nonzero()[0])
        offset, value = self._guards[name][0] + first, int(found[first])
        raise BufferOverwrittenError(
            f"{buffer!r}: guard {name!r} was overwritten: byte {offset} of the buffer is "
            f"{value:#04x}, not {GUARD_CODE:#04x} ({_between(buffer, offset)}). A launch, or a "
            "tensor that is used beyond its end, has written outside of its section; the layer's "
            "results cannot be trusted.",
            guard=name,
            offset=offset,
            value=value,
        )

    def check_routes(self, buffer: SymmBuffer, num_tokens: int) -> None:
        """Wait for the current stream and look at the experts of a launch's tokens.

        Raises:
            ValueError: an expert below -1 or not below num_experts; names the first.
        """
        routes = self._routes[:num_tokens]
        routes.copy_(buffer.topk_idx[:num_tokens], non_blocking=True)
        _wait(buffer)
        num_experts = buffer.problem.num_experts
        wrong = (routes < -1) | (routes >= num_experts)
        if not bool(wrong.any()):
            return
        token, slot = (int(n) for n in wrong.nonzero()[0])
        raise ValueError(
            f"topk_idx[{token}, {slot}]={int(routes[token, slot])} of {buffer!r} must be an "
            f"expert, 0 to num_experts - 1 = {num_experts - 1}, or -1 for no route; "
            f"{int(wrong.sum())} of {routes.numel()} routes are neither. Without debug=True such a "
            "route is dropped."
        )

    def guarded(self, buffer: SymmBuffer, launch: BoundLaunch) -> BoundLaunch:
        """A launch with the checks around it; as it is while a CUDA graph is captured.

        Of virtual ranks the guards are looked at when all of them are launched
        (`VirtualGroup.run`): to wait for one of them alone is to wait for ever.
        """

        alive = weakref.ref(buffer)  # which holds the launch

        def guarded_launch(stats: Tensor, y: int, num_tokens: int) -> None:
            buffer = alive()
            assert buffer is not None
            if is_capturing(buffer):
                launch(stats, y, num_tokens)
                return
            self.check_routes(buffer, num_tokens)
            buffer.poison(local=buffer.problem.num_ranks > 1)
            launch(stats, y, num_tokens)
            if buffer.rank_mode == "virtual":
                self.due = True
            else:
                self.check_guards(buffer)

        return guarded_launch


def is_capturing(buffer: SymmBuffer) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _wait(buffer: SymmBuffer) -> None:
    """Wait for the current stream.

    Raises:
        MegaMoeTimeout: a wait of a launch on it timed out.
    """
    if buffer.device.type != "cuda":
        return
    try:
        torch.cuda.current_stream(buffer.device).synchronize()
    except RuntimeError:
        buffer.check_report()
        raise


def _between(buffer: SymmBuffer, offset: int) -> str:
    """The sections on both sides of an offset."""
    sections = sorted(buffer.layout.sections.values(), key=lambda s: s.offset)
    before = [s for s in sections if s.offset + s.num_bytes <= offset]
    after = [s for s in sections if s.offset > offset]
    words = []
    if before:
        last = before[-1]
        words.append(f"{offset - last.offset - last.num_bytes} bytes behind {last.name}")
    if after:
        words.append(f"{after[0].offset - offset} bytes before {after[0].name}")
    return ", ".join(words)
