// Whether a stream records a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include "launch/errors.h"

namespace flashattn3 {

// Number of the capture, which no other capture of the process has; 0 if the stream is not
// captured.
inline unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long number = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &number),
             "asking whether the stream is captured");
  return status == cudaStreamCaptureStatusActive ? number : 0;
}

inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(stream, &status), "asking whether the stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace flashattn3
