"""Compiled kernels in a folder, for processes that never compile: `tl-megamoe export` writes it.

A folder holds a TVM-FFI module a kernel (`<phase>-<digest>.so`), one with what every launch
needs besides (native.py), and `manifest.json`, which says what each of them is. To load them takes
tvm_ffi and the runtime library that tilelang ships; tilelang itself, its compiler and nvcc are not
touched. The folder serves the versions, the platform and the kernel code that it was made with;
others refuse it (manifest.py).

The modules hold native code that runs in the process: open only folders that you trust.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import native
from .kernel import CompiledKernel, KernelSpec
from .manifest import (
    COMMAND,
    FILE_NAME,
    MANIFEST,
    KernelFile,
    Manifest,
    ModuleFile,
    check_notes,
    command_of,
    file_name,
    is_export,
    kind_of,
    read_manifest,
    spec_values,
)
from .shared_experts import without_shared

if TYPE_CHECKING:
    from .quantize import QuantizeKernel, QuantizeSpec

LOOKS = 3
LOOK_AGAIN_S = 0.02
"""Where folders cannot be exchanged, one that is being replaced is not there for a moment."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of renameat2(2)."""
OnKernel = Callable[[int, int, str], None]
"""Called with a kernel's number, how many there are, and its file name."""


# ---- write


def export_kernels(
    out: Path | str,
    specs: Iterable[KernelSpec],
    quantize_specs: Iterable[QuantizeSpec] = (),
    notes: Mapping[str, Any] | None = None,
    *,
    on_kernel: OnKernel | None = None,
) -> Manifest:
    """Compile kernels, or take them from tilelang's cache, and write them to a folder.

    The folder appears as a whole when every kernel is there. It takes the place of an export that
    was there; processes that have loaded kernels of that one keep them.

    Args:
        out: the folder; there is none, or an empty one, or an export.
        specs: kernels of the layer; those that share a kernel are written once.
        quantize_specs: quantize kernels.
        notes: JSON values that the manifest shall hold; `command`, if given, is what errors tell to
            run again.
        on_kernel: called before each kernel.

    Returns:
        The manifest.

    Raises:
        ValueError: `out` is something else than the above.
        TypeError: `notes` hold a `num_shared` that is no integer.
        RuntimeError: nvcc failed, or the C++ compiler, of which there may be none; the message
            holds its output.
        OSError: the folder cannot be written; names it. What was there stays.
    """
    out = check_out(out)
    todo: dict[str, KernelSpec | QuantizeSpec] = {}
    wanted: list[KernelSpec | QuantizeSpec] = [*specs, *quantize_specs]
    for spec in wanted:
        todo.setdefault(file_name(kind_of(spec), spec_values(spec)), spec)
    check_notes(notes or {})
    try:
        return _export(out, todo, notes or {}, on_kernel)
    except OSError as error:
        text = (
            f"{out} is not written: {error.filename or 'its disk'}: {error.strerror or error}. "
            "What was there stays; free space or name another folder, and export again"
        )
        raise OSError(error.errno, text) from error


def _export(
    out: Path,
    todo: Mapping[str, KernelSpec | QuantizeSpec],
    notes: Mapping[str, Any],
    on_kernel: OnKernel | None,
) -> Manifest:
    """Compile kernels by file name, and put their folder in place."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        written = []
        for number, (name, spec) in enumerate(todo.items(), 1):
            if on_kernel is not None:
                on_kernel(number, len(todo), name)
            written.append(_write_kernel(folder / name, spec))
        helper = folder / f"native-{native.source_digest()}.so"
        native.build_native(helper)
        manifest = Manifest.of(written, ModuleFile.of(helper), notes)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        folder.chmod(0o755)
        _install(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest


def check_out(out: Path | str) -> Path:
    """The folder of an export as an absolute path.

    Raises:
        ValueError: it is a file, or holds anything that is not of an export.
    """
    out = Path(out).resolve()
    if not out.exists():
        return out
    if not out.is_dir():
        raise ValueError(f"{out} is a file: kernels are exported to a folder. Name another")
    found = sorted(path.name for path in out.iterdir())
    others = [name for name in found if name != MANIFEST and not FILE_NAME.fullmatch(name)]
    if found and (others or not is_export(out / MANIFEST)):
        raise ValueError(
            f"{out} holds {', '.join((others or found)[:3])} and is not a folder of exported "
            "kernels, which alone would be replaced. Name a new or an empty folder"
        )
    return out


def _write_kernel(path: Path, spec: KernelSpec | QuantizeSpec) -> KernelFile:
    """Compile a kernel, write its module, and see that the module has its function."""
    kernel = _compiled(spec)
    kernel.export_library(str(path))
    path.chmod(0o755)
    function = str(kernel.prim_func.attrs["global_symbol"])
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    written = KernelFile(kind_of(spec), spec_values(spec), function, path.name, digest, len(data))
    _load(path, function, digest)
    return written


def _compiled(spec: KernelSpec | QuantizeSpec) -> Any:
    """tilelang's object of a kernel."""
    if isinstance(spec, KernelSpec):
        from .kernel import compile_kernel

        return compile_kernel(spec).kernel
    from .quantize import compile_program

    return compile_program(spec)


def _install(folder: Path, out: Path) -> None:
    """Put a folder in the place of another, or of none; one writer at a time."""
    parent = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        if not out.exists() or not any(out.iterdir()):
            os.rename(folder, out)
            return
        if _exchange(folder, out):
            return  # the old folder has the name of the new one, which is removed
        # A name of its own: the old folder goes with whatever it holds, but only by a rename.
        aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        os.rename(out, aside)
        try:
            os.rename(folder, out)  # between the two there is no folder: `open` looks again
        except BaseException:
            os.rename(aside, out)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap names in one step; False where the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return not renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)


# ---- load


class ExportedKernel(CompiledKernel):
    """A kernel of an export: it launches like any other, and has no text.

    Attributes:
        binder: of the native module beside it (`native.BIND`).
        module: that it was loaded from.
        function: its name there.
    """

    def __init__(
        self, spec: KernelSpec, kernel: Any, binder: Callable[..., Any], module: Any, function: str
    ) -> None:
        super().__init__(spec, kernel)
        self.binder = binder
        self.module = module
        self.function = function

    def source(self) -> str:
        """Raise RuntimeError: an export holds no CUDA text."""
        raise RuntimeError(
            f"the kernel of {self.spec.schedule.name} was loaded from an export, which holds no "
            "CUDA text. tl_megamoe.kernel.compile_kernel(spec).source() compiles it and has it"
        )


class ExportedKernels:
    """The kernels of a folder that `tl-megamoe export` wrote. Loading one takes milliseconds.

    Attributes:
        folder: where they are.
        manifest: what they are.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._files = {file_name(k.kind, k.spec): k for k in manifest.kernels}

    @classmethod
    def open(cls, folder: Path | str) -> ExportedKernels:
        """Read the manifest; kernels are loaded when they are asked for.

        Raises:
            ValueError: not such a folder, or made with other versions, for another platform or
                from other kernel code; the message names the command that makes a new one.
        """
        folder = Path(folder).resolve()
        for _ in range(LOOKS - 1):
            if (folder / MANIFEST).exists():
                break
            time.sleep(LOOK_AGAIN_S)
        return cls(folder, read_manifest(folder))

    def fused(self, spec: KernelSpec) -> CompiledKernel:
        """The kernel of a spec, loaded.

        Raises:
            ValueError: the folder has no such kernel, or its file is damaged; the message says in
                what the nearest one differs, and names the command that exports it.
            RuntimeError: the file cannot be loaded into this process.
        """
        found, function, beside = self._function(spec)
        module = _load_module(self.folder / found.file, found.sha256)
        binder = beside.get_function(native.BIND)
        return ExportedKernel(spec, function, binder, module, found.function)

    def quantize(self, spec: QuantizeSpec) -> QuantizeKernel:
        """The quantize kernel of a spec, loaded.

        Raises:
            ValueError, RuntimeError: as `fused`.
        """
        from .quantize import QuantizeKernel

        return QuantizeKernel(spec, self._function(spec)[1])

    def _function(
        self, spec: KernelSpec | QuantizeSpec
    ) -> tuple[KernelFile, Callable[..., Any], Any]:
        """A kernel's file, its function, and the native module beside it."""
        values = spec_values(spec)
        found = self._files.get(file_name(kind_of(spec), values))
        if found is None:
            raise ValueError(self._missing(spec, values))
        helper = self.manifest.native
        beside = _load_module(self.folder / helper.file, helper.sha256)
        function = _load(self.folder / found.file, found.function, found.sha256, beside)
        return found, function, beside

    def _missing(self, spec: KernelSpec | QuantizeSpec, values: dict[str, Any]) -> str:
        """What to say of a kernel that is not there."""
        kind = kind_of(spec)
        wanted = _flat(values)
        others = [_flat(k.spec) for k in self.manifest.kernels if k.kind == kind]
        differing = [
            [name for name in wanted if other.get(name) != wanted[name]] for other in others
        ]
        names = min(differing, key=len, default=[])
        if not others:
            near = f"it has no {kind} kernel at all"
        else:
            nearest = others[differing.index(names)]
            near = "the nearest that it has differs in " + ", ".join(
                f"{name}={nearest.get(name)!r} (asked for {wanted[name]!r})" for name in names
            )
        name = f"{kind} kernel"
        if isinstance(spec, KernelSpec):
            name += f" {spec.schedule.name} for {spec.problem.name}"
        return (
            f"{self.folder} has no {name}, capacity {spec.capacity}: {near}. Write a folder that "
            f"has it with: {self._command(spec, names)}"
        )

    def _command(self, spec: KernelSpec | QuantizeSpec, differing: Collection[str]) -> str:
        """The command that exports a kernel, as far as its spec and the notes tell."""
        notes = self.manifest.notes
        if not isinstance(spec, KernelSpec):  # of two flags alike the last one counts
            changed = f"--capacity {spec.capacity} --num-shared {spec.num_shared}"
            return f"{command_of(notes, self.folder)} {changed}"
        shared = int(notes.get("num_shared") or 0)
        try:
            problem = without_shared(spec.problem, shared)
        except ValueError:  # not one of the layer that was exported
            problem, shared = spec.problem, 0
        mode = notes.get("rank_mode", "real") if problem.num_ranks > 1 else "one"
        flags = [problem.flags(), f"--capacity {spec.capacity}", f"--recipe {spec.recipe}"]
        if mode != "one":
            flags.append(f"--rank-mode {mode}")
        if "device" in notes:
            flags.append(f"--device {notes['device']}")
        if "schedule.num_sms" in differing:
            share = problem.num_ranks if mode == "virtual" else 1
            flags.append(f"--num-sms {spec.schedule.num_sms * share}")
        if shared:
            flags.append(f"--num-shared {shared}")
        if spec.clamp:
            flags.append("--clamp")
        if not spec.fast_math:
            flags.append("--precise")
        return f"{COMMAND} {' '.join(flags)} --out {self.folder}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names: `schedule.block_m`."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out.update(_flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


@lru_cache(maxsize=512)
def _load(path: Path, function: str, sha256: str, beside: Any = None) -> Callable[..., Any]:
    """A function of a kernel's module, loaded once a process; it keeps the module alive."""
    module = _load_module(path, sha256)
    try:
        if beside is not None:
            module.import_module(beside)
        loaded: Callable[..., Any] = module.get_function(function)
    except (AttributeError, RuntimeError) as error:
        raise RuntimeError(f"{path}: {_unloadable(path, error)}") from error
    return loaded


@lru_cache(maxsize=512)
def _load_module(path: Path, sha256: str) -> Any:
    """A module whose file is what the manifest says."""
    again = f"Export again: {COMMAND} --out {path.parent}"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: the kernel cannot be read: {error}. {again}") from error
    if found != sha256:
        raise ValueError(
            f"{path}: the kernel is damaged: its sha256 is {found[:12]}..., the manifest says "
            f"{sha256[:12]}.... {again}"
        )
    _load_runtime()
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"{path}: {_unloadable(path, error)}") from error


def _unloadable(path: Path, error: Exception) -> str:
    again = f"Export again: {COMMAND} --out {path.parent}"
    return f"the kernel cannot be loaded: {error}. {again}"


@lru_cache(maxsize=1)
def _load_runtime() -> ctypes.CDLL:
    """The library that launches kernels of a module, from tilelang's files: without tilelang."""
    import tvm_ffi  # noqa: F401 - the library needs its own

    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "tilelang is not installed: exported kernels need the libtvm_runtime.so that it ships. "
            "Install it with: pip install tilelang"
        )
    path = Path(spec.origin).parent / "lib" / "libtvm_runtime.so"
    try:
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(f"{path}: the runtime of exported kernels: {error}") from error
