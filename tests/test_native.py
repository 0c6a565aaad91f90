"""The native module: built, cached, loaded, and what it says of bad calls.

That it encodes what tilelang's function does is seen on a GPU: every launch there calls it.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import tvm_ffi
from torch.multiprocessing.reductions import StorageWeakRef

from tl_megamoe import native
from tl_megamoe.kernel import KernelSpec, compile_kernel
from tl_megamoe.launch import raw_function


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> tvm_ffi.Module:
    path = tmp_path_factory.mktemp("native") / "deep" / "native.so"
    native.build_native(path)
    assert [p.name for p in path.parent.iterdir()] == ["native.so"]
    return tvm_ffi.load_module(str(path))


@pytest.mark.parametrize("count", [0, 3, 11, 13, 29])
def test_a_wrong_number_of_arguments(module: tvm_ffi.Module, count: int) -> None:
    encode = module.get_function(native.ENCODE)
    with pytest.raises(RuntimeError, match=r"8 \+ 4 \* rank arguments, its rank being 1 to 5"):
        encode(*[None, 7, 1, None, *[1] * 25][:count])
    with pytest.raises(RuntimeError, match="its rank being 1 to 5"):
        encode(None, 7, 6, None, *[1] * 28)


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    path = native.cached_native()
    assert path == tmp_path / "tl_megamoe" / f"native-{native.source_digest()}.so"
    stamp = path.stat().st_mtime_ns
    monkeypatch.setenv("CXX", "/no/compiler")
    assert native.cached_native().stat().st_mtime_ns == stamp
    path.unlink()
    with pytest.raises(RuntimeError, match="/no/compiler: the C\\+\\+ compiler cannot be started"):
        native.cached_native()
    assert not list(path.parent.glob("*.so"))


@pytest.mark.parametrize("text", [b"", b"half"])
def test_a_damaged_file_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: bytes
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "c++ -O0")
    path = native.cached_native()
    path.unlink()
    path.write_bytes(text)
    assert tvm_ffi.load_module(str(native.cached_native())).get_function(native.BIND) is not None


def test_without_a_compiler_tilelang_encodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native.native_module.cache_clear()
    try:
        with caplog.at_level("INFO"):
            assert native.native_module() is None
            assert native.native_module() is None
        assert caplog.text.count("launches take a microsecond or two more") == 1
        assert "there is no C++ compiler (c++ or g++ on the PATH, or CXX)" in caplog.text
    finally:
        native.native_module.cache_clear()


def test_a_kernel_s_module_finds_it() -> None:
    from gpu_cases import SMALL, SMALL_CAPACITY, fit

    spec = KernelSpec(problem=SMALL, schedule=fit(SMALL), capacity=SMALL_CAPACITY)
    kernel = compile_kernel(spec).kernel
    function = raw_function(kernel)
    assert isinstance(function, tvm_ffi.Function)
    assert raw_function(kernel) is function
    executable = kernel.adapter.get_exportable_executable()
    loaded = executable.jit() if hasattr(executable, "jit") else executable
    names = [m.kind for m in loaded.imports]
    assert any(m.implements_function(native.ENCODE) for m in loaded.imports), names


def test_a_bound_launch(module: tvm_ffi.Module) -> None:
    seen: list[tuple[object, ...]] = []
    function = tvm_ffi.convert(lambda *values: seen.append(values))
    tensor = torch.arange(6)
    held = tvm_ffi.from_dlpack(tensor.detach())
    bound = module.get_function(native.BIND)(function, 2, 1, 4, held, 0, None, 2.5, 0, 7)
    address = tensor.data_ptr()
    del held, tensor
    gc.collect()
    for counts, y, tokens in ((torch.ones(2), 11, 3), (torch.zeros(2), 12, 4)):
        bound(counts, y, tokens)
        first, *rest = seen.pop()
        assert torch.from_dlpack(first).data_ptr() == address  # kept alive by the launch
        assert rest[0] == y
        assert torch.equal(torch.from_dlpack(rest[1]), counts)
        assert rest[2:] == [2.5, tokens, 7]
    assert not seen


def test_a_bound_launch_lets_go(module: tvm_ffi.Module) -> None:
    tensor = torch.zeros(8)
    storage = StorageWeakRef(tensor.untyped_storage())
    held = tvm_ffi.from_dlpack(tensor.detach())
    bound = module.get_function(native.BIND)(tvm_ffi.convert(len), 0, 1, 2, held, held, 1, 2)
    del held, tensor
    gc.collect()
    assert not storage.expired()
    del bound
    gc.collect()
    assert storage.expired()


def test_bad_bound_launches(module: tvm_ffi.Module) -> None:
    bind = module.get_function(native.BIND)
    function = tvm_ffi.convert(lambda *_: 0)
    for arguments in ((), (1, 0, 1, 2, 3, 4, 5), (function, 0, 1, 2, 3), (function, *range(36))):
        with pytest.raises(
            RuntimeError, match="bind_launch takes a function, 3 places and 3 to 32"
        ):
            bind(*arguments)
    with pytest.raises(RuntimeError, match="takes counts, output address and tokens"):
        bind(function, 0, 1, 2, 3, 4, 5)(1, 2)

    def broken(*_: object) -> None:
        raise ValueError("from inside")

    with pytest.raises(ValueError, match="from inside"):
        bind(tvm_ffi.convert(broken), 0, 1, 2, 3, 4, 5)(1, 2, 3)
