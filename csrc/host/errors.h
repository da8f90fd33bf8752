// Failures of the CUDA runtime and driver as exceptions. Nothing here waits for the device or leaves
// the process.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flashattn3 {

// what: the sentence's subject, such as "forward_bf16_d128_full_128x128 (grid 132, shared memory
// 198656 bytes)".
inline void check_cuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // So that the next call does not report this failure again.
  throw std::runtime_error("flashattn3: " + what + ": " + cudaGetErrorString(status));
}

// For driver calls, whose messages only the driver itself could give.
inline void check_driver(CUresult status, const std::string& what) {
  if (status == CUDA_SUCCESS) return;
  throw std::runtime_error("flashattn3: " + what + ": CUDA driver error " +
                           std::to_string(static_cast<int>(status)));
}

}  // namespace flashattn3
