// Launch of one forward kernel. Included by the generated units of forward configs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "forward/roles.cuh"
#include "launch/bias.h"
#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/params.h"
#include "launch/tensor_map.h"
#include "launch/varlen.h"

namespace flashattn3 {

template <forward::Config kConfig>
constexpr auto forward_kernel() {
  return &forward::attention_kernel<forward::RolesOf<kConfig>>;
}

// The query heads that share a KV head have work tiles together in cached configs, else each its
// own. Few slices go to as many SMs: with a slice for each of its warpgroups a tile would take
// longer, and leave SMs without one.
template <forward::Config kConfig>
TileShape forward_tile_shape(const AttentionProblem& problem) {
  constexpr int kRows = forward::query_box_rows(kConfig), kSlices = kConfig.block_m / kRows;
  TileShape shape{.rows = kRows, .slices = kSlices};
  if constexpr (kConfig.cached) {
    shape.heads = problem.num_heads_q / problem.num_heads_kv;
    if (!problem.varlen) {
      const TileShape single{.rows = kRows, .slices = 1, .heads = shape.heads};
      const int64_t slices =
          single.num_blocks(problem.seqlen_q) * problem.batch * problem.num_heads_kv;
      shape.slices = static_cast<int>(
          std::clamp<int64_t>((slices + problem.num_sms - 1) / problem.num_sms, 1, kSlices));
    }
  }
  return shape;
}

template <forward::Config kConfig>
WorkTiles forward_tiles(const AttentionProblem& problem) {
  TileShape shape = forward_tile_shape<kConfig>(problem);
  if constexpr (kConfig.listed) shape = {.rows = kListRows};  // the order is that of row blocks
  return {.shape = shape,
          .longest = problem.seqlen_q,
          .total = problem.total_q,
          .num_heads = problem.num_heads_q / shape.heads,
          .l2_group_heads = problem.num_heads_q / problem.num_heads_kv / shape.heads,
          .last_group_tiles = kConfig.masked ? problem.num_sms : 0,
          .last_block_first = kConfig.masked && !kConfig.listed};
}

template <forward::Config kConfig>
void check_problem(const char* name, const AttentionProblem& problem) {
  check_fits(name, kConfig, problem);
  if constexpr (forward::OptionTraits<kConfig>::kJoined) {
    const std::string wanted = "at most " + std::to_string(kMostJoinedColumns);
    expect(problem.seqlen_k <= kMostJoinedColumns, "launch", "seqlen_k",
           wanted + " for " + std::string(name), problem.seqlen_k);
  }
  if (kConfig.masked || !problem.masked()) return;
  const std::string wanted = "-1 for " + std::string(name);
  expect(problem.window_left < 0, "launch", "window_left", wanted, problem.window_left);
  expect(problem.window_right < 0, "launch", "window_right", wanted, problem.window_right);
}

// Throws for slopes, or a wish for the largest score, that the kernel does not read.
template <auto kConfig>
void expect_scores_of(const char* name, const ForwardParams& params) {
  const std::string none = "none for " + std::string(name);
  const bool slopes = params.alibi_slopes != nullptr, largest = params.max_logit != nullptr;
  expect(!slopes || has_slopes(kConfig.term), "launch", "alibi_slopes", none, "some");
  expect(!largest || kConfig.term == ScoreTerm::kLargest, "launch", "max_logit", none, "one");
}

template <forward::Config kConfig>
LaunchSize forward_size(const char* name, const AttentionProblem& problem) {
  check_problem<kConfig>(name, problem);
  const int64_t tiles = num_tiles(problem, forward_tiles<kConfig>(problem));
  const int64_t promoted =
      problem.use_fast_accum ? 0
                             : forward::promoted_bytes(kConfig, problem.num_sms, problem.seqlen_k);
  return {.num_ctas = num_persistent_ctas(problem, tiles), .workspace_bytes = promoted};
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

inline forward::QuantizedArguments quantized_arguments(const ForwardParams& params) {
  const QuantizedParams& given = params.quantized;
  return {.q = descale_of(given.q),
          .k = descale_of(given.k),
          .v = descale_of(given.v),
          .out_is_fp16 = params.out_is_fp16,
          .promoted = static_cast<float4*>(given.promoted)};
}

// Sets what does not depend on where K and V are.
template <forward::Config kConfig>
void set_query_arguments(forward::Arguments& args, const ForwardParams& params) {
  const bool varlen = params.varlen;
  constexpr bool kQuantized = is_quantized(kConfig.dtype);
  const TensorMapShape q_shape{params.head_dim, varlen ? params.total_q : params.seqlen_q,
                               params.num_heads_q, varlen ? 1 : params.batch};
  args.q = make_tensor_map("q", kConfig.dtype, params.q, params.q, q_shape, params.q_stride,
                           forward::query_box_rows(kConfig));
  const TensorMapShape out_shape{params.head_dim_v, q_shape.seq, q_shape.heads, q_shape.batch};
  const ElementType out_type = !kQuantized          ? kConfig.dtype
                               : params.out_is_fp16 ? ElementType::kFloat16
                                                    : ElementType::kBFloat16;
  args.out_map = make_tensor_map("out", out_type, params.out, params.q, out_shape,
                                 params.out_stride, kRowsOfWarp);
  args.out = static_cast<uint16_t*>(params.out);
  args.lse = params.lse;
  args.out_batch = varlen ? 0 : params.out_stride.batch;
  args.out_seq = params.out_stride.seq;
  args.out_head = params.out_stride.head;
  args.lse_batch = varlen ? 0 : params.lse_stride.batch;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.seqlens_q = seqlens_q_of(params);
  args.scheduler = make_scheduler_params(params, forward_tiles<kConfig>(params));
  args.num_heads_q = params.num_heads_q;
  args.num_heads_kv = params.num_heads_kv;
  args.qhead_per_kvhead = params.num_heads_q / params.num_heads_kv;
  args.head_dim_v = params.head_dim_v;
  args.variant.window = window_of(params);
  args.sinks = {params.sinks, params.sink_type};
  args.slopes = {params.alibi_slopes, params.alibi_batch};
  args.max_logit = params.max_logit;
}

// Sets what a bias adds: its map, scores in its units, and the order of work tiles.
template <forward::Config kConfig>
void set_bias_arguments(forward::BiasArguments& args, const ForwardParams& params) {
  const BiasParams& bias = params.bias;
  args.bias = make_bias_map("bias", kConfig.dtype, bias, params, kConfig.block_m);
  args.heads_differ = !bias.one_head, args.sequences_differ = !bias.one_sequence;
  args.batch = params.batch;
  args.variant.scale.factor *= 0.693147180559945f;  // ln 2: not in log2 units
  args.scheduler.heads = heads_with_bias(params, forward_tiles<kConfig>(params));
}

template <forward::Config kConfig>
auto make_forward_arguments(const ForwardParams& params) {
  using Traits = forward::KernelTraits<kConfig>;
  const TensorMapShape k_shape{params.head_dim, params.varlen ? params.total_k : params.seqlen_k,
                               params.num_heads_kv, params.varlen ? 1 : params.batch};
  const TensorMapShape v_shape{params.head_dim_v, k_shape.seq, k_shape.heads, k_shape.batch};
  constexpr bool kQuantized = is_quantized(kConfig.dtype);
  typename forward::RolesOf<kConfig>::Arguments args;
  set_query_arguments<kConfig>(args, params);
  args.k = make_tensor_map("k", kConfig.dtype, params.k, params.q, k_shape, params.k_stride,
                           Traits::kBoxKeys);
  if constexpr (kQuantized) {
    args.v = make_permuted_v_map(params.v, params.q, params.quantized.num_permuted_keys,
                                 k_shape.heads * k_shape.batch, kConfig.head_dim, Traits::kBoxKeys);
    args.quantized = quantized_arguments(params);
  } else {
    args.v = make_tensor_map("v", kConfig.dtype, params.v, params.q, v_shape, params.v_stride,
                             Traits::kBoxKeys);
  }
  args.seqlens_k = seqlens_k_of(params);
  // Without keys, kernels load none, whatever positions_k holds.
  const bool no_keys = k_shape.seq == 0 || params.k == nullptr || params.v == nullptr;
  if (no_keys) args.seqlens_k.longest = 0;
  args.variant.scale = score_scale_of(params, kQuantized);
  if constexpr (kConfig.term == ScoreTerm::kBias) set_bias_arguments<kConfig>(args, params);
  if constexpr (kConfig.listed) {
    args.lists = mask_lists(params.lists, params.seqlen_q, params.seqlen_k);
  }
  return args;
}

// Enqueues the kernel asynchronously. name: of the kernel config. Throws std::runtime_error, naming
// the kernel config, the grid and the shared memory. Without query rows nothing is launched; if no
// row belongs to a sequence, only the kernel that clears them.
template <forward::Config kConfig>
void launch_forward(const char* name, const ForwardParams& params, cudaStream_t stream) {
  if (params.num_heads_q <= 0 || (params.varlen && params.total_q <= 0)) return;
  check_problem<kConfig>(name, params);
  expect_scores_of<kConfig>(name, params);
  expect_bias(name, kConfig.term == ScoreTerm::kBias, params);
  if (params.varlen) launch_varlen_forward(params, forward_tile_shape<kConfig>(params), stream);
  if (params.batch <= 0 || params.seqlen_q <= 0) return;
  check_lists(name, kConfig.listed, params.lists);
  const auto args = make_forward_arguments<kConfig>(params);
  constexpr auto kKernel = forward_kernel<kConfig>();
  constexpr int kSharedBytes = forward::KernelTraits<kConfig>::kSmemBytes;
  allow_shared_memory<kKernel>(kSharedBytes);
  const unsigned num_ctas = num_persistent_ctas(params, args.scheduler.num_tiles);
  launch_kernel(name, "", kKernel, {num_ctas, forward::num_threads(kConfig), kSharedBytes}, stream,
                params.pdl, args);
}

}  // namespace flashattn3
