// Whether a stream records a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include "launch/errors.h"

namespace flashattn3 {

inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(stream, &status), "asking whether the stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace flashattn3
