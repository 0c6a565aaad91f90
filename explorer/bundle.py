"""Kernels that travel: one archive of compiled kernels and their reports.

`tl-megamoe build` compiles on any machine what a search needs and packs it; `search --cache`
unpacks it on a GPU machine, which then compiles nothing. An archive holds tilelang's own cache
entries: it serves the tilelang version, platform and kernel code that it was made with, no other.

An archive holds native code that runs when a kernel is launched: unpack only those that you trust.

Layout: `manifest.json` first, then `kernels/<tilelang's key>/<file>` and `reports/<key>.json`. A
kernel that no search launches (it spills, say) has its report alone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import lzma
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from tl_megamoe.frozen import device_key
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.native import private_cache
from tl_megamoe.problem import Problem

from .args import check_file
from .doctor import find_gpu
from .farm import (
    REPORTS,
    Farm,
    build_kernel,
    classify,
    describe_spec,
    kernel_digest,
    package_version,
)
from .files import reason_of, replaced_file
from .kernel_store import (
    DEVICE_TEXT,
    KernelStore,
    host_platform,
    is_whole,
    listed_files,
    namespace,
    sha256_of,
)
from .kernel_store import MANIFEST as ENTRY_MANIFEST

logger = logging.getLogger(__name__)

SCHEMA = 1
MANIFEST = "manifest.json"
"""First member of an archive."""
MEMBER = re.compile(r"kernels/[0-9a-f]{64}/[A-Za-z0-9_][\w.-]*|reports/[0-9a-f]{24}\.json")
"""The only names that are ever unpacked."""
SUFFIX = ".tar.xz"
MAX_MEMBER_BYTES = 64 << 20
"""Of a member, unpacked: the largest kernels have 1 MB."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an archive holds, and where it can be used.

    Attributes:
        kernel: `kernel_digest()` of the code that made the kernels.
        tilelang: its version.
        platform: as `linux-x86_64`, the word of tilelang's cache.
        problem: name and sizes of the layer; empty for loose kernels.
        specs: what was built (`farm.describe_spec`).
        files: sha256 of every other member.
    """

    kernel: str
    tilelang: str
    platform: str
    problem: dict[str, Any]
    specs: tuple[dict[str, Any], ...]
    files: dict[str, str]
    schema: int = SCHEMA

    @property
    def num_kernels(self) -> int:
        """Kernels with a report, those included that no search launches."""
        return len(self.specs)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


# ---- pack


def pack_kernels(specs: Iterable[KernelSpec], store: KernelStore | None = None) -> bytes:
    """Some kernels of a cache as an archive in memory, for `add_kernels` on another machine.

    Args:
        specs: kernels with a report; specs that share a kernel count once.
        store: where they are; the active cache when None.

    Raises:
        ValueError: a kernel is not in the cache, or its entry is damaged.
    """
    manifest, paths = _collect(specs, store or KernelStore(), None)
    file = io.BytesIO()
    _write(file, manifest, paths, preset=1)
    return file.getvalue()


def write_bundle(
    path: Path, specs: Iterable[KernelSpec], problem: Problem, store: KernelStore | None = None
) -> Manifest:
    """Write an archive of kernels; equal caches give equal bytes. Replaces the file as a whole.

    Args:
        path: the file, which ends in `.tar.xz`.
        specs: kernels with a report.
        problem: the layer, for the manifest.
        store: where they are; the active cache when None.

    Raises:
        ValueError: a kernel is not in the cache, or its entry is damaged.
        OSError: as `files.replaced_file`.
    """
    manifest, paths = _collect(specs, store or KernelStore(), problem)
    with replaced_file(path) as file:
        _write(file, manifest, paths, preset=6)
    return manifest


def _collect(
    specs: Iterable[KernelSpec], store: KernelStore, problem: Problem | None
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest of an archive, and the file of every member."""
    paths: dict[str, Path] = {}
    described: dict[str, dict[str, Any]] = {}
    for spec in specs:
        described[json.dumps(describe_spec(spec), sort_keys=True)] = describe_spec(spec)
        report = store.reports.get(spec)
        if report is None:
            raise ValueError(
                f"kernel {spec.phase} {spec.schedule.name} is not in {store.root}: it must be "
                "compiled before it is packed"
            )
        file = store.reports.path_of(spec)
        paths[f"reports/{file.name}"] = file
        if classify(spec, report).status != "ok":
            continue
        entries = store.entries_of(report.source_hash)
        if not entries:
            raise ValueError(
                f"kernel {spec.phase} {spec.schedule.name} has a report in {store.root} and no "
                f"entry in {store.folder}. Delete {file} and compile again; "
                "TILELANG_DISABLE_CACHE must not be set"
            )
        for entry in entries:
            if not is_whole(entry):
                raise ValueError(
                    f"cache entry {entry} is damaged. Delete it and {file}, and compile again"
                )
            for name in (ENTRY_MANIFEST, *listed_files(entry)):
                paths[f"kernels/{entry.name}/{name}"] = entry / name
    manifest = Manifest(
        kernel=kernel_digest(),
        tilelang=package_version("tilelang"),
        platform=host_platform(),
        problem={} if problem is None else {"name": problem.name, **problem.key()},
        specs=tuple(described[key] for key in sorted(described)),
        files={name: sha256_of(paths[name]) for name in sorted(paths)},
    )
    return manifest, paths


def _write(
    file: IO[bytes], manifest: Manifest, paths: dict[str, Path], preset: Literal[1, 6]
) -> None:
    """A tar without times and owners, so that its bytes depend on its contents only."""
    with tarfile.open(fileobj=file, mode="w:xz", preset=preset) as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = _mode(name)
            tar.addfile(member, io.BytesIO(data))

        add(MANIFEST, manifest.to_json().encode())
        for name in manifest.files:
            add(name, paths[name].read_bytes())


def _mode(name: str) -> int:
    return 0o755 if name.endswith(".so") else 0o644


# ---- unpack


def use_cache(path: Path) -> Manifest:
    """Unpack an archive into the cache that this process and its children use.

    Afterwards a farm with `prebuilt=True` finds its kernels. Call it before the first kernel is
    compiled or loaded: tilelang remembers what it has looked up.

    Raises:
        ValueError: as `unpack`, the file cannot be read, or tilelang's disk cache is switched off.
        OSError: the cache cannot be written.
    """
    check_file("--cache", path)
    if os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() in ("1", "true", "yes", "on"):
        raise ValueError(
            f"TILELANG_DISABLE_CACHE={os.environ['TILELANG_DISABLE_CACHE']}: tilelang would not "
            f"look at the kernels of {path}. Unset it"
        )
    return unpack(path, private_cache())


def unpack(path: Path, root: Path) -> Manifest:
    """Merge the kernels of an archive into a cache; an entry that is there and whole stays.

    Nothing is written to the cache before every member has been verified.

    Args:
        path: an archive of `write_bundle`.
        root: folder of tilelang's cache.

    Raises:
        ValueError: not such an archive, damaged, or made for another tilelang version, platform or
            kernel code.
        OSError: the file cannot be read, or the cache not written.
    """
    with path.open("rb") as file:
        return _unpack(file, str(path), root)


def add_kernels(data: bytes, root: Path | None = None) -> Manifest:
    """`unpack` for the bytes of `pack_kernels`; into the active cache when root is None."""
    return _unpack(io.BytesIO(data), "packed kernels", root or private_cache())


def _unpack(file: IO[bytes], subject: str, root: Path) -> Manifest:
    try:
        return _merge(file, subject, root)
    except OSError as error:
        text = (
            f"{root} does not take the kernels of {subject}: {reason_of(error, root)}. What was "
            "there stays; free space, or set TILELANG_CACHE_DIR to another folder, and run the "
            "same command again"
        )
        raise OSError(error.errno, text) from error


def _merge(file: IO[bytes], subject: str, root: Path) -> Manifest:
    staging = root / namespace() / ".staging"  # tilelang clears what a crash leaves there
    staging.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging) as name:
        folder = Path(name)
        try:
            with tarfile.open(fileobj=file, mode="r|xz") as tar:
                manifest = _extract(tar, folder, subject)
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{subject} is not a whole kernel archive: {error}") from error
        entries = sorted((folder / "kernels").iterdir()) if (folder / "kernels").is_dir() else []
        for entry in entries:
            if not is_whole(entry):
                raise ValueError(f"{subject}: kernel {entry.name} is damaged. Build it again")
        texts = {
            report: _source_hash(report, subject)
            for report in sorted((folder / "reports").glob("*.json"))
        }
        hashes = {entry: listed_files(entry)[DEVICE_TEXT][:16] for entry in entries}
        new = {hashes[entry] for entry in entries if _install(entry, root)}
        reports = root / REPORTS
        reports.mkdir(parents=True, exist_ok=True)
        for report, text in texts.items():
            # A report belongs to the kernel beside it: one that was there keeps its own.
            if not (reports / report.name).exists() or text in new:
                os.replace(report, reports / report.name)
    return manifest


def _extract(tar: tarfile.TarFile, folder: Path, subject: str) -> Manifest:
    """Write the members of an archive under a folder, each verified."""
    manifest: Manifest | None = None
    missing: set[str] = set()
    for member in tar:
        source = tar.extractfile(member) if member.isreg() else None
        if source is None:
            raise ValueError(f"{subject}: member {member.name!r} is not a plain file")
        if member.size > MAX_MEMBER_BYTES:
            raise ValueError(
                f"{subject}: member {member.name!r} has {member.size} bytes, and none has more "
                f"than {MAX_MEMBER_BYTES}. Build it again"
            )
        data = source.read()
        if manifest is None:
            if member.name != MANIFEST:
                raise ValueError(f"{subject} is not a kernel archive: {MANIFEST} must come first")
            manifest = _read_manifest(data, subject)
            missing = set(manifest.files)
            continue
        if not MEMBER.fullmatch(member.name) or member.name not in missing:
            raise ValueError(f"{subject}: member {member.name!r} is not one that it may hold")
        if hashlib.sha256(data).hexdigest() != manifest.files[member.name]:
            raise ValueError(f"{subject}: member {member.name!r} is damaged. Build it again")
        missing.remove(member.name)
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(_mode(member.name))
    if manifest is None or missing:
        raise ValueError(f"{subject} is not whole: {len(missing)} files are missing")
    return manifest


def _read_manifest(data: bytes, subject: str) -> Manifest:
    """Parse the manifest of an archive and refuse one that is of no use here."""
    try:
        values = dict(json.loads(data))
        schema = values.get("schema")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{subject}: its {MANIFEST} cannot be read: {error}") from error
    again = "or build it again with what is installed here: tl-megamoe build"
    if schema != SCHEMA:
        raise ValueError(
            f"{subject} has schema {schema!r}, this tl_megamoe reads {SCHEMA}. Unpack it with the "
            f"tl_megamoe that made it, {again}"
        )
    try:
        manifest = Manifest(
            **{**values, "specs": tuple(values["specs"]), "files": dict(values["files"])}
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{subject}: its {MANIFEST} is not one of schema 1: {error}") from error
    here = package_version("tilelang")
    if manifest.tilelang != here:
        raise ValueError(
            f"{subject} holds kernels of tilelang {manifest.tilelang}, and {here or 'none'} is "
            f"installed, which would not find them. Install tilelang=={manifest.tilelang}, {again}"
        )
    if manifest.platform != host_platform():
        raise ValueError(
            f"{subject} holds kernels for {manifest.platform}, this machine is {host_platform()}. "
            f"Use it on such a machine, {again}"
        )
    if manifest.kernel != kernel_digest():
        raise ValueError(
            f"{subject} holds kernels of the kernel code {manifest.kernel}, and {kernel_digest()} "
            f"is installed. Install the tl_megamoe that made it, {again}"
        )
    return manifest


def _install(entry: Path, root: Path) -> bool:
    """Move an entry into tilelang's cache; false if a whole one is there."""
    target = root / namespace() / "kernels" / entry.name
    if target.is_dir():
        if is_whole(target):
            return False
        logger.warning("cache entry %s is damaged and is replaced", target)
        # Renamed first: another process that replaces it too never finds a part of it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, entry.with_name(f"{entry.name}.damaged"))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(entry, target)
    except OSError:
        if not is_whole(target):  # else another process was first
            raise
        return False
    return True


def _source_hash(report: Path, subject: str) -> str:
    try:
        return str(json.loads(report.read_text(encoding="utf-8"))["report"]["source_hash"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{subject}: report {report.name} is damaged. Build it again") from error


# ---- tl-megamoe build


def add_parser(add: Callable[..., Any]) -> None:
    """Declare the command."""
    from .search_command import add_search_flags

    parser = add("build", run, "Compile what a search needs, and pack it for a GPU machine.")
    add_search_flags(parser)
    parser.add_argument(
        "--device",
        help="as nvidia-h200: its frozen schedules are built too (this machine's GPU, if any)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=f"the archive, as name{SUFFIX}"
    )


def run(args: argparse.Namespace) -> int:
    """The command."""
    from .search import build_cells, plan_cells
    from .search_command import options_of

    _check_out(args.out)
    options = options_of(args)
    device = args.device or find_gpu()
    farm = Farm(build_kernel, jobs=args.jobs, timeout_s=args.timeout)
    cells = plan_cells(options, device and device_key(device))
    statuses = build_cells(options, cells, farm)
    built = [spec for spec, result in farm.results.items() if result.report is not None]
    found = ", ".join(f"{count} {status}" for status, count in statuses.items())
    if not built:
        reason = next((r.reason for r in farm.results.values() if r.reason), "")
        print(f"tl-megamoe: no kernel was built ({found}). {reason}", file=sys.stderr)
        return 1
    manifest = write_bundle(args.out, built, options.problem)
    size = args.out.stat().st_size / 2**20
    print(f"{args.out}: {manifest.num_kernels} kernels ({found}), {size:.1f} MiB")
    return 0


def _check_out(out: Path) -> None:
    """Fail on a bad name now and not after minutes of compiling."""
    if not out.name.endswith(SUFFIX):
        raise ValueError(f"--out {out} must end in {SUFFIX}")
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {out}: its folder must be one that can be written: {error.strerror}"
        ) from error
