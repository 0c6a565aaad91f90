"""Whatever ends a command or fills its disk, nothing is lost and nothing is half-written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_cache import EVERY_KERNEL, SMALL, build
from fake_modules import FakeCompiler, build_module
from fake_rows import BASE, DEVICE, VIEW, confirm_rows
from faults import copy_of, forked, killed_at, limited, on_disk
from gpu_cases import SMALL as SMALL_LAYER
from gpu_cases import fit

from tl_megamoe import native
from tl_megamoe.explorer.bundle import unpack, write_bundle
from tl_megamoe.explorer.farm import ReportCache
from tl_megamoe.explorer.freeze import plan_freeze, write_freeze
from tl_megamoe.explorer.kernel_store import KernelStore, is_whole, namespace
from tl_megamoe.explorer.page import write_page
from tl_megamoe.explorer.schema import SUMMARY_COLUMNS, parse
from tl_megamoe.explorer.table import append_rows, table_path
from tl_megamoe.explorer.trace import write_chrome_trace
from tl_megamoe.exported import ExportedKernels, export_kernels
from tl_megamoe.frozen import read_frozen
from tl_megamoe.kernel import KernelReport, KernelSpec
from tl_megamoe.schedule import Schedule

FAST = Schedule(experts_per_wave=32, stages=3)
PAGE = ("report.html", "report.md")
EXPORTED = [
    KernelSpec(problem=SMALL_LAYER, schedule=fit(SMALL_LAYER), capacity=n) for n in (64, 128)
]


class Writer(NamedTuple):
    """Something that writes files.

    Attributes:
        make: fills a folder with what is there before.
        work: writes in such a folder, once more when it was cut short.
        look: raises AssertionError unless each thing is the old one or the new one, whole.
        least: places where a kill finds it, at least.
    """

    make: Callable[[Path], object]
    work: Callable[[Path], object]
    look: Callable[[Path], object]
    least: int


# ---- freeze, report


def make_tables(folder: Path) -> None:
    path = table_path(folder / "results", DEVICE, VIEW.name)
    append_rows(path, confirm_rows(16, {BASE: 200.0, FAST: 300.0}))
    freeze(folder)
    append_rows(path, confirm_rows(16, {BASE: 200.0, FAST: 150.0}, run="second"))


def freeze(folder: Path) -> None:
    write_freeze(plan_freeze(VIEW, DEVICE, folder / "results", folder / "schedules"))


def look_at_frozen(folder: Path) -> None:
    entries = read_frozen(folder / "schedules" / DEVICE / f"{VIEW.name}.json").entries
    assert [entry.schedule for entry in entries] in ([BASE], [FAST])
    summary = folder / "results" / DEVICE / "summary.csv"
    held = parse(summary.read_text(), summary, SUMMARY_COLUMNS)["candidate"].tolist()
    assert held in ([BASE.name], [FAST.name])


def make_page(folder: Path) -> None:
    make_tables(folder)
    for name in PAGE:
        (folder / "results" / DEVICE / name).write_text("old")


def page(folder: Path) -> None:
    write_page(folder / "results" / DEVICE, folder / "schedules", draw=False)


def look_at_page(folder: Path) -> None:
    html, markdown = ((folder / "results" / DEVICE / name).read_text() for name in PAGE)
    assert html == "old" or html.endswith("</html>\n")
    assert markdown == "old" or markdown.startswith("# tl_megamoe results: ")


# ---- kernels


def make_cache(folder: Path) -> None:
    store = KernelStore(folder / "cache")
    for wanted in EVERY_KERNEL:
        store.reports.put(wanted, build(wanted, folder / "cache"))


def pack(folder: Path) -> None:
    write_bundle(folder / "k.tar.xz", EVERY_KERNEL, SMALL, KernelStore(folder / "cache"))


def look_at_archive(folder: Path) -> None:
    if (folder / "k.tar.xz").exists():
        assert unpack(folder / "k.tar.xz", folder / "other").num_kernels == len(EVERY_KERNEL)
        shutil.rmtree(folder / "other")


def make_archive(folder: Path) -> None:
    make_cache(folder)
    pack(folder)
    damaged = next((folder / "cache" / namespace() / "kernels").iterdir())
    shutil.copytree(damaged, folder / "new" / damaged.relative_to(folder / "cache"))
    (folder / "new" / damaged.relative_to(folder / "cache") / "executable.so").write_text("half")


def merge(folder: Path) -> None:
    unpack(folder / "k.tar.xz", folder / "new")


def look_at_cache(folder: Path) -> None:
    """Kernels are whole, or the damaged one that was there, and a report has its kernel."""
    store = KernelStore(folder / "new")
    entries = list(store.folder.iterdir())
    assert sum(not is_whole(entry) for entry in entries) <= 1
    for wanted in EVERY_KERNEL:
        report = store.reports.get(wanted)
        assert report is None or all(map(is_whole, store.entries_of(report.source_hash)))


def put_report(folder: Path) -> None:
    report = KernelReport(168, 0, 200_000, 8, (), "0123456789abcdef")
    ReportCache(folder / "reports").put(EVERY_KERNEL[0], report)


def look_at_report(folder: Path) -> None:
    assert all(json.loads(p.read_text()) for p in (folder / "reports").glob("*.json"))


def export(folder: Path, specs: list[KernelSpec]) -> None:
    export_kernels(folder / "k", specs)


def look_at_export(folder: Path) -> None:
    kernels = ExportedKernels.open(folder / "k")
    assert {k.spec["capacity"] for k in kernels.manifest.kernels} in ({64}, {64, 128})
    for file in (kernels.manifest.native, *kernels.manifest.kernels):
        data = (folder / "k" / file.file).read_bytes()
        assert hashlib.sha256(data).hexdigest() == file.sha256


def look_at_native(folder: Path) -> None:
    found = sorted((folder / "cache" / "tl_megamoe").glob("native-*.sha256"))
    for checksum in found:
        data = checksum.with_suffix(".so").read_bytes()
        assert checksum.read_text() == hashlib.sha256(data).hexdigest()


def look_at_trace(folder: Path) -> None:
    assert json.loads((folder / "t.json").read_text()) in ({"old": 1}, {"events": [5] * 999})


WRITERS = {
    "freeze": Writer(make_tables, freeze, look_at_frozen, 6),
    "report": Writer(make_page, page, look_at_page, 6),
    "build": Writer(make_cache, pack, look_at_archive, 3),
    "search --cache": Writer(make_archive, merge, look_at_cache, 12),
    "compile report": Writer(lambda folder: None, put_report, look_at_report, 3),
    "export": Writer(
        lambda folder: export(folder, EXPORTED[:1]),
        lambda folder: export(folder, EXPORTED),
        look_at_export,
        10,
    ),
    "native module": Writer(
        lambda folder: (folder / "cache").mkdir(),
        lambda folder: native.cached_native(),
        look_at_native,
        5,
    ),
    "trace": Writer(
        lambda folder: (folder / "t.json").write_text('{"old": 1}'),
        lambda folder: write_chrome_trace(folder / "t.json", {"events": [5] * 999}),
        look_at_trace,
        3,
    ),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_module(tmp_path_factory.mktemp("module"))


@pytest.fixture(params=WRITERS)
def writer(
    request: pytest.FixtureRequest, tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> Writer:
    """A writer, its folder made in `template`, and compilers that only copy."""
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {module} "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "case" / "cache"))
    FakeCompiler(module).use(monkeypatch)
    found = WRITERS[request.param]
    (tmp_path / "template").mkdir()
    found.make(tmp_path / "template")
    return found


def test_kill_9_at_any_place(writer: Writer, tmp_path: Path) -> None:
    case, place, killed = tmp_path / "case", 0, 0
    while True:
        copy_of(tmp_path / "template", case)
        ended = killed_at(place, case, lambda: writer.work(case))
        writer.look(case)
        if ended.code != -9:
            break
        killed += 1
        place += 1 + place // 5  # the first ones all, then fewer and fewer
        if killed % 5 == 0:  # the same command goes on from there
            again = forked(lambda: writer.work(case))
            assert again.code == 0, again.error
            writer.look(case)
    assert ended.code == 0, ended.error
    assert killed >= writer.least


def test_files_that_may_not_grow(writer: Writer, tmp_path: Path) -> None:
    case = tmp_path / "case"
    for num_bytes in (0, 100, 1500):
        copy_of(tmp_path / "template", case)
        ended = limited(num_bytes, lambda: writer.work(case))
        writer.look(case)
        assert ended.code in (0, 1) or "C++" in ended.error or "cp " in ended.error, ended.error
        if num_bytes == 0:
            assert ended.code != 0
            assert str(case) in ended.error
    assert forked(lambda: writer.work(case)).code == 0
    writer.look(case)


@pytest.mark.parametrize("read_only", [False, True], ids=["full", "read-only"])
def test_a_disk_that_takes_nothing(writer: Writer, tmp_path: Path, read_only: bool) -> None:
    case = copy_of(tmp_path / "template", tmp_path / "case")

    def work() -> None:
        try:
            writer.work(case)
        finally:
            if not read_only or writer.look is not look_at_archive:
                writer.look(case)

    ended = on_disk(case, 0, work, read_only=read_only)
    if ended is None:
        pytest.skip("this process may not mount a disk")
    what = "Read-only file system" if read_only else "No space left on device"
    assert what in ended.error
    assert str(case) in ended.error
    assert "Traceback" not in ended.error or "C++" in ended.error
