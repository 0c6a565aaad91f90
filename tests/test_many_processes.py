"""Many processes with one cache folder, one export or one table: each finds whole things."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cache import EVERY_KERNEL, SMALL, build
from fake_modules import FakeCompiler, build_module
from faults import killed_at, start_forked
from gpu_cases import SMALL as SMALL_LAYER
from gpu_cases import fit

from tl_megamoe import native
from tl_megamoe.explorer.bundle import unpack, write_bundle
from tl_megamoe.explorer.kernel_store import KernelStore, is_whole, namespace
from tl_megamoe.exported import ExportedKernels, export_kernels
from tl_megamoe.kernel import KernelSpec

PROCESSES = 8
ON_GPU = 30
COMPILE = """
import sys
import time

from tl_megamoe.quantize import QuantizeSpec, compile_quantize

sizes = {"hidden": 512, "num_topk": 2, "num_local_experts": 8, "num_experts": 8}
spec = QuantizeSpec(**sizes, num_shared=0, capacity=64, scale="exact")
while time.time() < float(sys.argv[1]):  # all begin at once
    time.sleep(0.01)
function = compile_quantize(spec).function
print("loaded", callable(function))
"""


def together(work: Callable[[int], object], count: int = PROCESSES) -> None:
    """Run a call in many forked processes at once, each with its number; all must succeed."""
    ends = [start_forked(lambda number=number: work(number)) for number in range(count)]
    for end in ends:
        ended = end()
        assert ended.code == 0, ended.error


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_module(tmp_path_factory.mktemp("module"))


def test_one_native_module(tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles into an empty cache, slowly, in two halves, and finds a whole module."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'head -c 9000 {module} > "$2"; sleep 0.1; tail -c +9001 {module} >> "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    whole = module.read_bytes()

    def work(number: int) -> None:
        for _ in range(4):
            assert native.cached_native().read_bytes() == whole

    together(work)
    found = sorted(path.name for path in native.cached_native().parent.iterdir())
    name = f"native-{native.source_digest()}"
    assert found == [f"{name}.sha256", f"{name}.so"]


def test_one_cache_of_unpacked_kernels(tmp_path: Path) -> None:
    """All replace the same damaged kernel, and put the others there."""
    store = KernelStore(tmp_path / "cache")
    for wanted in EVERY_KERNEL:
        store.reports.put(wanted, build(wanted, store.root))
    write_bundle(tmp_path / "k.tar.xz", EVERY_KERNEL, SMALL, store)
    root = tmp_path / "new"
    damaged = root / namespace() / "kernels" / next(store.folder.iterdir()).name
    damaged.mkdir(parents=True)
    (damaged / "executable.so").write_text("half")

    def work(number: int) -> None:
        unpack(tmp_path / "k.tar.xz", root)
        found = KernelStore(root)
        for wanted in EVERY_KERNEL[:2]:
            report = found.reports.get(wanted)
            assert report is not None
            assert found.entries_of(report.source_hash)

    together(work)
    entries = list((root / namespace() / "kernels").iterdir())
    assert len(entries) == 2
    assert all(map(is_whole, entries))
    assert not list((root / namespace() / ".staging").iterdir())


def test_one_export(tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes the same folder, and what it reads between is the export of one of them."""
    FakeCompiler(module).use(monkeypatch)
    monkeypatch.setattr(native, "build_native", lambda path: path.write_bytes(module.read_bytes()))
    out = tmp_path / "k"

    def spec(capacity: int) -> KernelSpec:
        return KernelSpec(problem=SMALL_LAYER, schedule=fit(SMALL_LAYER), capacity=capacity)

    export_kernels(out, [spec(64)])

    def work(number: int) -> None:
        for _ in range(3):
            export_kernels(out, [spec(64 + 64 * number)])
            manifest = ExportedKernels.open(out).manifest
            assert len(manifest.kernels) == 1

    together(work)
    kernels = ExportedKernels.open(out)
    (kernel,) = kernels.manifest.kernels
    assert hashlib.sha256((out / kernel.file).read_bytes()).hexdigest() == kernel.sha256
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_tilelang_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that all save at once into an empty cache, and load from there."""
    from export_cases import quantize_spec
    from tilelang.jit.adapter.kernel_cache import TVMFFIKernelCache

    from tl_megamoe.quantize import compile_program

    # Compiled here, by no other test: a kernel that was loaded cannot be saved.
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "first"))
    kernel = compile_program(quantize_spec(capacity=77))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    native.private_cache()
    key = "0" * 64

    cache: Any = TVMFFIKernelCache()
    root = tmp_path / "cache" / namespace()

    def work(number: int) -> None:
        cache._save_kernel_to_disk(key, kernel)
        assert is_whole(root / "kernels" / key)

    ended = killed_at(9, tmp_path / "cache", lambda: work(0))
    assert ended.code == -9, ended.error
    assert not list((root / "kernels").glob("*"))
    shutil.rmtree(root / ".staging")  # tilelang removes what is an hour old
    together(work, 4)  # each links the kernel's library
    assert [path.name for path in (root / "kernels").iterdir()] == [key]
    assert is_whole(root / "kernels" / key)
    assert not list((root / ".staging").iterdir())
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def compile_at_once(count: int, cache: Path) -> None:
    """Processes of their own compile one real kernel into one empty cache."""
    import time

    environment = {**os.environ, "TILELANG_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILE, str(time.time() + 10)]
    children = [
        subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(count)
    ]
    try:
        for child in children:
            said, _ = child.communicate(timeout=240)
            assert child.returncode == 0, said
            assert "loaded True" in said
    finally:
        for child in children:
            child.kill()
    entries = list((cache / namespace() / "kernels").iterdir())
    assert len(entries) == 1
    assert is_whole(entries[0])
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.sm90
def test_many_processes_compile_into_one_cache(tmp_path: Path) -> None:
    compile_at_once(ON_GPU, tmp_path / "cache")
