"""What makes a launch cheap on the host, in C++ that is compiled once a machine.

- A launch encodes its TMA descriptors. tilelang's function for that lives in its compiler's
  library, so a process that shall not load the compiler has none; it also checks every argument
  into lists of strings before it asks CUDA. Here it is in a module of its own, which a kernel's
  module imports: TVM-FFI looks there before it asks its global registry. The arguments are those
  that tilelang's compiler wrote into the kernel's host code, and CUDA checks them.
- Of the 23 arguments of a launch 20 are the same every time: a bound launch holds them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCE = r"""
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <cstdio>

namespace {
using Any = TVMFFIAny;

int fail(const char* message) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

void give(Any* result, int32_t type_index, int64_t value) {
  result->type_index = type_index;
  result->zero_padding = 0;
  result->v_int64 = value;
}

// ---- TMA descriptors

constexpr int kMaxRank = 5;
using Encode = int (*)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                       const uint32_t*, const uint32_t*, int, int, int, int);

Encode find() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
}

// ---- bound launches

constexpr int kMaxArguments = 32;
constexpr int kOpen = 3;  // arguments that a call brings

struct Bound {
  TVMFFIObjectHandle function;
  int32_t num_values;
  int32_t places[kOpen];
  Any values[kMaxArguments];
};

bool is_object(const Any& value) { return value.type_index >= kTVMFFIStaticObjectBegin; }

int call(void* self, const Any* args, int32_t num_args, Any* result) {
  const Bound& bound = *static_cast<const Bound*>(self);
  if (num_args != kOpen) return fail("a bound launch takes counts, output address and tokens");
  Any values[kMaxArguments];
  for (int i = 0; i < bound.num_values; ++i) values[i] = bound.values[i];
  for (int i = 0; i < kOpen; ++i) values[bound.places[i]] = args[i];
  return TVMFFIFunctionCall(bound.function, values, bound.num_values, result);
}

void release(void* self) {
  Bound* bound = static_cast<Bound*>(self);
  for (int i = 0; i < bound->num_values; ++i)
    if (is_object(bound->values[i])) TVMFFIObjectDecRef(bound->values[i].v_obj);
  TVMFFIObjectDecRef(bound->function);
  delete bound;
}
}  // namespace

// (map, type, rank, address, rank times: dims, strides, box, steps, interleave, swizzle,
//  l2_promotion, out_of_bounds_fill)
extern "C" int __tvm_ffi___tvm_tensormap_create_tiled(void*, const Any* args, int32_t num_args,
                                                      Any* result) {
  const int64_t rank = num_args > 2 ? args[2].v_int64 : 0;
  if (rank < 1 || rank > kMaxRank || num_args != 8 + 4 * rank)
    return fail("a TMA descriptor has 8 + 4 * rank arguments, its rank being 1 to 5");
  static const Encode encode = find();
  if (!encode) return fail("libcuda.so.1 with cuTensorMapEncodeTiled cannot be loaded");
  uint64_t dims[kMaxRank], strides[kMaxRank];
  uint32_t box[kMaxRank], steps[kMaxRank];
  const Any* sizes = args + 4;
  for (int i = 0; i < rank; ++i) {
    dims[i] = sizes[i].v_int64;
    strides[i] = sizes[rank + i].v_int64;
    box[i] = sizes[2 * rank + i].v_int64;
    steps[i] = sizes[3 * rank + i].v_int64;
  }
  const Any* modes = sizes + 4 * rank;
  // CUDA takes no stride of the innermost dimension.
  const int status = encode(args[0].v_ptr, args[1].v_int64, rank, args[3].v_ptr, dims,
                            strides + 1, box, steps, modes[0].v_int64, modes[1].v_int64,
                            modes[2].v_int64, modes[3].v_int64);
  if (status) {
    char message[160];
    std::snprintf(message, sizeof message,
                  "cuTensorMapEncodeTiled: CUDA error %d for rank %d at address %p, box of %u x %u",
                  status, static_cast<int>(rank), args[3].v_ptr, box[0], rank > 1 ? box[1] : 1);
    return fail(message);
  }
  give(result, kTVMFFINone, 0);
  return 0;
}

// (function, place of each open argument, values): a function of the open arguments
extern "C" int __tvm_ffi_bind_launch(void*, const Any* args, int32_t num_args, Any* result) {
  const int32_t num_values = num_args - 1 - kOpen;
  if (num_values < kOpen || num_values > kMaxArguments || args[0].type_index != kTVMFFIFunction)
    return fail("bind_launch takes a function, 3 places and 3 to 32 values");
  Bound* bound = new Bound{args[0].v_obj, num_values, {}, {}};
  TVMFFIObjectIncRef(bound->function);
  for (int i = 0; i < num_values; ++i) {
    bound->values[i] = args[1 + kOpen + i];
    if (is_object(bound->values[i])) TVMFFIObjectIncRef(bound->values[i].v_obj);
  }
  for (int i = 0; i < kOpen; ++i) {
    const int64_t place = args[1 + i].v_int64;
    bound->places[i] = place >= 0 && place < num_values ? place : 0;
  }
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionCreate(bound, call, release, &function)) {
    release(bound);
    return -1;
  }
  give(result, kTVMFFIFunction, 0);
  result->v_obj = static_cast<TVMFFIObject*>(function);
  return 0;
}
"""
ENCODE = "__tvm_tensormap_create_tiled"
"""The name under which a kernel's module looks for what encodes its descriptors."""
BIND = "bind_launch"
"""(function, places of three arguments, all arguments) -> function of those three."""


def cache_root() -> Path:
    """Folder of tilelang's kernel cache: TILELANG_CACHE_DIR, or ~/.tilelang/cache."""
    return Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")


def private_cache() -> Path:
    """The cache folder, made for this user alone (0700) where there is none.

    Kernels are native code that is loaded from it, so a folder that is another user's, or that
    everybody may write to, is refused; a group that may write to it is trusted, and so are the
    folders above it. Call it before tilelang is imported, which makes the folder for everyone to
    read.

    Raises:
        ValueError: the folder cannot be made, belongs to another user than this one or root, or
            everybody may write to it; or there is neither TILELANG_CACHE_DIR nor a home.
    """
    try:
        root = cache_root()
    except RuntimeError as error:
        raise ValueError(
            f"kernel cache: this process has no home directory ({error}). Set TILELANG_CACHE_DIR "
            "to a folder of its own"
        ) from error
    subject = f"kernel cache {root} (TILELANG_CACHE_DIR, or ~/.tilelang/cache)"
    instead = "set TILELANG_CACHE_DIR to a folder of your own"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        raise ValueError(
            f"{subject} cannot be made: {error.filename}: {error.strerror}. Put that right, "
            f"or {instead}."
        ) from error
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{subject} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: whoever owns the folder decides what code a kernel is. Change its "
            f"owner, or {instead}."
        )
    if found.st_mode & stat.S_IWOTH:
        raise ValueError(
            f"{subject} has mode {stat.S_IMODE(found.st_mode):04o}: everybody can put code there, "
            f"which this process would load, and may have. Remove the folder, or {instead}."
        )
    return root


def source_digest() -> str:
    """Tells one text of the module, and the machines it runs on, from another."""
    return hashlib.sha256(
        f"{SOURCE}{platform.machine()}{version('apache-tvm-ffi')}".encode()
    ).hexdigest()[:12]


def build_native(path: Path) -> None:
    """Compile the module to a file, which appears complete or not at all.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed; the message holds its output.
    """
    asked = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if asked is None:
        raise RuntimeError(
            "there is no C++ compiler (c++ or g++ on the PATH, or CXX) to compile a part of every "
            "launch with"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".native-", dir=path.parent) as folder:
        source, module = Path(folder) / "native.cc", Path(folder) / "native.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [*shlex.split(asked), "-std=c++17", "-O2", "-shared", "-fPIC"]
        command += [f"-I{folder}" for folder in _include_folders()]
        command += ["-o", str(module), str(source), "-ldl"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"{asked}: the C++ compiler cannot be started: {error}") from None
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
        module.replace(path)


def _include_folders() -> set[str]:
    from tvm_ffi import libinfo

    return {str(libinfo.find_include_path()), str(libinfo.find_dlpack_include_path())}


def cached_native() -> Path:
    """The module in tilelang's cache folder, compiled if it is not there, another's or not whole.

    Raises:
        RuntimeError: as `build_native`.
        ValueError: as `private_cache`.
        OSError: the cache folder cannot be written.
    """
    path = private_cache() / "tl_megamoe" / f"native-{source_digest()}.so"
    checksum = path.with_suffix(".sha256")
    try:
        ours = path.stat().st_uid in (0, os.geteuid())
        if ours and checksum.read_text() == hashlib.sha256(path.read_bytes()).hexdigest():
            return path
    except (OSError, UnicodeDecodeError):
        pass  # not there yet, or half of it
    try:
        build_native(path)
        with tempfile.TemporaryDirectory(prefix=".native-", dir=path.parent) as folder:
            written = Path(folder) / checksum.name
            written.write_text(hashlib.sha256(path.read_bytes()).hexdigest(), encoding="utf-8")
            written.replace(checksum)
    except OSError as error:
        raise OSError(error.errno, f"{path} is not written: {error.strerror or error}") from error
    return path


@lru_cache(maxsize=1)
def native_module() -> Any:
    """The loaded module for kernels that are compiled here; None where there is no compiler."""
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(cached_native()))
    except (OSError, RuntimeError) as error:
        logger.info("launches take a microsecond or two more: %s", error)
        return None
