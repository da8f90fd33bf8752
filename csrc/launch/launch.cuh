// Helpers that the forward and the backward launches share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "launch/errors.h"
#include "launch/params.h"

namespace flashattn3 {

// Window sizes. An unbounded (negative) side becomes max(seqlen_q, seqlen_k), which no distance of
// two positions exceeds.
struct Windows {
  int left, right;
};
inline Windows windows_of(const ForwardParams& params) {
  const int widest = std::max(params.seqlen_q, params.seqlen_k);
  return {params.window_left < 0 ? widest : std::min(params.window_left, widest),
          params.window_right < 0 ? widest : std::min(params.window_right, widest)};
}

// Upper bound on the number of tiles of all sequences of a batch. With cu_seqlens the sequences
// share `total` tokens, and the longest may be far longer than the others.
inline int64_t tiles_of_batch(int tile_rows, int longest, int batch, const int32_t* cu_seqlens,
                              int total) {
  const int64_t alike = (int64_t{longest} + tile_rows - 1) / tile_rows * batch;
  return cu_seqlens == nullptr ? alike : std::min(alike, int64_t{total} / tile_rows + batch);
}

// Factors that convert scores to log2 units. Softcap's tanh is 2 sigmoid(tanh * score) - 1.
struct ScoreScales {
  float score, tanh;  // tanh 0: no cap
};
constexpr float kLog2e = 1.44269504088896f;
inline ScoreScales score_scales_of(const ForwardParams& params) {
  // tanh is 0 if the scores are all 0 or too small for the cap to matter.
  const float tanh =
      params.softcap > 0.f ? 2.f * kLog2e * params.softmax_scale / params.softcap : 0.f;
  return {(tanh != 0.f ? params.softcap : params.softmax_scale) * kLog2e, tanh};
}

// Sets the kernel's limit of dynamic shared memory on the current device, once per device.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (device < 64 && (allowed.load(std::memory_order_relaxed) & bit)) return;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of a kernel");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

// Enqueues a kernel. name: a function that returns the kernel's name for an error message. pdl: the
// CTAs may start while the previous kernel ends.
template <class Name, class Arguments>
void launch_kernel(Name name, void (*kernel)(Arguments), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream, bool pdl, const Arguments& args) {
  cudaLaunchAttribute pdl_attribute;
  pdl_attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl_attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &pdl_attribute;
  config.numAttrs = pdl ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args);
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  fail("launch of " + name() + " on " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
           " x " + std::to_string(grid.z) + " CTAs with " + std::to_string(shared_bytes) +
           " bytes of shared memory",
       cudaGetErrorString(status));
}

}  // namespace flashattn3
