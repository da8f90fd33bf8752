#include "launch/tile_counters.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "launch/capture_mode.h"
#include "launch/decode_params.h"
#include "launch/errors.h"

namespace flashattn3 {
namespace {

// Clears counters of a capture on a stream that is not captured, and waits for it: a memset of the
// captured stream would be a node of the graph, 2 us of each replay, though the launches leave the
// counters at zero. Called in the relaxed capture mode.
void clear_for_capture(void* counters, size_t bytes) {
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  const cudaError_t set = cudaMemsetAsync(counters, 0, bytes, stream);
  const cudaError_t waited = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check_cuda(set, "clearing counters");
  check_cuda(waited, "waiting for a memset");
}

void* new_counters(size_t bytes, cudaStream_t stream, bool captured) {
  void* counters = nullptr;
  const RelaxedCaptureMode relaxed;
  check_cuda(cudaMalloc(&counters, bytes), "allocating counters");
  if (captured) {
    clear_for_capture(counters, bytes);
  } else {
    check_cuda(cudaMemsetAsync(counters, 0, bytes, stream), "clearing counters");
  }
  return counters;
}

// Number of the capture, which no other capture of the process has; 0 if the stream is not
// captured.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long number = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &number),
             "asking whether the stream is captured");
  return status == cudaStreamCaptureStatusActive ? number : 0;
}

// The counters of each device, stream and capture (0: the stream is not captured).
class Counters {
 public:
  void* of(int device, cudaStream_t stream, size_t bytes) {
    const unsigned long long capture = capture_of(stream);
    const unsigned long long number = number_of(stream, capture);
    const std::lock_guard lock(mutex_);
    void*& counters = counters_[{device, number, capture}];
    if (counters == nullptr) counters = new_counters(bytes, stream, capture != 0);
    return counters;
  }

 private:
  // CUDA reuses the handle of a destroyed stream, whose kernels may still be running, but not its
  // ID. A captured stream tells no ID, and its handle lasts as long as the capture.
  static unsigned long long number_of(cudaStream_t stream, unsigned long long capture) {
    if (capture != 0) return reinterpret_cast<uintptr_t>(stream);
    unsigned long long number;
    check_cuda(cudaStreamGetId(stream, &number), "asking for the stream's number");
    return number;
  }

  std::mutex mutex_;
  std::map<std::tuple<int, unsigned long long, unsigned long long>, void*> counters_;
};

}  // namespace

int32_t* tile_counter(int device, cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return nullptr;
  static Counters counters;
  return static_cast<int32_t*>(counters.of(device, stream, 2 * sizeof(int32_t)));
}

uint32_t* partial_counters(int device, cudaStream_t stream, int num_counters) {
  int num_sms;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "asking for the number of SMs");
  const int most = num_sms * kPartialCountersPerSm;
  if (num_counters > most) {
    const std::string wanted = "at most " + std::to_string(most);
    expect(false, "launch", "the number of counters", wanted, num_counters);
  }
  if (stream == cudaStreamPerThread) return nullptr;
  static Counters counters;
  const size_t bytes = most * sizeof(uint32_t);
  return static_cast<uint32_t*>(counters.of(device, stream, bytes));
}

}  // namespace flashattn3
