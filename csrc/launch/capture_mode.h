// Lets a thread call what a stream capture does not permit.
#pragma once

#include <cuda_runtime.h>

#include "launch/errors.h"

namespace flashattn3 {

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
