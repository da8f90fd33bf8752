// Launch of one backward: varlen::prepare, preprocess, main kernel, postprocess. Included by the
// generated unit of each kernel config.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "backward/cluster2/kernel.cuh"
#include "backward/kernel.cuh"
#include "backward/postprocess.cuh"
#include "backward/preprocess.cuh"
#include "launch/backward_sizes.cuh"
#include "launch/bias.h"
#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/params.h"
#include "launch/tensor_map.h"
#include "launch/varlen.h"

namespace flashattn3 {

template <backward::Config kConfig>
using BackwardTraitsOf = std::conditional_t<
    backward::is_specialized(kConfig), backward::specialized::KernelTraits<kConfig>,
    std::conditional_t<backward::uses_cluster2(kConfig), backward::cluster2::KernelTraits<kConfig>,
                       backward::KernelTraits<kConfig>>>;

template <backward::Config kConfig>
backward::Workspace make_workspace(const BackwardSizes& sizes, const BackwardParams& params) {
  backward::Workspace workspace;
  workspace.dq_accum = static_cast<float*>(params.workspace);
  workspace.lse = workspace.dq_accum + sizes.rows * kConfig.head_dim;
  workspace.minus_delta = workspace.lse + sizes.rows;
  workspace.tile_semaphore = reinterpret_cast<int32_t*>(workspace.minus_delta + sizes.rows);
  workspace.tiles_done = workspace.tile_semaphore + 1;
  workspace.dq_semaphore = workspace.tiles_done + sizes.num_heads_done + sizes.num_partial_sums;
  workspace.sink_gradients =
      reinterpret_cast<float*>(workspace.dq_semaphore + int64_t{sizes.num_m_blocks()} *
                                                            backward::num_dq_semaphores(kConfig));
  workspace.num_rows = sizes.rows_of_head;
  return workspace;
}

// Sets what a bias adds: its maps, and the order of work tiles.
template <backward::Config kConfig>
void set_bias_arguments(backward::BiasArguments& args, const BackwardSizes& sizes,
                        const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const BiasParams& bias = forward.bias;
  expect(args.score_scale.tanh_scale == 0.f, "launch", "the cap of scores", "none with a bias",
         args.score_scale.factor);
  args.bias = make_bias_map("bias", kConfig.dtype, bias, forward, backward::kBlockM);
  args.ds = args.bias;
  args.writes_ds = params.dbias != nullptr;
  args.adds_ds = num_bias_terms(forward) == 2;
  const bool direct = params.ds == nullptr;
  args.ds_heads_differ = !(direct && bias.one_head);
  args.ds_sequences_differ = !(direct && bias.one_sequence);
  if (args.writes_ds) {
    const int64_t pitch = bias_pitch(forward.seqlen_k), plane = forward.seqlen_q * pitch;
    const int heads = args.ds_heads_differ ? forward.num_heads_q : 1;
    const BiasParams ds{.data = direct ? params.dbias : params.ds,
                        .stride = {.batch = heads * plane, .seq = pitch, .head = plane},
                        .one_sequence = !args.ds_sequences_differ,
                        .one_head = !args.ds_heads_differ};
    args.ds = make_bias_map("ds", kConfig.dtype, ds, forward, backward::kBlockM);
  }
  args.heads_differ = !bias.one_head, args.sequences_differ = !bias.one_sequence;
  args.batch = forward.batch;
  args.scheduler.heads = heads_with_bias(forward, sizes.tiles);
}

template <backward::Config kConfig>
auto make_backward_arguments(const BackwardSizes& sizes, const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool varlen = forward.varlen;
  const int sequences = varlen ? 1 : forward.batch;
  const TensorMapShape q_shape{forward.head_dim, varlen ? forward.total_q : forward.seqlen_q,
                               forward.num_heads_q, sequences};
  const TensorMapShape k_shape{forward.head_dim, varlen ? forward.total_k : forward.seqlen_k,
                               forward.num_heads_kv, sequences};
  TensorMapShape v_shape = k_shape, out_shape = q_shape;
  v_shape.head_dim = out_shape.head_dim = forward.head_dim_v;
  const auto map = [&](const char* name, const void* data, const TensorMapShape& shape,
                       const Strides& stride, int box_rows) {
    return make_tensor_map(name, kConfig.dtype, data, forward.q, shape, stride, box_rows);
  };
  constexpr int keys =
      backward::block_n(kConfig) / (backward::uses_cluster2(kConfig) ? 2 : 1);  // of a CTA
  typename BackwardTraitsOf<kConfig>::Arguments args;
  args.q = map("q", forward.q, q_shape, forward.q_stride, backward::kBlockM);
  args.k = map("k", forward.k, k_shape, forward.k_stride, keys);
  args.v = map("v", forward.v, v_shape, forward.v_stride, keys);
  args.dout = map("dout", params.dout, out_shape, params.dout_stride, backward::kBlockM);
  args.dk_map = map("dk", params.dk, k_shape, params.dk_stride, kRowsOfWarp);
  args.dv_map = map("dv", params.dv, v_shape, params.dv_stride, kRowsOfWarp);
  args.dq = static_cast<uint16_t*>(params.dq);
  args.dk = static_cast<uint16_t*>(params.dk);
  args.dv = static_cast<uint16_t*>(params.dv);
  args.dq_batch = varlen ? 0 : params.dq_stride.batch;
  args.dq_seq = params.dq_stride.seq;
  args.dq_head = params.dq_stride.head;
  args.dk_batch = varlen ? 0 : params.dk_stride.batch;
  args.dk_seq = params.dk_stride.seq;
  args.dk_head = params.dk_stride.head;
  args.dv_batch = varlen ? 0 : params.dv_stride.batch;
  args.dv_seq = params.dv_stride.seq;
  args.dv_head = params.dv_stride.head;
  args.seqlens_q = seqlens_q_of(forward);
  args.seqlens_k = seqlens_k_of(forward);
  args.workspace = make_workspace<kConfig>(sizes, params);
  args.lse_delta =
      make_float_map("statistics", args.workspace.lse, sizes.rows, 2, backward::kBlockM);
  args.scheduler = make_scheduler_params(forward, sizes.tiles);
  args.scheduler.tile_counter = nullptr;
  args.scheduler.tile_semaphore = args.workspace.tile_semaphore;
  args.num_heads_q = forward.num_heads_q;
  args.num_heads_kv = sizes.num_part_heads;
  args.head_parts = cutlass::FastDivmod(sizes.num_head_parts);
  args.qhead_per_kvhead = args.num_heads_q / args.num_heads_kv;
  const bool shared = args.qhead_per_kvhead > 1;
  constexpr bool kCluster2 = backward::uses_cluster2(kConfig);
  using backward::Traversal;
  if (!forward.masked()) {
    args.traversal = forward.deterministic ? Traversal::kAscending : Traversal::kStaggered;
  } else if (forward.deterministic) {
    args.traversal = !varlen ? Traversal::kDiagonalReversed : Traversal::kDiagonal;
  } else {
    args.traversal = shared && !kCluster2 ? Traversal::kHeadsInnermost : Traversal::kDiagonal;
  }
  args.head_dim = forward.head_dim;
  args.head_dim_v = forward.head_dim_v;
  args.window = window_of(forward);
  args.deterministic = forward.deterministic;
  args.zeroes_dq = zeroes_dq<kConfig>(forward);
  args.softmax_scale = forward.softmax_scale;
  args.score_scale = score_scale_of(forward, false);
  args.partial_sums = {reinterpret_cast<float4*>(static_cast<uint8_t*>(params.workspace) +
                                                 sizes.bytes_before_partial_sums),
                       args.workspace.tiles_done + sizes.num_heads_done, sizes.tiles_of_sequence};
  args.slopes = {forward.alibi_slopes, forward.alibi_batch};
  args.dsinks = params.dsinks;
  args.sink_type = forward.sink_type;
  if constexpr (backward::has_bias(kConfig)) set_bias_arguments<kConfig>(args, sizes, params);
  if constexpr (kConfig.listed) {
    args.lists = mask_lists(params.lists, forward.seqlen_k, forward.seqlen_q);
    args.turns = params.turns;
  }
  return args;
}

template <backward::Config kConfig>
backward::PreprocessArguments make_preprocess_arguments(const BackwardSizes& sizes,
                                                        const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool varlen = forward.varlen;
  return {.out = static_cast<const uint16_t*>(forward.out),
          .dout = static_cast<const uint16_t*>(params.dout),
          .lse = forward.lse,
          .dlse = params.dlse,
          .out_batch = varlen ? 0 : forward.out_stride.batch,
          .out_seq = forward.out_stride.seq,
          .out_head = forward.out_stride.head,
          .dout_batch = varlen ? 0 : params.dout_stride.batch,
          .dout_seq = params.dout_stride.seq,
          .dout_head = params.dout_stride.head,
          .lse_batch = varlen ? 0 : forward.lse_stride.batch,
          .lse_seq = forward.lse_stride.seq,
          .lse_head = forward.lse_stride.head,
          .dlse_batch = varlen ? 0 : params.dlse_stride.batch,
          .dlse_seq = params.dlse_stride.seq,
          .dlse_head = params.dlse_stride.head,
          .seqlens_q = seqlens_q_of(forward),
          .workspace = make_workspace<kConfig>(sizes, params),
          .batch = forward.batch,
          .num_heads = forward.num_heads_q,
          .num_counts = sizes.num_heads_done + sizes.num_partial_sums,
          .head_dim_v = forward.head_dim_v,
          .dq_semaphores_per_block = backward::num_dq_semaphores(kConfig),
          .dq_accum_columns = backward::uses_cluster2(kConfig) && !zeroes_dq<kConfig>(forward)
                                  ? kConfig.head_dim
                                  : 0,
          .log2_unit = backward::log2_unit_of_probabilities(kConfig),
          .sinks = {forward.sinks, forward.sink_type}};
}

template <backward::Config kConfig>
constexpr auto backward_kernel() {
  if constexpr (backward::uses_cluster2(kConfig)) {
    return &backward::cluster2::attention_kernel<BackwardTraitsOf<kConfig>>;
  } else {
    return &backward::attention_kernel<BackwardTraitsOf<kConfig>>;
  }
}

// Enqueues the sums of ds, or zeros where a mask hides blocks.
template <ElementType kElement>
void reduce_bias(const char* name, const BackwardParams& params, cudaStream_t stream) {
  const backward::ReduceBiasArguments args = make_reduce_bias_arguments(params);
  launch_kernel(name, " sums of dbias", backward::reduce_bias_kernel<kElement>,
                {num_reduce_bias_ctas(args), backward::kReduceBiasThreads}, stream, false, args);
}

// Enqueues the kernels asynchronously. name: of the kernel config. Throws std::runtime_error,
// naming the kernel config, the grid and the shared memory. Without queries or without keys the
// gradients are not written.
template <backward::Config kConfig>
void launch_backward(const char* name, const BackwardParams& params, cudaStream_t stream) {
  const ForwardParams& forward = params.forward;
  if (forward.has_no_gradients()) return;
  expect_bias(name, backward::has_bias(kConfig), forward);
  check_lists(name, kConfig.listed, params.lists);
  const BackwardSizes sizes = backward_sizes<kConfig>(name, forward);
  const auto args = make_backward_arguments<kConfig>(sizes, params);
  if (backward::has_bias(kConfig) && params.dbias != nullptr && num_bias_terms(forward) == 2) {
    clear_bias_gradient(params, stream);
  }
  if (forward.varlen) launch_varlen_backward(params, backward::block_n(kConfig), stream);
  constexpr auto kPreprocess = &backward::preprocess_kernel<kConfig.dtype, false>;
  constexpr auto kWithSinks = &backward::preprocess_kernel<kConfig.dtype, true>;
  launch_kernel(name, " preprocess", params.dsinks == nullptr ? kPreprocess : kWithSinks,
                {sizes.num_m_blocks(), backward::kPreprocessThreads}, stream, forward.pdl,
                make_preprocess_arguments<kConfig>(sizes, params));
  constexpr auto kKernel = backward_kernel<kConfig>();
  constexpr int kSharedBytes = backward::smem_bytes(kConfig);
  allow_shared_memory<kKernel>(kSharedBytes);
  const unsigned num_ctas = backward_num_ctas<kConfig>(forward, sizes.num_tiles);
  launch_kernel(name, "", kKernel, {num_ctas, backward::num_threads(kConfig), kSharedBytes}, stream,
                forward.pdl, args);
  launch_kernel(name, " postprocess", backward::postprocess_kernel<BackwardTraitsOf<kConfig>>,
                {sizes.num_m_blocks(), 128}, stream, forward.pdl,
                static_cast<const backward::Arguments&>(args));
  if constexpr (backward::has_bias(kConfig)) {
    const bool zeros = num_bias_terms(forward) == 1 && forward.masked();
    if (params.dbias != nullptr && (params.ds != nullptr || zeros)) {
      reduce_bias<kConfig.dtype>(name, params, stream);
    }
  }
}

}  // namespace flashattn3
