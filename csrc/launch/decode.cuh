// Launch of one decode kernel.
#pragma once

#include <cuda_runtime.h>

#include "decode/kernel.cuh"
#include "launch/decode_arguments.h"
#include "launch/decode_params.h"
#include "launch/launch.cuh"

namespace flashattn3 {

template <decode::Config kConfig>
constexpr auto decode_kernel() {
  return &decode::decode_kernel<decode::KernelTraits<kConfig>>;
}

// Returns the size of a launch at any lengths: tensors and lengths are not read. Without split
// work tiles there is no workspace.
template <decode::Config kConfig>
LaunchSize decode_size(const char* name, const DecodeParams& params) {
  check_decode(name, kConfig.head_dim, kConfig.block_n, params);
  const int num_ctas = num_decode_ctas(params, kConfig.block_n);
  return {.num_ctas = num_ctas,
          .workspace_bytes =
              params.whole_tiles ? 0 : decode_workspace_bytes(num_ctas, params.head_dim_v),
          .num_counters = params.whole_tiles ? 0 : num_ctas * kPartialCountersPerCta};
}

// Enqueues the kernel asynchronously. name: of the kernel config. Throws std::runtime_error for a
// problem that the kernel does not take and for a failed launch. Nothing is launched without rows.
template <decode::Config kConfig>
void launch_decode(const char* name, const DecodeParams& params, cudaStream_t stream) {
  check_decode(name, kConfig.head_dim, kConfig.block_n, params);
  const int64_t queries = params.cu_seqlens_q != nullptr ? params.total_q : params.seqlen_q;
  if (params.batch <= 0 || queries <= 0 || params.num_heads_q <= 0) return;
  constexpr auto kKernel = decode_kernel<kConfig>();
  constexpr int kSharedBytes = decode::smem_bytes(kConfig);
  allow_shared_memory<kKernel>(kSharedBytes);
  const int num_ctas = num_decode_ctas(params, kConfig.block_n);
  launch_kernel(name, "", kKernel,
                {static_cast<unsigned>(num_ctas), decode::kThreads, kSharedBytes}, stream,
                params.pdl, make_decode_arguments(params, num_ctas, kConfig.block_n));
}

}  // namespace flashattn3
