"""A CUDA driver of a few functions, whose kernels are a Python function that notes its launch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCE = r"""
#include <cstddef>
#include <cstdint>
#include <cstring>
using Handle = void*;
struct Node {
  Handle function;
  uint32_t grid[3], block[3], shared_bytes;
  void** values;
  void** extra;
  Handle kernel, context;
};
extern "C" {
// What a test sets and reads.
int64_t counts, y, data[16];
int32_t tokens, capturing, fails, num_nodes = 1, launches, captures, mode;
void* stream;
char descriptor[128] = "a descriptor";

static void* values[] = {descriptor, &counts, &data[0], &tokens, &y};
static const size_t sizes[] = {128, 8, 8, 4, 8};
static int context, function, graph;

void note(int64_t at, int64_t to, int32_t n) { counts = at; y = to; tokens = n; }
int cuCtxGetCurrent(Handle* c) { *c = &context; return 0; }
int cuStreamCreate(Handle* s, uint32_t) { *s = &graph; return 0; }
int cuStreamDestroy_v2(Handle s) { return s != &graph; }
int cuStreamIsCapturing(Handle, int* is) { *is = capturing; return 0; }
int cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; return 0; }
int cuStreamBeginCapture_v2(Handle s, int) { ++captures; return s != &graph; }
int cuStreamEndCapture(Handle, Handle* g) { *g = &graph; return 0; }
int cuGraphGetNodes(Handle, Handle* nodes, size_t* n) {
  nodes[0] = &graph;
  *n = num_nodes;
  return 0;
}
int cuGraphKernelNodeGetParams_v2(Handle, Node* node) {
  *node = Node{nullptr, {132, 1, 1}, {384, 1, 1}, 1024, values, nullptr, &function, nullptr};
  return 0;
}
int cuGraphDestroy(Handle g) { return g != &graph; }
int cuKernelGetFunction(Handle* f, Handle k) { *f = k; return 0; }
int cuFuncGetParamInfo(Handle, size_t n, size_t* offset, size_t* size) {
  if (n >= 5) return 1;
  *offset = 128 * n;
  *size = sizes[n];
  return 0;
}
int cuLaunchKernel(Handle f, uint32_t x, uint32_t, uint32_t, uint32_t threads, uint32_t, uint32_t,
                   uint32_t shared, Handle s, void** given, void**) {
  if (f != &function || x != 132 || threads != 384 || shared != 1024) return 1;
  if (std::memcmp(given[0], descriptor, 128) || *(int64_t*)given[2] != data[0]) return 1;
  ++launches;
  stream = s;
  note(*(int64_t*)given[1], *(int64_t*)given[4], *(int32_t*)given[3]);
  return fails;
}
}
"""


def build_driver(folder: Path) -> Path:
    """libcuda.so.1 in a folder."""
    source, library = folder / "driver.cc", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    compiler = shutil.which("c++") or "g++"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [  # noqa: RUF012
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]  # noqa: RUF012


class OnGpu:
    """An int32 tensor of one element on CUDA device 0, at an address where there may be nothing."""

    def __init__(self, address: int) -> None:
        self._one = (ctypes.c_int64 * 1)(1)
        tensor = Tensor(address, 2, 0, 1, 0, 32, 1, self._one, self._one, 0)
        self._managed = Managed(tensor, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return make(ctypes.addressof(self._managed), b"dltensor", None)
