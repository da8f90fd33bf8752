// Tells whether a stream is captured, and lets a thread call CUDA functions during a capture.
#pragma once

#include <cuda_runtime.h>

#include "launch/errors.h"

namespace flashattn3 {

// The capture of a stream. number: no other capture of the process has it; 0: there is none.
struct Capture {
  unsigned long long number = 0;
  cudaGraph_t graph = nullptr;

  static Capture of(cudaStream_t stream) {
    Capture capture;
    cudaStreamCaptureStatus status;
#if CUDART_VERSION >= 13000
    const auto ask = &cudaStreamGetCaptureInfo;
    const cudaError_t asked =
        ask(stream, &status, &capture.number, &capture.graph, nullptr, nullptr, nullptr);
#else
    const auto ask = &cudaStreamGetCaptureInfo_v2;
    const cudaError_t asked =
        ask(stream, &status, &capture.number, &capture.graph, nullptr, nullptr);
#endif
    check_cuda(asked, "asking whether the stream is captured");
    return status == cudaStreamCaptureStatusActive ? capture : Capture();
  }
};

// While it lives, the calling thread is in the relaxed capture mode: cudaMalloc, for one, would
// else invalidate a capture that this thread or another one has begun.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&before_), "changing the capture mode");
  }
  ~RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&before_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace flashattn3
