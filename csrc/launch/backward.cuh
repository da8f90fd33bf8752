// Launch of one backward: preprocess, main kernel, postprocess. Included by the generated unit of
// each kernel config.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <type_traits>

#include "backward/cluster2/kernel.cuh"
#include "backward/kernel.cuh"
#include "backward/postprocess.cuh"
#include "backward/preprocess.cuh"
#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/params.h"
#include "launch/tensor_map.h"
#include "launch/varlen.h"

namespace flashattn3 {

inline std::string describe(const backward::Config& config) {
  return std::string("backward_") + element_name(config.dtype) + "_d" +
         std::to_string(config.head_dim);
}

// Rows of a head in the workspace, in whole blocks: of one sequence, or with cu_seqlens of all
// sequences, each of which starts at a new block.
inline int64_t workspace_rows(const ForwardParams& params) {
  const int64_t blocks =
      params.cu_seqlens_q != nullptr
          ? params.total_q / backward::kBlockM + params.batch
          : (int64_t{params.seqlen_q} + backward::kBlockM - 1) / backward::kBlockM;
  return blocks * backward::kBlockM;
}

inline int64_t workspace_heads(const ForwardParams& params) {
  return int64_t{params.num_heads_q} * (params.cu_seqlens_q != nullptr ? 1 : params.batch);
}

template <backward::Config kConfig>
int64_t backward_workspace_bytes(const ForwardParams& params) {
  const int64_t rows = workspace_rows(params) * workspace_heads(params);
  return rows * (kConfig.head_dim + 2) * sizeof(float) +
         (rows / backward::kBlockM * backward::num_dq_semaphores(kConfig) + 1 +
          int64_t{params.batch} * params.num_heads_kv) *
             sizeof(int32_t);
}

template <backward::Config kConfig>
backward::Workspace make_workspace(const BackwardParams& params) {
  const int64_t rows_of_head = workspace_rows(params.forward);
  const int64_t rows = rows_of_head * workspace_heads(params.forward);
  backward::Workspace workspace;
  workspace.dq_accum = static_cast<float*>(params.workspace);
  workspace.lse = workspace.dq_accum + rows * kConfig.head_dim;
  workspace.minus_delta = workspace.lse + rows;
  workspace.tile_semaphore = reinterpret_cast<int32_t*>(workspace.minus_delta + rows);
  workspace.tiles_done = workspace.tile_semaphore + 1;
  workspace.dq_semaphore =
      workspace.tiles_done + int64_t{params.forward.batch} * params.forward.num_heads_kv;
  workspace.num_rows = rows_of_head;
  return workspace;
}

inline TileSchedulerParams make_backward_scheduler_params(const ForwardParams& params, int block_n,
                                                          bool masked, bool last_first,
                                                          int32_t* tile_semaphore) {
  const int64_t blocks = (int64_t{params.seqlen_k} + block_n - 1) / block_n;
  const int64_t heads = int64_t{params.num_heads_kv} * params.batch;
  int64_t last_l2_group = 1;
  while (masked && last_l2_group < heads && last_l2_group * blocks < params.num_sms) {
    last_l2_group = std::min(heads, 2 * last_l2_group);
  }
  const int64_t tiles = params.num_heads_kv * tiles_of_batch(block_n, params.seqlen_k, params.batch,
                                                             params.cu_seqlens_k, params.total_k);
  if (std::max(tiles, heads) > INT_MAX / 2) {
    fail("launch of a backward", "more than 2^30 tiles of keys");
  }
  TileSchedulerParams scheduler;
  scheduler.num_blocks = static_cast<int>(blocks);
  scheduler.num_batch_heads = static_cast<int>(heads);
  scheduler.num_tiles = static_cast<int>(tiles);
  scheduler.l2_group_heads = 1;
  scheduler.last_l2_group_heads = static_cast<int>(last_l2_group);
  scheduler.last_block_first = last_first;
  scheduler.tile_counter = nullptr;
  scheduler.tile_semaphore = tile_semaphore;
  scheduler.varlen = {params.cu_seqlens_q != nullptr ? params.varlen_schedule : nullptr,
                      params.batch};
  return scheduler;
}

template <backward::Config kConfig>
backward::Arguments make_backward_arguments(const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool varlen = forward.cu_seqlens_q != nullptr;
  const int entries = varlen ? 1 : forward.batch;
  const TensorMapShape q_shape{forward.head_dim, varlen ? forward.total_q : forward.seqlen_q,
                               forward.num_heads_q, entries};
  const TensorMapShape k_shape{forward.head_dim, varlen ? forward.total_k : forward.seqlen_k,
                               forward.num_heads_kv, entries};
  TensorMapShape v_shape = k_shape, out_shape = q_shape;
  v_shape.head_dim = out_shape.head_dim = forward.head_dim_v;
  const auto map = [&](const char* name, const void* data, const TensorMapShape& shape,
                       const Strides& stride, int box_rows) {
    return make_tensor_map(name, kConfig.dtype, data, forward.q, shape, stride, box_rows);
  };
  constexpr int keys =
      backward::block_n(kConfig) / (backward::uses_cluster2(kConfig) ? 2 : 1);  // of a CTA
  backward::Arguments args;
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
  args.seqlens_q = {forward.cu_seqlens_q, forward.seqused_q, forward.seqlen_q, forward.total_q};
  args.seqlens_k = {forward.cu_seqlens_k, forward.seqused_k, forward.seqlen_k, forward.total_k};
  args.workspace = make_workspace<kConfig>(params);
  args.lse_delta =
      make_float_map("statistics", args.workspace.lse,
                     workspace_rows(forward) * workspace_heads(forward), 2, backward::kBlockM);
  const bool masked = forward.window_left >= 0 || forward.window_right >= 0;
  // With a mask the longest tiles come first; if deterministic, the last tiles must come first.
  args.scheduler =
      make_backward_scheduler_params(forward, backward::block_n(kConfig), masked,
                                     masked && params.deterministic, args.workspace.tile_semaphore);
  const bool shared = forward.num_heads_q > forward.num_heads_kv;
  if (masked) {
    args.traversal = shared && !params.deterministic && !backward::uses_cluster2(kConfig)
                         ? backward::Traversal::kHeadsInnermost
                         : backward::Traversal::kDiagonal;
  } else {
    args.traversal =
        params.deterministic ? backward::Traversal::kAscending : backward::Traversal::kStaggered;
  }
  args.num_heads_q = forward.num_heads_q;
  args.num_heads_kv = forward.num_heads_kv;
  args.qhead_per_kvhead = forward.num_heads_q / forward.num_heads_kv;
  args.head_dim = forward.head_dim;
  args.head_dim_v = forward.head_dim_v;
  const Windows windows = windows_of(forward);
  args.window_left = windows.left;
  args.window_right = windows.right;
  args.deterministic = params.deterministic;
  const ScoreScales scales = score_scales_of(forward);
  args.softmax_scale = forward.softmax_scale;
  args.score_scale = scales.score;
  args.tanh_scale = scales.tanh;
  return args;
}

template <backward::Config kConfig>
backward::PreprocessArguments make_preprocess_arguments(const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool varlen = forward.cu_seqlens_q != nullptr;
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
          .seqlens_q = {forward.cu_seqlens_q, forward.seqused_q, forward.seqlen_q, forward.total_q},
          .workspace = make_workspace<kConfig>(params),
          .batch = forward.batch,
          .num_heads = forward.num_heads_q,
          .num_batch_heads = forward.num_heads_kv * forward.batch,
          .head_dim_v = forward.head_dim_v,
          .dq_semaphores_per_block = backward::num_dq_semaphores(kConfig),
          .dq_accum_columns = backward::uses_cluster2(kConfig) ? kConfig.head_dim : 0};
}

template <backward::Config kConfig>
using BackwardTraitsOf =
    std::conditional_t<backward::uses_cluster2(kConfig), backward::cluster2::KernelTraits<kConfig>,
                       backward::KernelTraits<kConfig>>;

template <backward::Config kConfig>
constexpr auto backward_kernel() {
  if constexpr (backward::uses_cluster2(kConfig)) {
    return &backward::cluster2::attention_kernel<backward::cluster2::KernelTraits<kConfig>>;
  } else {
    return &backward::attention_kernel<backward::KernelTraits<kConfig>>;
  }
}

template <backward::Config kConfig>
void launch_main(const ForwardParams& params, const backward::Arguments& args, bool pdl,
                 cudaStream_t stream) {
  constexpr auto kKernel = backward_kernel<kConfig>();
  allow_shared_memory<kKernel>(backward::smem_bytes(kConfig));
  // cluster2: each cluster has one work tile, or with varlen possibly none.
  const int grid =
      backward::uses_cluster2(kConfig)
          ? 2 * args.scheduler.num_tiles
          : std::max(1, std::min(params.num_sms - params.sm_margin, args.scheduler.num_tiles));
  launch_kernel([] { return describe(kConfig); }, kKernel, dim3(grid),
                backward::num_threads(kConfig), backward::smem_bytes(kConfig), stream, pdl, args);
}

// Enqueues the three kernels asynchronously. Throws std::runtime_error, naming the kernel config,
// the grid and the shared memory. Without queries or without keys the gradients are not written.
template <backward::Config kConfig>
void launch_backward(const BackwardParams& params, cudaStream_t stream) {
  const ForwardParams& forward = params.forward;
  if (forward.batch <= 0 || forward.num_heads_q <= 0 || forward.seqlen_q <= 0) return;
  if (forward.cu_seqlens_q != nullptr && (forward.total_q <= 0 || forward.total_k <= 0)) return;
  if (forward.seqlen_k <= 0) return;
  if (forward.head_dim > kConfig.head_dim || forward.head_dim_v > kConfig.head_dim) {
    fail("launch of " + describe(kConfig), "the head dim is larger than the kernel config's");
  }
  if (workspace_rows(forward) * workspace_heads(forward) > INT_MAX) {
    fail("launch of " + describe(kConfig), "more than 2^31 rows of queries");
  }
  const backward::Arguments args = make_backward_arguments<kConfig>(params);
  if (forward.cu_seqlens_q != nullptr)
    launch_varlen_backward(forward, backward::block_n(kConfig), stream);
  const bool pdl = forward.tile_counter != nullptr;  // null: may be in a graph capture
  const int64_t m_blocks = workspace_rows(forward) * workspace_heads(forward) / backward::kBlockM;
  launch_kernel([] { return describe(kConfig) + " preprocess"; },
                backward::preprocess_kernel<kConfig.dtype>, dim3(m_blocks),
                backward::kPreprocessThreads, 0, stream, pdl,
                make_preprocess_arguments<kConfig>(params));
  launch_main<kConfig>(forward, args, pdl, stream);
  launch_kernel([] { return describe(kConfig) + " postprocess"; },
                backward::postprocess_kernel<BackwardTraitsOf<kConfig>>, dim3(m_blocks), 128, 0,
                stream, pdl, args);
}

}  // namespace flashattn3
