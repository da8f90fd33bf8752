// Reports failures of the CUDA runtime and driver as exceptions, without waiting for the device or
// ending the process.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace flashattn3 {

[[noreturn]] inline void fail(const std::string& what, const std::string& why) {
  throw std::runtime_error("flashattn3: " + what + ": " + why);
}

// Throws "function: what must be wanted, got found" unless the condition holds, as the functions of
// flashattn3/errors.py do.
template <class Wanted, class Found>
void expect(bool condition, const char* function, const char* what, const Wanted& wanted,
            const Found& found) {
  if (condition) return;
  std::ostringstream sentence(std::ios_base::out);  // the default one is new in GCC 9
  sentence << function << ": " << what << " must be " << wanted << ", got " << found;
  throw std::runtime_error(sentence.str());
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
