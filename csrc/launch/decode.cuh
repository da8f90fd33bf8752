// Launch of one decode kernel.
#pragma once

#include <cuda_runtime.h>

#include "decode/join_prefix.cuh"
#include "decode/kernel.cuh"
#include "decode/warp_kernel.cuh"
#include "decode/warp_share_kernel.cuh"
#include "launch/byte_arguments.h"
#include "launch/decode_arguments.h"
#include "launch/decode_params.h"
#include "launch/launch.cuh"
#include "launch/prefix_arguments.h"
#include "launch/tree_arguments.h"
#include "launch/warp_arguments.h"

namespace flashattn3 {

template <decode::Config kConfig, bool kPlain = false>
constexpr auto decode_kernel() {
  return &decode::decode_kernel<decode::KernelTraits<kConfig, kPlain>>;
}

// Returns the size of a launch at any lengths: tensors and lengths are not read. Without split
// work tiles and spans there is no workspace.
template <decode::Config kConfig>
LaunchSize decode_size(const char* name, const DecodeParams& params) {
  check_decode(name, kConfig, params);
  if (!decode::has_one_kernel(kConfig) && uses_warp_kernel(params, kConfig)) {
    const DecodeGrid grid = warp_grid(params, kConfig);
    const int records = num_part_records(params, grid);
    return {.num_ctas = grid.num_ctas,
            .workspace_bytes = records > 0 ? decode::PartMemory::bytes(records) : 0,
            .on_warps = true};
  }
  const bool of_shares = uses_warp_shares(params, kConfig);
  const DecodeGrid grid =
      DecodeGrid::of(params, of_shares ? config_of_shares(params, kConfig) : kConfig);
  const int64_t of_parts =
      grid.whole_tiles && !kConfig.spans ? 0 : grid.workspace_bytes(params.head_dim_v);
  return {.num_ctas = grid.num_ctas,
          .workspace_bytes = of_parts + (kConfig.prefix ? result_bytes(params) : 0),
          .on_warps = of_shares};
}

// Enqueues the kernel of a config for all calls, or that for plain ones.
template <decode::Config kConfig, bool kPlain = false>
void launch_decode_kernel(const char* name, const DecodeParams& params, cudaStream_t stream) {
  constexpr auto kKernel = decode_kernel<kConfig, kPlain>();
  // A call that leaves SMs free asks for so much shared memory that no two CTAs share an SM.
  constexpr int kOfOne = std::max(decode::smem_bytes(kConfig), 116 * 1024);
  const DecodeGrid grid = DecodeGrid::of(params, kConfig);
  const int shared_bytes =
      params.leaves_sms ? kOfOne : decode::smem_bytes(kConfig, 1 << grid.log2_stages);
  allow_shared_memory<kKernel>(kOfOne);
  launch_kernel(name, "", kKernel,
                {static_cast<unsigned>(grid.num_ctas), decode::num_threads(kConfig), shared_bytes},
                stream, params.pdl, arguments_of<kConfig>(params, grid));
}

// Enqueues the kernel that joins the results of the sequences and those of their prefix.
template <decode::Config kConfig>
void launch_join(const char* name, const DecodeParams& params, cudaStream_t stream) {
  const decode::JoinArguments args = make_join_arguments(params);
  launch_kernel(name, " (join)", &decode::join_prefix<kConfig.dtype>,
                {static_cast<unsigned>(num_join_ctas(params)), decode::kJoinThreads}, stream,
                params.pdl, args);
}

// Enqueues the warp kernel that takes the call.
template <decode::Config kConfig>
void launch_warp_kernel(const char* name, const DecodeParams& params, cudaStream_t stream) {
  const DecodeGrid grid = warp_grid(params, kConfig);
  with_warp_traits<kConfig>(params, [&]<class Traits>(Traits) {
    constexpr auto kKernel = &decode::warp_kernel<Traits>;
    constexpr int kSharedBytes = sizeof(decode::WarpStorage<Traits>);
    allow_shared_memory<kKernel>(kSharedBytes);
    launch_kernel(name, "", kKernel,
                  {static_cast<unsigned>(grid.num_ctas), Traits::kThreads, kSharedBytes}, stream,
                  params.pdl, make_warp_arguments<kConfig>(params, grid));
  });
}

// Enqueues the warp kernel of equal shares.
template <decode::Config kConfig>
void launch_warp_shares(const char* name, const DecodeParams& params, cudaStream_t stream) {
  with_row_tiles<kConfig>(params, [&]<int kRowTiles>() {
    constexpr decode::Config kOfShares = decode::of_warp_shares(kConfig, kRowTiles);
    using Traits = decode::WarpShareTraits<kOfShares, kRowTiles>;
    constexpr auto kKernel = &decode::warp_share_kernel<Traits>;
    constexpr int kSharedBytes = sizeof(decode::WarpShareStorage<kOfShares, kRowTiles>);
    const DecodeGrid grid = DecodeGrid::of(params, kOfShares);
    allow_shared_memory<kKernel>(kSharedBytes);
    launch_kernel(name, "", kKernel,
                  {static_cast<unsigned>(grid.num_ctas), Traits::kThreads, kSharedBytes}, stream,
                  params.pdl, arguments_of<kConfig>(params, grid, Traits::kBlockN));
  });
}

// Enqueues the kernel asynchronously. name: of the kernel config. Throws std::runtime_error for a
// problem that the kernel does not take and for a failed launch. Nothing is launched without rows.
template <decode::Config kConfig>
void launch_decode(const char* name, const DecodeParams& params, cudaStream_t stream) {
  check_decode(name, kConfig, params);
  const int64_t queries = params.cu_seqlens_q != nullptr ? params.total_q : params.seqlen_q;
  if (params.batch <= 0 || queries <= 0 || params.num_heads_q <= 0) return;
  expect_tree<kConfig.tree>(name, params);
  expect_prefix<kConfig.prefix>(name, params);
  if constexpr (decode::has_one_kernel(kConfig)) {
    launch_decode_kernel<kConfig>(name, params, stream);
    if constexpr (kConfig.prefix) launch_join<kConfig>(name, params, stream);
  } else if (uses_warp_kernel(params, kConfig)) {
    launch_warp_kernel<kConfig>(name, params, stream);
  } else if constexpr (decode::has_bytes(kConfig)) {
    if (uses_warp_shares(params, kConfig)) {
      launch_warp_shares<kConfig>(name, params, stream);
    } else {
      launch_decode_kernel<kConfig>(name, params, stream);
    }
  } else if (is_plain(params, kConfig)) {
    launch_decode_kernel<kConfig, true>(name, params, stream);
  } else {
    launch_decode_kernel<kConfig, false>(name, params, stream);
  }
}

}  // namespace flashattn3
