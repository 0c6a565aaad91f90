"""tilelang's disk cache of compiled kernels, found by the text of a kernel.

tilelang 0.1.15 keeps a kernel in `<version>/<platform>/kernels/<key>/`, with a manifest of its
files. Its key takes a trace of the program to know; the hash of the device text is in our reports.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from pathlib import Path

from tl_megamoe.native import private_cache

from .farm import REPORTS, ReportCache, package_version

DEVICE_TEXT = "device_kernel.cu"
"""File of a cache entry that holds what `KernelReport.source_hash` is the hash of."""
MANIFEST = "manifest.json"
"""File of a cache entry that lists the others; tilelang writes it."""


def host_platform() -> str:
    """This machine as tilelang's cache names it, for example `linux-x86_64`."""
    return f"{_word(sys.platform)}-{_word(platform.machine())}"


def namespace() -> Path:
    """Folder of this tilelang version and platform within the cache: `0.1.15/linux-x86_64`."""
    public, _, local = package_version("tilelang").partition("+")
    local = re.sub(r"[^a-zA-Z0-9]", "_", local).strip("_")
    return Path(f"{_word(public)}_{local}" if local else _word(public)) / host_platform()


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]", "_", text).strip("._-") or "unknown"


class KernelStore:
    """The entries of tilelang's disk cache by the hash of their device text.

    Args:
        root: folder of the cache; `native.private_cache()` when None.
    """

    def __init__(self, root: Path | None = None):
        self.root = root or private_cache()
        self.reports = ReportCache(self.root / REPORTS)
        self.folder = self.root / namespace() / "kernels"
        self._seen: set[str] = set()
        self._by_hash: dict[str, list[Path]] = {}

    def entries_of(self, source_hash: str) -> list[Path]:
        """Folders of the kernels with this text; more than one if only their hosts differ."""
        if source_hash not in self._by_hash:
            self._scan()
        return [path for path in self._by_hash.get(source_hash, []) if path.is_dir()]

    def _scan(self) -> None:
        """Index what is new; an entry that another process removes or writes now is left out."""
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        for name in names:
            if name not in self._seen:
                digest = listed_files(self.folder / name).get(DEVICE_TEXT)
                if digest is not None:
                    self._seen.add(name)
                    self._by_hash.setdefault(digest[:16], []).append(self.folder / name)


def listed_files(entry: Path) -> dict[str, str]:
    """sha256 of the files of a cache entry by its own manifest; empty if that cannot be read."""
    try:
        data = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        return {str(name): str(facts["sha256"]) for name, facts in data["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def is_whole(entry: Path) -> bool:
    """Whether every file of a cache entry is what its manifest says."""
    listed = listed_files(entry)
    try:
        return DEVICE_TEXT in listed and all(sha256_of(entry / n) == h for n, h in listed.items())
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
