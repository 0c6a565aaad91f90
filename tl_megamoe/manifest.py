"""What a folder of exported kernels holds: `manifest.json`, and whether it is of use here.

Kernels and the code that launches them must agree, on versions and on every offset in a buffer: a
kernel that does not would write where it should not. So a manifest says what its kernels were made
with, and any other is refused. Nothing here imports torch or tilelang.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .kernel import KernelSpec

if TYPE_CHECKING:
    from .quantize import QuantizeSpec

FORMAT = "tl_megamoe kernels"
"""What the manifest of every export says, whatever its schema."""
SCHEMA = 1
MANIFEST = "manifest.json"
QUANTIZE = "quantize"
"""Kind of the quantize kernels; that of the others is their phase."""
COMMAND = "tl-megamoe export"
FILE_NAME = re.compile(r"(fused|dispatch|linear1|linear2|combine|quantize|native)-[0-9a-f]{12}\.so")
"""The only names that are ever loaded or replaced."""
CODE = (
    *("device/*.py", "phases/*.py", "kernel.py", "layout.py", "problem.py", "program.py"),
    *(
        "native.py",
        "quantize.py",
        "recipe.py",
        "rules.py",
        "scaling.py",
        "schedule.py",
        "timeouts.py",
    ),
    *("shared_memory.py", "swizzle.py", "validity.py", "weights.py"),
)
"""Files of the package on which kernels and the code that launches them must agree."""


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """A module that the kernels' modules need.

    Attributes:
        file: its name in the folder.
        sha256: of the file.
        size: of the file, in bytes.
    """

    file: str
    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> ModuleFile:
        """What a file holds."""
        data = path.read_bytes()
        return cls(path.name, hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True, slots=True)
class KernelFile:
    """A kernel of an export.

    Attributes:
        kind: the phase of a `KernelSpec`, or `quantize`.
        spec: what the kernel depends on, as JSON values (`spec_values`).
        function: its name in the module.
        file: name of the module in the folder.
        sha256: of the file.
        size: of the file, in bytes.
    """

    kind: str
    spec: dict[str, Any]
    function: str
    file: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an export holds, and where it can be used.

    Attributes:
        kernels: the kernels.
        native: the module with the parts of a launch that are not a kernel's own (native.py).
        notes: what the maker wrote down: the layer, the capacity, which tokens run what.
        package, tilelang, tvm_ffi: versions that it was made with.
        platform: as `linux-x86_64`.
        code: digest of the kernel code (`code_digest`).
    """

    kernels: tuple[KernelFile, ...]
    native: ModuleFile
    notes: dict[str, Any]
    package: str
    tilelang: str
    tvm_ffi: str
    platform: str
    code: str
    format: str = FORMAT
    schema: int = SCHEMA

    @classmethod
    def of(
        cls, kernels: Iterable[KernelFile], native: ModuleFile, notes: Mapping[str, Any]
    ) -> Manifest:
        """The manifest of modules that this process has made."""
        values: dict[str, Any] = made_with()
        return cls(tuple(kernels), native, dict(notes), **values)

    @property
    def num_bytes(self) -> int:
        """Size of all modules."""
        return self.native.size + sum(kernel.size for kernel in self.kernels)

    def to_json(self) -> str:
        """The text of manifest.json."""
        values = asdict(self)
        order = ("format", "schema", *made_with(), "notes", "native", "kernels")
        return json.dumps({name: values[name] for name in order}, indent=1) + "\n"


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of the code on which an export and the process that loads it must agree."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()[:12]


def made_with() -> dict[str, str]:
    """What an export must have been made with to be of use in this process."""
    from . import __version__

    return {
        "package": __version__,
        "tilelang": _version("tilelang"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "platform": f"{sys.platform}-{platform.machine()}",
        "code": code_digest(),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def spec_values(spec: KernelSpec | QuantizeSpec) -> dict[str, Any]:
    """What a kernel depends on, as JSON values; a schedule's runtime fields do not count."""
    if not isinstance(spec, KernelSpec):
        return asdict(spec)
    return {
        "problem": spec.problem.key(),
        "schedule": spec.schedule.kernel_key().to_dict(),
        "recipe": str(spec.recipe),
        "capacity": spec.capacity,
        "clamp": spec.clamp,
        "fast_math": spec.fast_math,
        "debug": spec.debug,
        "profile": spec.profile,
    }


def kind_of(spec: KernelSpec | QuantizeSpec) -> str:
    """The kind of a spec's kernel."""
    return spec.phase if isinstance(spec, KernelSpec) else QUANTIZE


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an export, and refuse one that is of no use in this process.

    Raises:
        ValueError: there is none, it is damaged, or of another schema, version, platform or code.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"kernels={str(folder)!r} is not a folder of exported kernels: {path.name} cannot be "
            f"read: {error}. Write one with: {COMMAND} --out {folder}"
        ) from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not that of exported kernels. Write some with: {COMMAND}")
    again = f"Export again with what is installed here: {command_of(values.get('notes'), folder)}"
    if values.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: schema={values.get('schema')!r}, this tl_megamoe reads {SCHEMA}. {again}"
        )
    for name, wanted in made_with().items():
        if values.get(name) != wanted:
            raise ValueError(
                f"{path}: the kernels were made with {name}={values.get(name)!r}, here it is "
                f"{wanted!r}: they would not agree with this process. {again}"
            )
    try:
        kernels = tuple(KernelFile(**kernel) for kernel in values.pop("kernels"))
        manifest = Manifest(kernels, ModuleFile(**values.pop("native")), **values)
        files = [manifest.native.file, *(k.file for k in kernels)]
        wrong = [file for file in files if not FILE_NAME.fullmatch(file)]
        if not all(isinstance(v, dict) for v in (manifest.notes, *(k.spec for k in kernels))):
            raise TypeError("notes and specs must be objects")
        texts = [manifest.native.sha256, *(t for k in kernels for t in (k.sha256, k.function))]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("functions and sha256 must be texts")
        if not all(type(n) is int for n in (manifest.native.size, *(k.size for k in kernels))):
            raise TypeError("sizes must be integers")
        check_notes(manifest.notes)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a manifest of schema {SCHEMA}: {error}. {again}") from error
    if wrong:
        raise ValueError(f"{path}: {wrong[0]!r} is not the name of a module. {again}")
    return manifest


def check_notes(notes: Mapping[str, Any]) -> None:
    """Refuse what a reader of the manifest would.

    Raises:
        TypeError: `num_shared` is there and no integer.
    """
    if type(notes.get("num_shared", 0)) is not int:
        raise TypeError(f"notes.num_shared={notes['num_shared']!r} must be an integer")


def command_of(notes: Any, folder: Path) -> str:
    """The command that made an export, where its notes say so."""
    command = notes.get("command") if isinstance(notes, dict) else None
    return command if isinstance(command, str) else f"{COMMAND} --out {folder}"


def file_name(kind: str, values: dict[str, Any]) -> str:
    """The file of a kernel, which also tells it from all others."""
    text = json.dumps([kind, values], sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.so"


def is_export(path: Path) -> bool:
    """Whether a file is the manifest of an export, of any schema."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT
