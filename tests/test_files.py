"""Files that are replaced as a whole, and what cannot be."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tl_megamoe.explorer.files import replaced_file, write_atomically


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 240)
    write_atomically(path, "one")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    write_atomically(path, "two")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", 0o600)
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("one")
    link.symlink_to(target)
    write_atomically(link, "two")
    assert link.is_symlink()
    assert target.read_text() == "two"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_atomically(path, "text")
    reader.join(10)
    assert read == ["text"]
    assert path.is_fifo()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is not written"), replaced_file(tmp_path):
        pass
    assert tmp_path.is_dir()
