"""Compile candidates in parallel processes, on any machine, and keep what ptxas said.

A report on disk beside tilelang's kernel cache stands for a finished compile: a GPU machine that is
handed both compiles nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tl_megamoe
from tl_megamoe.kernel import KernelReport, KernelSpec

from .child import Child, ChildDied, ChildError, ChildTimeout
from .table import write_atomically

logger = logging.getLogger(__name__)

KERNEL_SOURCES = (
    "device/*.py",
    "phases/*.py",
    "kernel.py",
    "layout.py",
    "problem.py",
    "program.py",
    "recipe.py",
    "scaling.py",
    "schedule.py",
)
"""Files of the package that decide what a kernel is."""

NOT_BUILT = "not_built"
"""Status of a kernel that was asked for prebuilt and is not there; never written to a table."""

Build = Callable[[KernelSpec], KernelReport]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Outcome of a compile.

    Attributes:
        status: `ok`, `compile_error`, `spilled`, `no_wgmma`, `serialized_wgmma`, `timeout`, or
            `NOT_BUILT`.
        report: what ptxas said; None when there is no kernel.
        reason: why the status is not ok.
    """

    status: str
    report: KernelReport | None = None
    reason: str = ""


def build_kernel(spec: KernelSpec) -> KernelReport:
    """Compile into tilelang's disk cache, and inspect."""
    from tl_megamoe.kernel import inspect_kernel

    quiet_tilelang()
    return inspect_kernel(spec)


def quiet_tilelang() -> None:
    """Keep tilelang's progress lines out of the progress bar."""
    import tilelang  # noqa: F401 - sets its log level when imported

    logging.getLogger("tilelang").setLevel(logging.WARNING)


def classify(spec: KernelSpec, report: KernelReport) -> BuildResult:
    """Accept a kernel, or say which rule of a fast one it breaks."""
    if report.spill_bytes:
        return BuildResult("spilled", report, f"{report.spill_bytes} bytes of register spills")
    if report.serialised:
        codes = ", ".join(report.warnings)
        return BuildResult("serialized_wgmma", report, f"ptxas serialised WGMMA: {codes}")
    if spec.phase not in ("dispatch", "combine") and not report.num_wgmma:
        return BuildResult("no_wgmma", report, "the kernel holds no WGMMA instruction")
    return BuildResult("ok", report)


@lru_cache(maxsize=1)
def kernel_digest() -> str:
    """Digest of the sources that decide what a kernel is, and of tilelang's version."""
    root = Path(str(tl_megamoe.__file__)).parent
    digest = hashlib.sha256(package_version("tilelang").encode())
    for pattern in KERNEL_SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def package_version(name: str) -> str:
    """Installed version of a distribution, empty if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class ReportCache:
    """KernelReports on disk, a JSON file for each kernel.

    Args:
        root: a folder; None means tl_megamoe/reports in tilelang's cache (TILELANG_CACHE_DIR, or
            ~/.tilelang/cache).
    """

    def __init__(self, root: Path | None = None):
        if root is None:
            home = Path.home() / ".tilelang" / "cache"
            root = Path(os.environ.get("TILELANG_CACHE_DIR") or home) / "tl_megamoe" / "reports"
        self.root = root

    def _path(self, spec: KernelSpec) -> Path:
        key = json.dumps([kernel_digest(), describe_spec(spec)], sort_keys=True)
        return self.root / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def get(self, spec: KernelSpec) -> KernelReport | None:
        """The report of a kernel built before from the same sources; None if there is none."""
        path = self._path(spec)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            values = dict(data["report"])
            return KernelReport(**{**values, "warnings": tuple(values["warnings"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("report %s: %s; the kernel is compiled again", path, error)
            return None

    def put(self, spec: KernelSpec, report: KernelReport) -> None:
        """Keep a report."""
        data = {"spec": describe_spec(spec), "report": asdict(report)}
        write_atomically(self._path(spec), json.dumps(data, indent=1) + "\n")


def describe_spec(spec: KernelSpec) -> dict[str, Any]:
    """What a kernel depends on, as JSON values; the schedule's runtime fields do not count."""
    return {
        "phase": spec.phase,
        "problem": spec.problem.key(),
        "schedule": spec.schedule.kernel_key().to_dict(),
        "recipe": str(spec.recipe),
        "capacity": spec.capacity,
        "clamp": spec.clamp,
        "fast_math": spec.fast_math,
        "debug": spec.debug,
    }


class _Builder:
    """What a compile process serves."""

    def __init__(self, build: Build):
        self.build = build

    def run(self, spec: KernelSpec) -> KernelReport:
        return self.build(spec)


class Farm:
    """Compile processes and the report cache.

    Args:
        build: compiles a spec in a spawned process; a top-level function.
        jobs: processes; the number of CPUs when None.
        timeout_s: bound of one compile, after which its process is killed.
        cache: where reports are kept.
        prebuilt: never compile; a kernel without a report is `NOT_BUILT`.
    """

    def __init__(
        self,
        build: Build = build_kernel,
        *,
        jobs: int | None = None,
        timeout_s: float = 180.0,
        cache: ReportCache | None = None,
        prebuilt: bool = False,
    ):
        self.build = build
        self.jobs = max(1, jobs or os.cpu_count() or 1)
        self.timeout_s = timeout_s
        self.cache = cache or ReportCache()
        self.prebuilt = prebuilt

    def run(
        self,
        specs: Sequence[KernelSpec],
        on_done: Callable[[KernelSpec, BuildResult], None] | None = None,
    ) -> dict[KernelSpec, BuildResult]:
        """Build every kernel once.

        Args:
            specs: what to build; those of one `KernelSpec.key()` share a compile.
            on_done: called in this thread for every distinct kernel, with its key.

        Returns:
            The outcome of each kernel, by `KernelSpec.key()`.
        """
        results: dict[KernelSpec, BuildResult] = {}
        todo: list[KernelSpec] = []

        def done(key: KernelSpec, result: BuildResult) -> None:
            results[key] = result
            if on_done is not None:
                on_done(key, result)

        for spec in {spec.key(): spec for spec in specs}.values():
            report = self.cache.get(spec)
            if report is not None:
                done(spec.key(), classify(spec, report))
            elif self.prebuilt:
                done(spec.key(), BuildResult(NOT_BUILT))
            else:
                todo.append(spec)
        for spec, result in self._compile(todo):
            if result.report is not None:
                self.cache.put(spec, result.report)
            done(spec.key(), result)
        return results

    def _compile(self, specs: list[KernelSpec]) -> Iterator[tuple[KernelSpec, BuildResult]]:
        """Yield (spec, result) as they finish."""
        todo: queue.SimpleQueue[KernelSpec] = queue.SimpleQueue()
        finished: queue.SimpleQueue[tuple[KernelSpec, BuildResult]] = queue.SimpleQueue()
        for spec in specs:
            todo.put(spec)
        children: set[Child] = set()
        stop = threading.Event()

        def work() -> None:
            child: Child | None = None
            while not stop.is_set():
                try:
                    spec = todo.get_nowait()
                except queue.Empty:
                    break
                result: BuildResult | None
                try:
                    if child is None:
                        child = Child(_Builder, (self.build,))
                        children.add(child)
                    result = self._build_one(child, spec)
                except Exception as error:  # a spec is answered whatever happens to its thread
                    result = BuildResult("compile_error", None, f"{type(error).__name__}: {error}")
                if result is None or result.status == "timeout":
                    if child is not None:
                        children.discard(child)
                    child = None
                    result = result or BuildResult("compile_error", None, "the compiler crashed")
                finished.put((spec, result))
            if child is not None:
                child.close()

        threads = [
            threading.Thread(target=work, daemon=True) for _ in range(min(self.jobs, len(specs)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in specs:
                yield self._next(finished, threads)
        finally:
            stop.set()
            for child in list(children):
                child.kill()

    @staticmethod
    def _next(
        finished: queue.SimpleQueue[tuple[KernelSpec, BuildResult]], threads: list[threading.Thread]
    ) -> tuple[KernelSpec, BuildResult]:
        while True:
            alive = any(thread.is_alive() for thread in threads)
            try:
                return finished.get(timeout=0.5)  # bounded: Ctrl-C is seen between two
            except queue.Empty:
                if not alive:
                    raise RuntimeError("the compile threads ended early") from None

    def _build_one(self, child: Child, spec: KernelSpec) -> BuildResult | None:
        """None when the compile process died."""
        try:
            return classify(spec, child.call("run", spec, timeout_s=self.timeout_s))
        except ChildTimeout:
            return BuildResult("timeout", None, f"compiling took over {self.timeout_s:g} s")
        except ChildError as error:
            return BuildResult("compile_error", None, f"{error.kind}: {error}"[-1500:])
        except ChildDied as error:
            logger.warning("compile of %s: %s", spec.schedule.name, error)
            return None
