"""The C++ text of the native module (native.py)."""

SOURCE = r"""
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

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
constexpr const char* kForms =
    "a bound launch takes counts, output address and tokens; or, where its own counts lie on a "
    "GPU, an address, the others and a stream";

struct Direct;

struct Bound {
  TVMFFIObjectHandle function;
  int32_t num_values;
  int32_t places[kOpen];
  Any values[kMaxArguments];
  std::atomic<int> num_calls;
  std::atomic<const Direct*> direct;  // once it is known
};

bool is_object(const Any& value) { return value.type_index >= kTVMFFIStaticObjectBegin; }

const DLTensor* tensor_of(const Any& value) {
  if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(value.v_ptr);
  if (value.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(value.v_obj);
  return nullptr;
}


// ---- launches without the kernel's host code

// A launch of that code checks every argument and encodes the TMA descriptors: microseconds, for
// parameters that are the same each time. They are read from a launch that is captured, not run,
// and from then on CUDA is asked directly.

using Handle = void*;
constexpr int kMaxParameters = 48;
constexpr int kCuda = 2;              // kDLCUDA
constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kNonBlocking = 1;       // CU_STREAM_NON_BLOCKING
constexpr int64_t kSomeAddress = 0x7e5a5a5a7e5a5a5a;  // values that no other parameter has
constexpr int64_t kSomeTokens = 0x5a7e5a7e;

struct NodeParameters {  // CUDA_KERNEL_NODE_PARAMS_v2
  Handle function;
  uint32_t grid[3], block[3], shared_bytes;
  void** values;
  void** extra;
  Handle kernel, context;
};

struct Driver {
  int (*cuCtxGetCurrent)(Handle*);
  int (*cuStreamCreate)(Handle*, uint32_t);
  int (*cuStreamDestroy_v2)(Handle);
  int (*cuStreamIsCapturing)(Handle, int*);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuStreamBeginCapture_v2)(Handle, int);
  int (*cuStreamEndCapture)(Handle, Handle*);
  int (*cuGraphGetNodes)(Handle, Handle*, size_t*);
  int (*cuGraphKernelNodeGetParams_v2)(Handle, NodeParameters*);
  int (*cuGraphDestroy)(Handle);
  int (*cuKernelGetFunction)(Handle*, Handle);
  int (*cuFuncGetParamInfo)(Handle, size_t, size_t*, size_t*);
  int (*cuLaunchKernel)(Handle, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                        uint32_t, Handle, void**, void**);
  bool complete;
};

Driver load_driver() {
  Driver d{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return d;
  d.complete = true;
#define TLMM_FIND(name)                                                    \
  d.name = reinterpret_cast<decltype(d.name)>(dlsym(library, #name));      \
  d.complete = d.complete && d.name
  TLMM_FIND(cuCtxGetCurrent);
  TLMM_FIND(cuStreamCreate);
  TLMM_FIND(cuStreamDestroy_v2);
  TLMM_FIND(cuStreamIsCapturing);
  TLMM_FIND(cuThreadExchangeStreamCaptureMode);
  TLMM_FIND(cuStreamBeginCapture_v2);
  TLMM_FIND(cuStreamEndCapture);
  TLMM_FIND(cuGraphGetNodes);
  TLMM_FIND(cuGraphKernelNodeGetParams_v2);
  TLMM_FIND(cuGraphDestroy);
  TLMM_FIND(cuKernelGetFunction);
  TLMM_FIND(cuFuncGetParamInfo);
  TLMM_FIND(cuLaunchKernel);
#undef TLMM_FIND
  return d;
}

const Driver& driver() {
  static const Driver found = load_driver();
  return found;
}

struct Direct {
  Handle function, context;
  uint32_t grid[3], block[3], shared_bytes;
  int num_values, open[kOpen];  // which parameters are counts, output address and tokens
  struct alignas(64) {
    unsigned char bytes[128];  // of a descriptor, the largest
  } values[kMaxParameters];
};

// The parameters of a captured launch, whose open ones are known by their values; whether each of
// those was found once.
bool read_parameters(const NodeParameters& node, const int64_t* open_values, Direct* direct) {
  const Driver& d = driver();
  direct->function = node.function;
  if (!node.function && d.cuKernelGetFunction(&direct->function, node.kernel)) return false;
  if (node.extra || !node.values || d.cuCtxGetCurrent(&direct->context)) return false;
  for (int i = 0; i < 3; ++i) {
    direct->grid[i] = node.grid[i];
    direct->block[i] = node.block[i];
  }
  direct->shared_bytes = node.shared_bytes;
  const size_t open_sizes[kOpen] = {8, 8, 4};
  int found[kOpen] = {0, 0, 0};
  size_t offset, size;
  for (int n = 0; !d.cuFuncGetParamInfo(direct->function, n, &offset, &size); ++n) {
    if (n == kMaxParameters || size > sizeof direct->values[n].bytes) return false;
    std::memcpy(direct->values[n].bytes, node.values[n], size);
    for (int i = 0; i < kOpen; ++i)
      if (size == open_sizes[i] && !std::memcmp(node.values[n], open_values + i, size)) {
        direct->open[i] = n;
        ++found[i];
      }
    direct->num_values = n + 1;
  }
  return found[0] == 1 && found[1] == 1 && found[2] == 1;
}

// A launch by the kernel's host code.
int call_on_stream(const Bound& bound, DLTensor* counts, int64_t y, int64_t tokens, Handle stream,
                   Any* result) {
  Any values[kMaxArguments];
  for (int i = 0; i < bound.num_values; ++i) values[i] = bound.values[i];
  Any& first = values[bound.places[0]];
  give(&first, kTVMFFIDLTensorPtr, 0);
  first.v_ptr = counts;
  give(&values[bound.places[1]], kTVMFFIInt, y);
  give(&values[bound.places[2]], kTVMFFIInt, tokens);
  Handle before = nullptr;
  const int id = counts->device.device_id;
  if (TVMFFIEnvSetStream(kCuda, id, stream, &before)) return -1;
  const int status = TVMFFIFunctionCall(bound.function, values, bound.num_values, result);
  TVMFFIEnvSetStream(kCuda, id, before, nullptr);
  return status;
}

// Captures a launch in a stream of its own; null where that is not one kernel with these
// parameters. The capture is relaxed: one of another thread goes on beside it.
Direct* learn(const Bound& bound, DLTensor* counts) {
  const Driver& d = driver();
  Handle stream = nullptr, graph = nullptr;
  int mode = kRelaxed;
  if (d.cuThreadExchangeStreamCaptureMode(&mode)) return nullptr;
  Direct* direct = nullptr;
  if (!d.cuStreamCreate(&stream, kNonBlocking) && !d.cuStreamBeginCapture_v2(stream, kRelaxed)) {
    Any result;
    give(&result, kTVMFFINone, 0);
    bool ok = !call_on_stream(bound, counts, kSomeAddress, kSomeTokens, stream, &result);
    if (!ok) {
      TVMFFIObjectHandle error = nullptr;
      TVMFFIErrorMoveFromRaised(&error);
      if (error) TVMFFIObjectDecRef(error);
    }
    ok = !d.cuStreamEndCapture(stream, &graph) && ok;
    Handle nodes[2] = {nullptr, nullptr};
    size_t num_nodes = 2;
    NodeParameters node{};
    if (ok && graph && !d.cuGraphGetNodes(graph, nodes, &num_nodes) && num_nodes == 1 &&
        !d.cuGraphKernelNodeGetParams_v2(nodes[0], &node)) {
      const int64_t open_values[kOpen] = {reinterpret_cast<int64_t>(counts->data), kSomeAddress,
                                          kSomeTokens};
      direct = new Direct{};
      if (!read_parameters(node, open_values, direct)) {
        delete direct;
        direct = nullptr;
      }
    }
    if (graph) d.cuGraphDestroy(graph);
  }
  if (stream) d.cuStreamDestroy_v2(stream);
  d.cuThreadExchangeStreamCaptureMode(&mode);
  return direct;
}

// Launches if the parameters are known, or can be learned now; `launched` says whether.
int call_directly(Bound* bound, DLTensor* counts, int64_t y, int64_t tokens, Handle stream,
                  bool* launched) {
  *launched = false;
  const Driver& d = driver();
  if (!d.complete) return 0;
  const Direct* direct = bound->direct.load(std::memory_order_acquire);
  if (!direct) {
    // The first launch loads the kernel, which cannot be captured. A capture of the caller's is
    // left alone: the next launch learns.
    int capturing = 1;
    if (bound->num_calls.fetch_add(1) != 1) return 0;
    if (d.cuStreamIsCapturing(stream, &capturing) || capturing) {
      bound->num_calls.store(1);
      return 0;
    }
    direct = learn(*bound, counts);
    if (!direct) return 0;
    bound->direct.store(direct, std::memory_order_release);
  }
  Handle context = nullptr;
  if (d.cuCtxGetCurrent(&context) || context != direct->context) return 0;
  void* values[kMaxParameters];
  for (int i = 0; i < direct->num_values; ++i)
    values[i] = const_cast<unsigned char*>(direct->values[i].bytes);
  int64_t open[kOpen] = {reinterpret_cast<int64_t>(counts->data), y, tokens};
  for (int i = 0; i < kOpen; ++i) values[direct->open[i]] = &open[i];
  const uint32_t *grid = direct->grid, *block = direct->block;
  const int status = d.cuLaunchKernel(direct->function, grid[0], grid[1], grid[2], block[0],
                                      block[1], block[2], direct->shared_bytes, stream, values,
                                      nullptr);
  *launched = true;
  if (!status) return 0;
  char message[64];
  std::snprintf(message, sizeof message, "cuLaunchKernel: CUDA error %d", status);
  return fail(message);
}

int call(void* self, const Any* args, int32_t num_args, Any* result) {
  Bound& bound = *static_cast<Bound*>(self);
  const DLTensor* like = tensor_of(bound.values[bound.places[0]]);
  if (num_args == kOpen + 1 && like && like->device.device_type == kCuda) {
    for (int i = 0; i < num_args; ++i)
      if (args[i].type_index != kTVMFFIInt) return fail(kForms);
    DLTensor counts = *like;
    counts.data = args[0].v_ptr;
    counts.byte_offset = 0;
    Handle stream = args[kOpen].v_ptr;
    const int64_t y = args[1].v_int64, tokens = args[2].v_int64;
    bool launched;
    give(result, kTVMFFINone, 0);
    const int status = call_directly(&bound, &counts, y, tokens, stream, &launched);
    return launched ? status : call_on_stream(bound, &counts, y, tokens, stream, result);
  }
  if (num_args != kOpen) return fail(kForms);
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
  delete bound->direct.load();
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
  Bound* bound = new Bound{args[0].v_obj, num_values, {}, {}, {0}, {nullptr}};
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
