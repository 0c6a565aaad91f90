"""Calls in a forked process that is killed, or whose disk is full, at any place where it writes.

Places are what Python's audit hooks see of a folder: files opened to write, and names made, moved
or removed. Between them a file is buffered, or written by `os.write`, which is halved here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = frozenset(
    ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 0x4000, 1 << 18


@dataclass(frozen=True)
class Ended:
    """How a forked call ended: its error's class and message, or -9."""

    code: int
    error: str = ""


def forked(work: Callable[[], object]) -> Ended:
    """Run a call in a forked process; its error comes back as `class: message`."""
    return start_forked(work)()


def start_forked(work: Callable[[], object]) -> Callable[[], Ended]:
    """`forked` without the wait: what it returns waits, and says how the call ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.close(read)
            work()
        except BaseException as error:  # all of it is the answer
            code = 1 if isinstance(error, (OSError, ValueError)) else 2
            text = f"{type(error).__name__}: {error}"
            if code == 2:
                text += "\n" + traceback.format_exc()
            os.write(write, text.encode()[:60_000])
        finally:
            os._exit(code)
    os.close(write)

    def end() -> Ended:
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(pid, 0)
        return Ended(os.waitstatus_to_exitcode(status), said)

    return end


def killed_at(place: int, folder: Path, work: Callable[[], object]) -> Ended:
    """Run a call in a process that ends itself by SIGKILL at a place, counted from 0."""

    def run() -> None:
        _watch(folder, place)
        work()

    return forked(run)


def _watch(folder: Path, place: int) -> None:
    """Count what this process does to a folder, and kill it in front of the event `place`."""
    inside = os.fspath(folder)
    count = 0

    def step() -> None:
        nonlocal count
        if count == place:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(args[0], (str, bytes, os.PathLike)):
            reads = event == "open" and not (args[2] & WRITES)
            if not reads and os.fsdecode(args[0]).startswith(inside):
                step()

    write = os.write

    def in_halves(fd: int, data: Any) -> int:
        step()
        return write(fd, data[: max(1, len(data) // 2)])

    sys.addaudithook(hook)
    os.write = in_halves


def limited(num_bytes: int, work: Callable[[], object]) -> Ended:
    """Run a call in a process none of whose files may be longer (EFBIG), as root too."""

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        work()

    return forked(run)


def on_disk(
    folder: Path, num_bytes: int, work: Callable[[], object], *, read_only: bool = False
) -> Ended | None:
    """Run a call with a folder on a disk of its own, which the process alone sees.

    Args:
        folder: what it holds is there too; a change is not seen outside.
        num_bytes: left of the disk, in pages of 4 KiB.
        work: runs there; it also has to look at what it left.
        read_only: nothing can be written.

    Returns:
        How it ended; None where this process may not mount.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    no_mount = "may not mount"

    def call(result: int) -> None:
        if result:
            raise SystemExit(f"{no_mount}: {os.strerror(ctypes.get_errno())}")

    def mount(flags: int, options: str, kind: bytes | None = b"tmpfs") -> None:
        where = b"/" if kind is None else os.fsencode(folder)
        call(libc.mount(b"none", where, kind, ctypes.c_ulong(flags), options.encode()))

    def run() -> None:
        call(libc.unshare(CLONE_NEWNS))
        mount(MS_REC | MS_PRIVATE, "", None)
        held = [(p.relative_to(folder), p.is_dir(), p) for p in sorted(folder.rglob("*"))]
        data = {name: b"" if is_folder else path.read_bytes() for name, is_folder, path in held}
        mount(0, "size=8m,mode=0755")
        for name, is_folder, _ in held:
            if is_folder:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(data[name])
        left = os.statvfs(folder)
        (folder / "filler").write_bytes(bytes(left.f_bavail * left.f_bsize - num_bytes))
        if read_only:
            mount(MS_REMOUNT | MS_RDONLY, "")
        work()

    ended = forked(run)
    return None if no_mount in ended.error else ended


def copy_of(template: Path, folder: Path) -> Path:
    """A fresh copy of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


FULL = (errno.ENOSPC, errno.EFBIG)
