#include "launch/tile_counters.h"

#include <map>
#include <mutex>
#include <utility>

#include "launch/errors.h"

namespace flashattn3 {
namespace {

int32_t* new_counter(cudaStream_t stream) {
  constexpr size_t kBytes = 2 * sizeof(int32_t);
  void* counter = nullptr;
  // In another capture mode cudaMalloc would invalidate a capture that another thread has begun.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "changing the capture mode");
  const cudaError_t allocated = cudaMalloc(&counter, kBytes);
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "restoring the capture mode");
  check_cuda(allocated, "allocating a tile counter");
  check_cuda(cudaMemsetAsync(counter, 0, kBytes, stream), "clearing a tile counter");
  return static_cast<int32_t*>(counter);
}

}  // namespace

int32_t* tile_counter(int device, cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return nullptr;

  // CUDA reuses the handle of a destroyed stream, whose kernels may still be running, but not its
  // ID.
  unsigned long long number;
  check_cuda(cudaStreamGetId(stream, &number), "asking for the stream's number");

  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, int32_t*> counters;
  const std::lock_guard lock(mutex);
  int32_t*& counter = counters[{device, number}];
  if (counter == nullptr) counter = new_counter(stream);
  return counter;
}

}  // namespace flashattn3
