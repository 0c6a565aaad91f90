"""Bound launches on a CUDA device with a driver of a few functions, in a process of its own.

`LD_LIBRARY_PATH=FOLDER python tests/direct_launches.py MODULE DRIVER`, of `native.build_native` and
`fake_driver.build_driver`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import tvm_ffi
from fake_driver import OnGpu

from tl_megamoe import native

COUNTS, OTHER_COUNTS, STREAM = 0x7000, 0x9000, 0x3000


def main(module: str, driver: str) -> None:
    bind = tvm_ffi.load_module(module).get_function(native.BIND)
    fake = ctypes.CDLL(driver)
    fake.note.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]

    def value(name: str, kind: Any = ctypes.c_int32) -> Any:
        return kind.in_dll(fake, name)

    def noted() -> tuple[int, int, int]:
        return (
            value("counts", ctypes.c_int64).value,
            value("y", ctypes.c_int64).value,
            value("tokens").value,
        )

    through_host: list[tuple[int, int]] = []
    own = OnGpu(0x5000)
    at: dict[str, int] = {}

    def host_code(counts: Any, y: int, tokens: int) -> None:
        """What tilelang compiles: here it notes what the kernel would get."""
        through_host.append((y, tokens))
        assert (counts.shape, str(counts.device)) == ((1,), "cuda:0")
        fake.note(at["counts"], y, tokens)

    def bound() -> Any:
        through_host.clear()
        for name in ("launches", "captures"):
            value(name).value = 0
        return bind(tvm_ffi.convert(host_code), 0, 1, 2, tvm_ffi.from_dlpack(own), 0, 0)

    def launch(call: Any, counts: int, y: int, tokens: int) -> None:
        at["counts"] = counts
        call(counts, y, tokens, STREAM)
        assert noted() == (counts, y, tokens), noted()

    # The first through the host code, the second is captured and launched, the others launched.
    call = bound()
    for y, tokens in ((11, 1), (12, 2), (13, 3), (14, 0)):
        launch(call, OTHER_COUNTS if y == 13 else COUNTS, y, tokens)
    assert len(through_host) == 2, through_host
    assert through_host[0] == (11, 1)
    assert (value("launches").value, value("captures").value) == (3, 1)
    assert value("mode").value == 0
    assert value("stream", ctypes.c_void_p).value == STREAM

    # An error of CUDA is told.
    value("fails").value = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA error 700"):
        launch(call, COUNTS, 15, 4)
    value("fails").value = 0

    # While the caller captures, nothing else is.
    call = bound()
    launch(call, COUNTS, 21, 1)
    value("capturing").value = 1
    launch(call, COUNTS, 22, 2)
    launch(call, COUNTS, 23, 3)
    assert (len(through_host), value("captures").value) == (3, 0)
    value("capturing").value = 0
    launch(call, COUNTS, 24, 4)
    assert (value("launches").value, value("captures").value) == (1, 1)

    # Two kernels, or a parameter that is there twice: always through the host code.
    value("num_nodes").value = 2
    call = bound()
    for y in (31, 32, 33):
        launch(call, COUNTS, y, 5)
    assert (value("launches").value, value("captures").value) == (0, 1)
    value("num_nodes").value = 1
    (ctypes.c_int64 * 16).in_dll(fake, "data")[0] = COUNTS
    call = bound()
    for y in (41, 42, 43):
        launch(call, COUNTS, y, 6)
    assert (value("launches").value, value("captures").value) == (0, 1)
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
