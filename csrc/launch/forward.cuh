// Launch of one forward kernel. The generated unit of each kernel config instantiates
//   template void flashattn3::launch_forward<row>(const ForwardParams&, cudaStream_t);
//   template const void* flashattn3::forward_entry<row>();
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <string>

#include "forward/kernel.cuh"
#include "launch/errors.h"
#include "launch/forward_config.h"
#include "launch/launch.cuh"
#include "launch/params.h"
#include "launch/tensor_map.h"
#include "launch/varlen.h"

namespace flashattn3 {

inline std::string describe(const forward::Config& config) {
  return std::string("forward_") + element_name(config.dtype) + "_d" +
         std::to_string(config.head_dim) + (config.masked ? "_windowed_" : "_full_") +
         std::to_string(config.block_m) + "x" + std::to_string(config.block_n);
}

inline TileSchedulerParams make_forward_scheduler_params(const forward::Config& config,
                                                         const ForwardParams& params) {
  const int64_t m_blocks = (int64_t{params.seqlen_q} + config.block_m - 1) / config.block_m;
  const int64_t heads = static_cast<int64_t>(params.num_heads_q) * params.batch;
  const int64_t tiles =
      params.num_heads_q * tiles_of_batch(config.block_m, params.seqlen_q, params.batch,
                                          params.cu_seqlens_q, params.total_q);
  if (std::max(tiles, heads) > INT_MAX / 2) {
    fail("launch of " + describe(config), "more than 2^30 tiles");
  }
  const int64_t l2_group = params.num_heads_q / params.num_heads_kv;
  int64_t last_l2_group = l2_group;
  while (config.masked && last_l2_group < heads && last_l2_group * m_blocks < params.num_sms) {
    last_l2_group = std::min(heads, 2 * last_l2_group);
  }
  TileSchedulerParams scheduler;
  scheduler.num_blocks = static_cast<int>(m_blocks);
  scheduler.num_batch_heads = static_cast<int>(heads);
  scheduler.num_tiles = static_cast<int>(tiles);
  scheduler.l2_group_heads = static_cast<int>(l2_group);
  scheduler.last_l2_group_heads = static_cast<int>(last_l2_group);
  scheduler.last_block_first = config.masked;
  scheduler.tile_counter = params.tile_counter;
  scheduler.varlen = {params.cu_seqlens_q != nullptr ? params.varlen_schedule : nullptr,
                      params.batch};
  return scheduler;
}

inline Descale descale_of(const BlockDescales& descales) {
  return {.data = descales.data,
          .batch = descales.batch,
          .head = descales.head,
          .block = descales.block,
          // With one block this has no effect: its index is always last_block.
          .log2_tokens =
              static_cast<int>(std::bit_width(static_cast<unsigned>(descales.block_tokens))) - 1,
          .last_block = descales.num_blocks - 1,
          .heads_per_descale = descales.heads_per_descale};
}

template <forward::Config kConfig>
int64_t promoted_bytes(const ForwardParams& params) {
  return forward::promoted_bytes(kConfig, params.num_sms, params.seqlen_k);
}

inline forward::QuantizedArguments quantized_arguments(const ForwardParams& params) {
  const QuantizedParams& given = params.quantized;
  return {.q = descale_of(given.q),
          .k = descale_of(given.k),
          .v = descale_of(given.v),
          .out_is_fp16 = given.out_is_fp16,
          .promoted = static_cast<float4*>(given.promoted)};
}

template <forward::Config kConfig>
forward::Arguments make_forward_arguments(const ForwardParams& params) {
  const bool varlen_q = params.cu_seqlens_q != nullptr;
  const bool varlen_k = params.cu_seqlens_k != nullptr;
  const TensorMapShape q_shape{params.head_dim, varlen_q ? params.total_q : params.seqlen_q,
                               params.num_heads_q, varlen_q ? 1 : params.batch};
  const TensorMapShape k_shape{params.head_dim, varlen_k ? params.total_k : params.seqlen_k,
                               params.num_heads_kv, varlen_k ? 1 : params.batch};
  const TensorMapShape v_shape{params.head_dim_v, k_shape.seq, k_shape.heads, k_shape.batch};
  constexpr bool kQuantized = is_quantized(kConfig.dtype);
  forward::Arguments args;
  args.q = make_tensor_map("q", kConfig.dtype, params.q, params.q, q_shape, params.q_stride,
                           kConfig.block_m);
  args.k = make_tensor_map("k", kConfig.dtype, params.k, params.q, k_shape, params.k_stride,
                           kConfig.block_n);
  if constexpr (kQuantized) {
    args.v = make_permuted_v_map(params.v, params.q, params.quantized.num_permuted_keys,
                                 k_shape.heads * k_shape.batch, kConfig.head_dim, kConfig.block_n);
    args.quantized = quantized_arguments(params);
  } else {
    args.v = make_tensor_map("v", kConfig.dtype, params.v, params.q, v_shape, params.v_stride,
                             kConfig.block_n);
  }
  const TensorMapShape out_shape{params.head_dim_v, q_shape.seq, q_shape.heads, q_shape.batch};
  const ElementType out_type = !kQuantized                    ? kConfig.dtype
                               : params.quantized.out_is_fp16 ? ElementType::kFloat16
                                                              : ElementType::kBFloat16;
  args.out_map = make_tensor_map("out", out_type, params.out, params.q, out_shape,
                                 params.out_stride, kRowsOfWarp);
  args.out = static_cast<uint16_t*>(params.out);
  args.lse = params.lse;
  args.out_batch = varlen_q ? 0 : params.out_stride.batch;
  args.out_seq = params.out_stride.seq;
  args.out_head = params.out_stride.head;
  args.lse_batch = varlen_q ? 0 : params.lse_stride.batch;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.seqlens_q = {params.cu_seqlens_q, params.seqused_q, params.seqlen_q, params.total_q};
  // Without keys, kernels load none, whatever cu_seqlens_k and seqused_k hold.
  const bool no_keys = k_shape.seq == 0 || params.k == nullptr || params.v == nullptr;
  args.seqlens_k = {params.cu_seqlens_k, params.seqused_k, no_keys ? 0 : params.seqlen_k,
                    params.total_k};
  args.scheduler = make_forward_scheduler_params(kConfig, params);
  args.num_heads_q = params.num_heads_q;
  args.num_heads_kv = params.num_heads_kv;
  args.qhead_per_kvhead = params.num_heads_q / params.num_heads_kv;
  args.head_dim_v = params.head_dim_v;
  const Windows windows = windows_of(params);
  args.window_left = windows.left;
  args.window_right = windows.right;
  const ScoreScales scales = score_scales_of(params);
  args.tanh_scale = scales.tanh;
  args.score_scale = scales.score;
  args.one_over_cap = 0.f;
  if (kQuantized && scales.tanh != 0.f) {
    args.score_scale = params.softmax_scale * kLog2e;
    args.one_over_cap = 1.f / scales.score;
  }
  return args;
}

// Enqueues the kernel asynchronously. Throws std::runtime_error, naming the kernel config, the grid
// and the shared memory. Without query rows nothing is launched; if no row belongs to a sequence,
// only the kernel that clears them.
template <forward::Config kConfig>
void launch_forward(const ForwardParams& params, cudaStream_t stream) {
  const bool varlen = params.cu_seqlens_q != nullptr;
  if (params.num_heads_q <= 0 || (varlen && params.total_q <= 0)) return;
  const auto refuse = [](const char* why) { fail("launch of " + describe(kConfig), why); };
  if (params.head_dim > kConfig.head_dim || params.head_dim_v > kConfig.head_dim) {
    refuse("the head dim is larger than the kernel config's");
  }
  if (!kConfig.masked && (params.window_left >= 0 || params.window_right >= 0)) {
    refuse("a window needs a masked kernel config");
  }
  if (varlen) launch_varlen_forward(params, kConfig.block_m, stream);
  if (params.batch <= 0 || params.seqlen_q <= 0) return;
  const forward::Arguments args = make_forward_arguments<kConfig>(params);
  allow_shared_memory<forward::attention_kernel<forward::KernelTraits<kConfig>>>(
      forward::smem_bytes(kConfig));
  const int grid =
      std::max(1, std::min(params.num_sms - params.sm_margin, args.scheduler.num_tiles));
  const bool pdl = params.tile_counter != nullptr;  // null: may be in a graph capture
  launch_kernel([] { return describe(kConfig); },
                forward::attention_kernel<forward::KernelTraits<kConfig>>, dim3(grid),
                forward::num_threads(kConfig), forward::smem_bytes(kConfig), stream, pdl, args);
}

// The kernel's entry, for cudaFuncGetAttributes. Threads and shared memory:
// forward::num_threads(kConfig), forward::smem_bytes(kConfig).
template <forward::Config kConfig>
const void* forward_entry() {
  return reinterpret_cast<const void*>(&forward::attention_kernel<forward::KernelTraits<kConfig>>);
}

}  // namespace flashattn3
