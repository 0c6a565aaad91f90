"""What makes a launch cheap on the host, in C++ that is compiled once a machine.

- A launch encodes six TMA descriptors. tilelang's function for that lives in its compiler's
  library, so a process that shall not load the compiler has none; it also checks every argument
  into lists of strings before it asks CUDA. Here it is in a module of its own, which a kernel's
  module imports: TVM-FFI looks there before it asks its global registry. The arguments are those
  that tilelang's compiler wrote into the kernel's host code, and CUDA checks them.
- Of the 23 arguments of a launch 20 are the same every time: a bound launch holds them.
- From its third launch on a bound launch on a GPU asks CUDA itself, with the parameters that
  CUDA got from the kernel's host code in the second, three of them replaced.

The text is native_source.py's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .native_source import SOURCE

logger = logging.getLogger(__name__)

ENCODE = "__tvm_tensormap_create_tiled"
"""The name under which a kernel's module looks for what encodes its descriptors."""
BIND = "bind_launch"
"""(function, places of three arguments, all arguments) -> function of those three."""


def cache_root() -> Path:
    """Folder of tilelang's kernel cache: TILELANG_CACHE_DIR, or ~/.tilelang/cache."""
    return Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")


def private_cache() -> Path:
    """The cache folder, made for this user alone (0700) where there is none.

    Kernels are native code that is loaded from it, so a folder that is another user's, or that
    everybody may write to, is refused; a group that may write to it is trusted, and so are the
    folders above it. Call it before tilelang is imported, which makes the folder for everyone to
    read.

    Raises:
        ValueError: the folder cannot be made, belongs to another user than this one or root, or
            everybody may write to it; or there is neither TILELANG_CACHE_DIR nor a home.
    """
    try:
        root = cache_root()
    except RuntimeError as error:
        raise ValueError(
            f"kernel cache: this process has no home directory ({error}). Set TILELANG_CACHE_DIR "
            "to a folder of its own"
        ) from error
    subject = f"kernel cache {root} (TILELANG_CACHE_DIR, or ~/.tilelang/cache)"
    instead = "set TILELANG_CACHE_DIR to a folder of your own"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        raise ValueError(
            f"{subject} cannot be made: {error.filename}: {error.strerror}. Put that right, "
            f"or {instead}."
        ) from error
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{subject} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: whoever owns the folder decides what code a kernel is. Change its "
            f"owner, or {instead}."
        )
    if found.st_mode & stat.S_IWOTH:
        raise ValueError(
            f"{subject} has mode {stat.S_IMODE(found.st_mode):04o}: everybody can put code there, "
            f"which this process would load, and may have. Remove the folder, or {instead}."
        )
    return root


def source_digest() -> str:
    """Tells one text of the module, and the machines it runs on, from another."""
    return hashlib.sha256(
        f"{SOURCE}{platform.machine()}{version('apache-tvm-ffi')}".encode()
    ).hexdigest()[:12]


def build_native(path: Path) -> None:
    """Compile the module to a file, which appears complete or not at all.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed; the message holds its output.
    """
    asked = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if asked is None:
        raise RuntimeError(
            "there is no C++ compiler (c++ or g++ on the PATH, or CXX) to compile a part of every "
            "launch with"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".native-", dir=path.parent) as folder:
        source, module = Path(folder) / "native.cc", Path(folder) / "native.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [*shlex.split(asked), "-std=c++17", "-O2", "-shared", "-fPIC"]
        command += [f"-I{folder}" for folder in _include_folders()]
        command += ["-o", str(module), str(source), "-ldl"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"{asked}: the C++ compiler cannot be started: {error}") from None
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
        module.replace(path)


def _include_folders() -> set[str]:
    from tvm_ffi import libinfo

    return {str(libinfo.find_include_path()), str(libinfo.find_dlpack_include_path())}


def cached_native() -> Path:
    """The module in tilelang's cache folder, compiled if it is not there, another's or not whole.

    Raises:
        RuntimeError: as `build_native`.
        ValueError: as `private_cache`.
        OSError: the cache folder cannot be written.
    """
    path = private_cache() / "tl_megamoe" / f"native-{source_digest()}.so"
    checksum = path.with_suffix(".sha256")
    try:
        ours = path.stat().st_uid in (0, os.geteuid())
        if ours and checksum.read_text() == hashlib.sha256(path.read_bytes()).hexdigest():
            return path
    except (OSError, UnicodeDecodeError):
        pass  # not there yet, or half of it
    try:
        build_native(path)
        with tempfile.TemporaryDirectory(prefix=".native-", dir=path.parent) as folder:
            written = Path(folder) / checksum.name
            written.write_text(hashlib.sha256(path.read_bytes()).hexdigest(), encoding="utf-8")
            written.replace(checksum)
    except OSError as error:
        raise OSError(error.errno, f"{path} is not written: {error.strerror or error}") from error
    return path


@lru_cache(maxsize=1)
def native_module() -> Any:
    """The loaded module for kernels that are compiled here; None where there is no compiler."""
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(cached_native()))
    except (OSError, RuntimeError) as error:
        logger.info("launches take a microsecond or two more: %s", error)
        return None
