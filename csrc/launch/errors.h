// Reports failures of the CUDA runtime and driver as exceptions, without waiting for the device or
// ending the process.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flashattn3 {

[[noreturn]] inline void fail(const std::string& what, const std::string& why) {
  throw std::runtime_error("flashattn3: " + what + ": " + why);
}

// what: subject of the error message. A caller that has to compose it (kernel config, grid, shared
// memory) does so only after a failure and calls fail().
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // So that the next call does not report this failure again.
  fail(what, cudaGetErrorString(status));
}

inline void check_driver(CUresult status, const char* what) {
  // The message for an error code is in libcuda, which is not linked.
  if (status != CUDA_SUCCESS) fail(what, "CUDA driver error " + std::to_string(status));
}

}  // namespace flashattn3
