"""A child process that does dangerous work on request and can be killed at a deadline.

A compiler may hang, a kernel may hang or take the CUDA context with it: both run here. The child
serves the methods of one object, one call at a time, over a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SETUP_TIMEOUT_S = 600.0
"""Bound for making weights and buffers; V4-Pro's take some seconds."""


class ChildTimeout(RuntimeError):  # noqa: N818 - says what happened, like TimeoutError
    """The child did not answer in time and was killed."""


class ChildDied(RuntimeError):  # noqa: N818
    """The child ended without an answer: a crash, or killed for memory."""


class ChildError(RuntimeError):
    """The call raised in the child; `kind` is the name of the exception's class."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def _end_with_parent() -> None:
    """Kill this process and its compilers when the parent is gone, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _serve(connection: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()  # its own group: killed with its compilers, and not by the terminal's Ctrl-C
    os.dup2(2, 1)  # data goes to the parent's stdout only
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    handler: Any = None
    while True:
        try:
            method, payload = connection.recv()
        except EOFError:
            return
        reply: tuple[Any, ...]
        try:
            if handler is None:
                handler = factory(*args)
            reply = ("ok", getattr(handler, method)(*payload))
        except Exception as error:  # every failure of the work is an answer
            text = str(error) or traceback.format_exc()
            reply = ("error", type(error).__name__, text[-4000:])
        connection.send(reply)


class Child:
    """A spawned process that holds `factory(*args)`, made at the first call.

    Args:
        factory: a class or function that a spawned process can import.
        args: its arguments; they travel pickled.
    """

    def __init__(self, factory: Callable[..., Any], args: tuple[Any, ...] = ()):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, args), daemon=True)
        self._process.start()
        theirs.close()
        self._group_lives = True

    def call(self, method: str, *payload: Any, timeout_s: float) -> Any:
        """Run a method in the child and return its answer.

        Raises:
            ChildTimeout: no answer in time; the child is dead now.
            ChildDied: the child ended; it is dead.
            ChildError: the method raised; the child lives.
        """
        try:
            self._connection.send((method, payload))
            if not self._connection.poll(timeout_s):
                self.kill()
                raise ChildTimeout(f"no answer to {method!r} in {timeout_s:g} s")
            reply = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(1.0)  # its own exit code, not that of the kill below
            self.kill()
            code = self._process.exitcode
            why = " (killed, as a machine out of memory does)" if code == -signal.SIGKILL else ""
            raise ChildDied(
                f"process ended during {method!r} with exit code {code}{why}"
            ) from error
        if reply[0] == "error":
            raise ChildError(reply[1], reply[2])
        return reply[1]

    def close(self) -> None:
        """Let an idle child end by itself; kill it if it does not."""
        self._connection.close()
        self._process.join(5.0)
        self.kill()

    def kill(self) -> None:
        """End the child and everything it started; harmless if it has ended."""
        self.end()
        self._connection.close()

    def end(self) -> None:
        """`kill` from another thread than the one that calls: that one closes the connection."""
        pid = self._process.pid
        # A child that crashed leaves its compilers in the group. Once: then the number is free.
        if pid is not None and self._group_lives:
            self._group_lives = False
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10.0)
