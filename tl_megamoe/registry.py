"""Names of buffers: an operator takes a string where a function takes the buffer itself."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_BUFFERS: dict[str, weakref.ref[Any]] = {}
_numbers = itertools.count()


def register(buffer: Any) -> str:
    """Name a buffer, for as long as it lives.

    Processes that make the same buffers in the same order give them the same names, so that graphs
    which one of them compiled are found in another's cache; a graph that was exported for a buffer
    of other sizes, capacity, recipe or kind finds no buffer.
    """
    kind = type(buffer).__name__
    sizes = "-".join(map(str, buffer.problem.key().values()))
    key = f"{kind}:{sizes}:{buffer.capacity}:{buffer.recipe}:{next(_numbers)}"
    _BUFFERS[key] = weakref.ref(buffer, lambda _: _BUFFERS.pop(key, None))
    return key


def buffer_of(key: str) -> Any:
    """The buffer of a name.

    Raises:
        ValueError: it does not live, or never did.
    """
    found = _BUFFERS.get(key)
    buffer = None if found is None else found()
    if buffer is None:
        alive = ", ".join(map(repr, _BUFFERS)) or "none"
        raise ValueError(
            f"buffer={key!r} names no buffer of this process; alive: {alive}. Keep the buffer (or "
            "the MegaMoE module that holds it) for as long as its graphs run, and compile anew in "
            "another process."
        )
    return buffer
