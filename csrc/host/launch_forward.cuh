// The launch of one forward kernel. Included by the generated unit of each row, which instantiates
//   template void flashattn3::launch_forward<row>(const ForwardParams&, cudaStream_t);
//   template const void* flashattn3::forward_entry<row>();
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <string>

#include "host/errors.h"
#include "host/forward_row.h"
#include "host/launch.cuh"
#include "host/params.h"
#include "host/prepare_ragged.h"
#include "host/tensor_map.h"
#include "kernels/forward/kernel.cuh"

namespace flashattn3 {

inline std::string describe(const ForwardRow& row) {
  return std::string("forward_") + element_name(row.dtype) + "_d" + std::to_string(row.head_dim) +
         (row.windowed ? "_windowed_" : "_full_") + std::to_string(row.block_m) + "x" +
         std::to_string(row.block_n);
}

inline TileOrder make_tile_order(const ForwardRow& row, const ForwardParams& params) {
  const int64_t row_blocks = (int64_t{params.seqlen_q} + row.block_m - 1) / row.block_m;
  const int64_t heads = static_cast<int64_t>(params.num_heads_q) * params.batch;
  const int64_t tiles =
      params.num_heads_q * tiles_of_batch(row.block_m, params.seqlen_q, params.batch,
                                          params.cu_seqlens_q, params.total_q);
  if (std::max(tiles, heads) > INT_MAX / 2) {
    fail("launch of " + describe(row), "more than 2^30 tiles");
  }
  const int64_t section = params.num_heads_q / params.num_heads_kv;
  int64_t last_section = section;
  while (row.windowed && last_section < heads && last_section * row_blocks < params.num_sms) {
    last_section = std::min(heads, 2 * last_section);
  }
  TileOrder order;
  order.num_row_blocks = static_cast<int>(row_blocks);
  order.num_heads_total = static_cast<int>(heads);
  order.num_tiles = static_cast<int>(tiles);
  order.section_heads = static_cast<int>(section);
  order.last_section_heads = static_cast<int>(last_section);
  order.last_rows_first = row.windowed;
  order.counter = params.tile_counter;
  order.ragged = {params.cu_seqlens_q != nullptr ? params.ragged_order : nullptr, params.batch};
  return order;
}

inline Descale descale_of(const BlockDescales& descales) {
  return {.data = descales.data,
          .batch = descales.batch,
          .head = descales.head,
          .block = descales.block,
          // Where there is one block, its index is last_block whatever this is.
          .log2_tokens =
              static_cast<int>(std::bit_width(static_cast<unsigned>(descales.block_tokens))) - 1,
          .last_block = descales.num_blocks - 1,
          .heads_per_scale = descales.heads_per_scale};
}

template <ForwardRow kRow>
int64_t promoted_bytes(const ForwardParams& params) {
  return forward_promoted_bytes(kRow, params.num_sms, params.seqlen_k);
}

inline QuantizedArguments quantized_arguments(const ForwardParams& params) {
  const QuantizedParams& given = params.quantized;
  return {.q = descale_of(given.q),
          .k = descale_of(given.k),
          .v = descale_of(given.v),
          .out_is_fp16 = given.out_is_fp16,
          .promoted = static_cast<float4*>(given.promoted)};
}

template <ForwardRow kRow>
ForwardArguments make_forward_arguments(const ForwardParams& params) {
  const bool variable_q = params.cu_seqlens_q != nullptr;
  const bool variable_k = params.cu_seqlens_k != nullptr;
  const TensorMapShape q_shape{params.head_dim, variable_q ? params.total_q : params.seqlen_q,
                               params.num_heads_q, variable_q ? 1 : params.batch};
  const TensorMapShape k_shape{params.head_dim, variable_k ? params.total_k : params.seqlen_k,
                               params.num_heads_kv, variable_k ? 1 : params.batch};
  const TensorMapShape v_shape{params.head_dim_v, k_shape.seq, k_shape.heads, k_shape.batch};
  constexpr bool kQuantized = is_quantized(kRow.dtype);
  ForwardArguments args;
  args.q =
      make_tensor_map("q", kRow.dtype, params.q, params.q, q_shape, params.q_stride, kRow.block_m);
  args.k =
      make_tensor_map("k", kRow.dtype, params.k, params.q, k_shape, params.k_stride, kRow.block_n);
  if constexpr (kQuantized) {
    args.v = make_slots_map(params.v, params.q, params.quantized.num_slots,
                            k_shape.heads * k_shape.batch, kRow.head_dim, kRow.block_n);
    args.quantized = quantized_arguments(params);
  } else {
    args.v = make_tensor_map("v", kRow.dtype, params.v, params.q, v_shape, params.v_stride,
                             kRow.block_n);
  }
  const TensorMapShape out_shape{params.head_dim_v, q_shape.seq, q_shape.heads, q_shape.batch};
  const ElementType out_type = !kQuantized                    ? kRow.dtype
                               : params.quantized.out_is_fp16 ? ElementType::kFloat16
                                                              : ElementType::kBFloat16;
  args.out_map = make_tensor_map("out", out_type, params.out, params.q, out_shape,
                                 params.out_stride, kRowsOfWarp);
  args.out = static_cast<uint16_t*>(params.out);
  args.lse = params.lse;
  args.out_batch = variable_q ? 0 : params.out_stride.batch;
  args.out_seq = params.out_stride.seq;
  args.out_head = params.out_stride.head;
  args.lse_batch = variable_q ? 0 : params.lse_stride.batch;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.rows = {params.cu_seqlens_q, params.seqused_q, params.seqlen_q, params.total_q};
  // Keys that are not there are never asked for, whatever the length tables say.
  const bool no_keys = k_shape.seq == 0 || params.k == nullptr || params.v == nullptr;
  args.keys = {params.cu_seqlens_k, params.seqused_k, no_keys ? 0 : params.seqlen_k,
               params.total_k};
  args.order = make_tile_order(kRow, params);
  args.num_heads_q = params.num_heads_q;
  args.num_heads_kv = params.num_heads_kv;
  args.heads_per_kv = params.num_heads_q / params.num_heads_kv;
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

// Enqueues the kernel; waits for nothing. Throws std::runtime_error, naming the row, the grid and
// the shared memory. Without a query row nothing is launched, and with rows that all belong to no
// sequence only what clears them.
template <ForwardRow kRow>
void launch_forward(const ForwardParams& params, cudaStream_t stream) {
  const bool ragged = params.cu_seqlens_q != nullptr;
  if (params.num_heads_q <= 0 || (ragged && params.total_q <= 0)) return;
  const auto refuse = [](const char* why) { fail("launch of " + describe(kRow), why); };
  if (params.head_dim > kRow.head_dim || params.head_dim_v > kRow.head_dim) {
    refuse("the head dim is larger than the row's");
  }
  if (!kRow.windowed && (params.window_left >= 0 || params.window_right >= 0)) {
    refuse("a window needs a windowed row");
  }
  if (ragged) prepare_ragged_forward(params, kRow.block_m, stream);
  if (params.batch <= 0 || params.seqlen_q <= 0) return;
  const ForwardArguments args = make_forward_arguments<kRow>(params);
  allow_shared_memory<forward_attention<ForwardConfig<kRow>>>(forward_shared_bytes(kRow));
  const int grid = std::max(1, std::min(params.num_sms - params.sm_margin, args.order.num_tiles));
  const bool early = params.tile_counter != nullptr;  // null: perhaps in a graph capture
  launch_kernel([] { return describe(kRow); }, forward_attention<ForwardConfig<kRow>>, dim3(grid),
                forward_num_threads(kRow), forward_shared_bytes(kRow), stream, early, args);
}

// The kernel's entry, for cudaFuncGetAttributes. Threads and shared memory:
// forward_num_threads(kRow), forward_shared_bytes(kRow).
template <ForwardRow kRow>
const void* forward_entry() {
  return reinterpret_cast<const void*>(&forward_attention<ForwardConfig<kRow>>);
}

}  // namespace flashattn3
