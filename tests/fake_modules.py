"""Modules of TVM-FFI functions that a C++ compiler makes in no time, in the place of kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tl_megamoe import kernel, quantize

NUM_TOKENS = 18
"""Place of the number of tokens among the parameters of the fused program."""
SOURCE = """
#include <cstdint>
struct Any { int32_t type; int32_t zero; union { int64_t number; void* pointer; }; };
static int64_t seen = 0;
static int give(Any* result, int64_t value) {
  result->type = 1; result->zero = 0; result->number = value;
  return 0;
}
extern "C" int __tvm_ffi_mega_moe(void*, const Any* args, int32_t count, Any* result) {
  seen = count * 1000 + (count > TOKENS ? args[TOKENS].number : 0);
  return give(result, seen);
}
extern "C" int __tvm_ffi_seen(void*, const Any*, int32_t, Any* result) {
  return give(result, seen);
}
"""


def build_module(folder: Path) -> Path:
    """A module with `mega_moe`, which returns 1000 * arguments + tokens, and `seen`."""
    source, module = folder / "module.cc", folder / "module.so"
    source.write_text(SOURCE.replace("TOKENS", str(NUM_TOKENS)))
    compiler = shutil.which("c++") or "g++"
    command = [compiler, "-shared", "-fPIC", "-o", str(module), str(source)]
    subprocess.run(command, check=True)
    return module


class FakeCompiler:
    """Stands for tilelang: every kernel is one module; `made` lists what was asked for.

    Args:
        module: from `build_module`.
        fail_at: number of the kernel at which it fails, from 1.
    """

    def __init__(self, module: Path, fail_at: int = 0):
        self.module = module
        self.fail_at = fail_at
        self.made: list[Any] = []

    def compiled(self, spec: Any) -> Any:
        self.made.append(spec)
        if len(self.made) == self.fail_at:
            raise RuntimeError("nvcc failed")
        return SimpleNamespace(
            prim_func=SimpleNamespace(attrs={"global_symbol": "mega_moe"}),
            export_library=lambda path: shutil.copy(self.module, path),
        )

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            kernel, "compile_kernel", lambda s: kernel.CompiledKernel(s, self.compiled(s))
        )
        monkeypatch.setattr(quantize, "compile_program", self.compiled)
