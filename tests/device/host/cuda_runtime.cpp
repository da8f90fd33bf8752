// A CUDA runtime without a GPU, for the operator library on a machine that has none: tensors of the
// CPU count as a GPU's, launches do nothing. With it a test sees what an operator passes to the
// driver, and a profiler sees the host's work of a call without the driver's.
//
// Linked into the library in place of libcudart_static; its definitions of torch's functions come
// before torch's own (-Bsymbolic).
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <utility>

#include "kernel_arguments.h"
#include "torch_binding/autograd_node.h"

namespace {

// Two lines for each TMA descriptor, one for each launch, event of a stream (1: not torch's) and
// allocation of a tensor, and one for the arguments of a kernel of cached calls, while it is on.
bool logging = false;
std::string events;
int stream_priority = 0;
bool next_launch_fails = false;

template <class... Values>
void log(const char* format, Values... values) {
  if (!logging) return;
  char line[160];
  std::snprintf(line, sizeof line, format, values...);
  events += line;
}

// Mangled names of the kernels.
std::unordered_map<const void*, std::string>& kernels() {
  static std::unordered_map<const void*, std::string> names;
  return names;
}

void log_arguments(const void* kernel, void** arguments) {
  if (!logging) return;
  const auto words = words_of_arguments(kernels()[kernel], arguments);
  if (words.empty()) return;
  log("arguments");
  for (const uint64_t word : words) log(" %ju", uintmax_t{word});
  log("\n");
}

// True once this thread has bound a context; here only cudaSetDevice binds one.
thread_local bool has_context = false;

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address,
                const cuuint64_t* extent, const cuuint64_t* stride, const cuuint32_t*,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  *map = {};
  log("descriptor %ju %ju", uintmax_t{reinterpret_cast<uintptr_t>(address)}, uintmax_t{extent[0]});
  for (cuuint32_t i = 1; i < rank; ++i) log(" %ju", uintmax_t{extent[i]});
  log("\nstrides");
  for (cuuint32_t i = 1; i < rank; ++i) log(" %ju", uintmax_t{stride[i - 1]});
  log("\n");
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

EXPORTED void host_log(bool on) {
  logging = on;
  events.clear();
}
EXPORTED const char* host_events() { return events.c_str(); }
// Of torch's stream.
EXPORTED void host_stream_priority(int priority) { stream_priority = priority; }
EXPORTED void host_fail_next_launch() { next_launch_fails = true; }
EXPORTED void host_register_nodes() {
  flashattn3::register_autograd_node("CPU");
  flashattn3::register_score_node("CPU");
}

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }
AOTITorchError aoti_torch_cuda_view_dtype(AtenTensorHandle self, int32_t dtype,
                                          AtenTensorHandle* view) {
  return aoti_torch_cpu_view_dtype(self, dtype, view);
}
AOTITorchError aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device,
                                        AtenTensorHandle* tensor) {
  static const auto allocate = reinterpret_cast<decltype(&aoti_torch_empty_strided)>(
      dlsym(RTLD_NEXT, "aoti_torch_empty_strided"));
  log("allocate\n");
  return allocate(rank, sizes, strides, dtype, device_type, device, tensor);
}
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 132;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&encode);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "no GPU"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int, size_t bytes, cudaStream_t) {
  log("memset %ju %zu\n", uintmax_t{reinterpret_cast<uintptr_t>(data)}, bytes);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  if (std::exchange(next_launch_fails, false)) return cudaErrorLaunchFailure;
  log("launch %u %u %zu\n", config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes);
  log_arguments(kernel, arguments);
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* number) {
  *number = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* number, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (number != nullptr) *number = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = stream_priority;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  log("stream %d\n", priority);
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  static char side;
  *stream = reinterpret_cast<cudaStream_t>(&side);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static char only;
  *event = reinterpret_cast<cudaEvent_t>(&only);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
  log("record %d\n", stream != nullptr);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  log("wait %d\n", stream != nullptr);
  return cudaSuccess;
}

// What nvcc's host code calls when the library is loaded.
void** __cudaRegisterFatBinary(void*) {
  static void* none = nullptr;
  return &none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernels()[kernel] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  log("launch\n");
  return cudaSuccess;
}
}
