"""Files that are replaced as a whole: a reader sees the old one or the new, whatever happens."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write under another name, which takes the place of `path` when the block ends.

    A process that is killed leaves `<name>.<8 letters>` beside it at most, which nothing reads.
    What cannot be replaced, as a pipe or /dev/null, is written to; a link stays, and what it names
    is replaced.

    Args:
        path: the file; its folder is made. One that is there keeps its mode.

    Raises:
        OSError: it cannot be written; names the file, the reason, and what to do. What was there
            stays.
    """
    name, path = "", path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (path.is_file() or path.is_dir()):
            with path.open("wb") as file:
                yield file
            return
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else 0o644
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name[:200] + ".")
        with os.fdopen(fd, "wb") as file:
            yield file
            os.fchmod(fd, mode)
            file.flush()
            os.fsync(fd)
        os.replace(name, path)
    except BaseException as error:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError):
            text = (
                f"{path} is not written: {reason_of(error, path)}. What was there stays; free "
                "space or name another folder, and run the same command again"
            )
            raise OSError(error.errno, text) from error
        raise


def reason_of(error: OSError, path: Path) -> str:
    """What the system said of `path`, without the words of `replaced_file`."""
    first = error.__cause__ if isinstance(error.__cause__, OSError) else error
    text = first.strerror or str(first)
    elsewhere = first.filename is not None and not str(first.filename).startswith(str(path))
    return f"{first.filename}: {text}" if elsewhere else text


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file as a whole; errors as `replaced_file`."""
    with replaced_file(path) as file:
        file.write(data)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole with UTF-8 text; errors as `replaced_file`."""
    write_bytes(path, text.encode())
