"""Compile candidates in parallel processes, on any machine, and keep what ptxas said.

A report on disk beside tilelang's kernel cache stands for a finished compile: a GPU machine that is
handed both compiles nothing.

A compile that the machine may have spoilt (its process was killed, or it ran out of time beside
others) is tried once more, alone, after all others; only the second try counts.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import logging
import os
import queue
import re
import threading
import tokenize
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tl_megamoe
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.manifest import spec_values
from tl_megamoe.native import private_cache

from .child import Child, ChildDied, ChildError, ChildTimeout
from .duplicates import launch_key as launch_key
from .files import write_atomically

logger = logging.getLogger(__name__)

KERNEL_SOURCES = (
    "device/*.py",
    "phases/__init__.py",
    "phases/combine.py",
    "phases/dispatch.py",
    "phases/gather.py",
    "phases/linear1.py",
    "phases/linear1_swapped.py",
    "phases/linear2.py",
    "phases/linear2_swapped.py",
    "kernel.py",
    "layout.py",
    "problem.py",
    "program.py",
    "recipe.py",
    "scaling.py",
    "schedule.py",
    "shared_memory.py",
    "validity.py",
)
"""Files of the package that decide what the fused kernel and its phases alone are; the kernel that
quantises a model's activations (phases/quantize.py) is neither."""

REPORTS = "tl_megamoe/reports"
"""Folder of the reports within tilelang's cache."""

NOT_BUILT = "not_built"
"""Status of a kernel that was asked for prebuilt and is not there; never written to a table."""

OUT_OF_MEMORY = re.compile(
    r"MemoryError|\bKilled\b|signal 9\b|[Cc]annot allocate memory|[Oo]ut of memory"
    r"|exit (?:code|status) (?:-9|137)\b"
)
"""What compilers and Python say when the machine, not the kernel, is at fault."""

Build = Callable[[KernelSpec], KernelReport]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Outcome of a compile.

    Attributes:
        status: `ok`, `compile_error`, `spilled`, `no_wgmma`, `serialized_wgmma`, `timeout`, or
            `NOT_BUILT`.
        report: what ptxas said; None when there is no kernel.
        reason: why the status is not ok, and whether it took a second try.
    """

    status: str
    report: KernelReport | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a compile; `transient` when the machine may be at fault and not the kernel."""

    spec: KernelSpec
    result: BuildResult
    transient: bool = False


def build_kernel(spec: KernelSpec) -> KernelReport:
    """Compile into tilelang's disk cache, and inspect."""
    from tl_megamoe.kernel import inspect_kernel

    quiet_tilelang()
    return inspect_kernel(spec)


def quiet_tilelang() -> None:
    """Import tilelang, and keep its progress lines out of the progress bar.

    Raises:
        ValueError: as `native.private_cache`.
    """
    private_cache()
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
    """Digest of the code that decides what a kernel is, and of tilelang's version.

    Comments, docstrings and blank lines do not count: a text without them makes the same kernels.
    """
    root = Path(str(tl_megamoe.__file__)).parent
    digest = hashlib.sha256(package_version("tilelang").encode())
    for pattern in KERNEL_SOURCES:
        for path in sorted(root.glob(pattern)):
            code = code_of(path.read_text(encoding="utf-8"))
            digest.update(f"{path.relative_to(root).as_posix()}\n{code}".encode())
    return digest.hexdigest()[:12]


def code_of(text: str) -> str:
    """Python text without comments, docstrings and blank lines.

    Cut from the text by place, not printed from its tree: every Python version cuts the same. What
    stands inside other strings stays as it is: it may be CUDA.
    """
    lines = text.split("\n")
    cuts: list[tuple[int, int, int | None]] = []  # row, first and last column
    inside: set[int] = set()  # rows that end within a string
    open_rows: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, row = tokenize.tok_name[token.type], token.start[0] - 1
        if kind == "COMMENT":
            cuts.append((row, token.start[1], None))
        elif kind == "STRING":
            inside.update(range(row, token.end[0] - 1))
        elif kind in ("FSTRING_START", "TSTRING_START"):  # a plain STRING before Python 3.12
            open_rows.append(row)
        elif kind in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(open_rows.pop(), token.end[0] - 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
                start = _column(lines[first], node.col_offset)
                end = _column(lines[last], node.end_col_offset or 0)
                for row in range(first, last + 1):
                    cuts.append((row, start if row == first else 0, end if row == last else None))
                inside -= set(range(first, last))
    for row, start, stop in sorted(cuts, key=lambda cut: cut[:2], reverse=True):
        lines[row] = lines[row][:start] + ("" if stop is None else lines[row][stop:])
    return "\n".join(
        line if row in inside else line.rstrip()
        for row, line in enumerate(lines)
        if row in inside or line.strip()
    )


def _column(line: str, offset: int) -> int:
    """Characters before a place that ast gives in bytes."""
    return len(line.encode()[:offset].decode())


@lru_cache(maxsize=16)
def package_version(name: str) -> str:
    """Installed version of a distribution, empty if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class ReportCache:
    """KernelReports on disk, a JSON file for each kernel.

    Args:
        root: a folder; None means `REPORTS` in `private_cache()`, which may raise ValueError.
    """

    def __init__(self, root: Path | None = None):
        self.root = root or private_cache() / REPORTS

    def path_of(self, spec: KernelSpec) -> Path:
        """The file of a kernel's report, whether it is there or not."""
        key = json.dumps([kernel_digest(), describe_spec(spec)], sort_keys=True)
        return self.root / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def get(self, spec: KernelSpec) -> KernelReport | None:
        """The report of a kernel built before from the same sources; None if there is none."""
        path = self.path_of(spec)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            values = dict(data["report"])
            return KernelReport(**{**values, "warnings": tuple(values["warnings"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("report %s: %s; the kernel is compiled again", path, error)
            return None

    def put(self, spec: KernelSpec, report: KernelReport) -> None:
        """Keep a report."""
        data = {"spec": describe_spec(spec), "report": asdict(report)}
        write_atomically(self.path_of(spec), json.dumps(data, indent=1) + "\n")


def describe_spec(spec: KernelSpec) -> dict[str, Any]:
    """What a kernel depends on, as JSON values; the schedule's runtime fields do not count."""
    return {"phase": spec.phase, **spec_values(spec)}


class _Builder:
    """What a compile process serves."""

    def __init__(self, build: Build):
        self.build = build

    def run(self, spec: KernelSpec) -> KernelReport:
        return self.build(spec)


class _Nursery:
    """The compile processes of a run; none starts once they have been killed."""

    def __init__(self, build: Build):
        self.closed = False
        self._build = build
        self._children: set[Child] = set()
        self._lock = threading.Lock()

    def start(self) -> Child:
        with self._lock:
            if self.closed:
                raise RuntimeError("the run has ended")
            child = Child(_Builder, (self._build,))
            self._children.add(child)
            return child

    def forget(self, child: Child) -> None:
        with self._lock:
            self._children.discard(child)

    def kill(self) -> None:
        with self._lock:
            self.closed = True
            children = list(self._children)
        for child in children:
            child.end()


def after_retry(first: BuildResult, second: BuildResult) -> BuildResult:
    """The outcome of a kernel that was compiled twice: the second, with both reasons."""
    tried = f"compiled a second time, alone; the first time: {first.reason}"
    return replace(second, reason=f"{second.reason}; {tried}" if second.reason else tried)


class Farm:
    """Compile processes and the report cache.

    Args:
        build: compiles a spec in a spawned process; a top-level function.
        jobs: processes; the number of CPUs when None.
        timeout_s: bound of one compile, after which its process is killed.
        cache: where reports are kept.
        prebuilt: never compile; a kernel without a report is `NOT_BUILT`.

    Attributes:
        results: the outcome of every kernel of all runs, by `KernelSpec.key()`.
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
        self.results: dict[KernelSpec, BuildResult] = {}

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

        def done(spec: KernelSpec, result: BuildResult, built: bool = True) -> None:
            if built and result.report is not None:
                self.cache.put(spec, result.report)
            results[spec.key()] = self.results[spec.key()] = result
            if on_done is not None:
                on_done(spec.key(), result)

        for spec in {spec.key(): spec for spec in specs}.values():
            report = self.cache.get(spec)
            if report is not None:
                done(spec, classify(spec, report), built=False)
            elif self.prebuilt:
                done(spec, BuildResult(NOT_BUILT), built=False)
            else:
                todo.append(spec)
        doubtful: dict[KernelSpec, BuildResult] = {}
        # Closed here, so that no process outlives this call, whatever ends it.
        with closing(self._attempts(todo, self.jobs)) as attempts:
            for first in attempts:
                if first.transient:
                    doubtful[first.spec] = first.result
                else:
                    done(first.spec, first.result)
        with closing(self._attempts(list(doubtful), 1)) as attempts:
            for second in attempts:
                done(second.spec, after_retry(doubtful[second.spec], second.result))
        return results

    def try_once(self, specs: list[KernelSpec]) -> list[Attempt]:
        """Compile specs with no second try, as a node of a cluster does for its driver."""
        with closing(self._attempts(specs, self.jobs)) as attempts:
            found = list(attempts)
        for attempt in found:
            if attempt.result.report is not None:
                self.cache.put(attempt.spec, attempt.result.report)
        return found

    def _attempts(self, specs: list[KernelSpec], jobs: int) -> Generator[Attempt, None, None]:
        """Try every spec once, `jobs` at a time, and yield the attempts as they finish."""
        todo: queue.SimpleQueue[KernelSpec] = queue.SimpleQueue()
        finished: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
        for spec in specs:
            todo.put(spec)
        nursery = _Nursery(self.build)

        def work() -> None:
            child: Child | None = None
            while not nursery.closed:
                try:
                    spec = todo.get_nowait()
                except queue.Empty:
                    break
                try:
                    child = child or nursery.start()
                    attempt, lives = self._try(child, spec)
                except Exception as error:  # a spec is answered whatever happens to its thread
                    reason = f"{type(error).__name__}: {error}"
                    lives = child is not None
                    attempt = Attempt(spec, BuildResult("compile_error", None, reason), not lives)
                if child is not None and not lives:
                    nursery.forget(child)
                    child = None
                finished.put(attempt)
            if child is not None:
                child.close()
                nursery.forget(child)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(specs)))]
        try:
            for thread in threads:
                thread.start()
            for _ in specs:
                yield self._next(finished, threads)
        finally:
            nursery.kill()
            for thread in threads:
                if thread.ident is not None:  # it was started
                    thread.join(10.0)

    @staticmethod
    def _next(finished: queue.SimpleQueue[Attempt], threads: list[threading.Thread]) -> Attempt:
        while True:
            alive = any(thread.is_alive() for thread in threads)
            try:
                return finished.get(timeout=0.5)  # bounded: Ctrl-C is seen between two
            except queue.Empty:
                if not alive:
                    raise RuntimeError("the compile threads ended early") from None

    def _try(self, child: Child, spec: KernelSpec) -> tuple[Attempt, bool]:
        """Compile in a process, and say whether the process lives."""
        try:
            report = child.call("run", spec, timeout_s=self.timeout_s)
            return Attempt(spec, classify(spec, report)), True
        except ChildTimeout:
            reason = f"compiling took over {self.timeout_s:g} s"
            return Attempt(spec, BuildResult("timeout", None, reason), True), False
        except ChildDied as error:
            reason = f"the compiler crashed: {error}"
            return Attempt(spec, BuildResult("compile_error", None, reason), True), False
        except ChildError as error:
            reason = f"{error.kind}: {error}"[-1500:]
            transient = OUT_OF_MEMORY.search(reason) is not None
            return Attempt(spec, BuildResult("compile_error", None, reason), transient), True
