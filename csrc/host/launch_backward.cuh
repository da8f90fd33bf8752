// The launch of one backward: statistics, the kernel itself, dq from its sums. Included by the
// generated unit of each row.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <type_traits>

#include "host/errors.h"
#include "host/launch.cuh"
#include "host/params.h"
#include "host/prepare_ragged.h"
#include "host/tensor_map.h"
#include "kernels/backward/finish.cuh"
#include "kernels/backward/kernel.cuh"
#include "kernels/backward/pair_kernel.cuh"
#include "kernels/backward/statistics.cuh"

namespace flashattn3 {

inline std::string describe(const BackwardRow& row) {
  return std::string("backward_") + element_name(row.dtype) + "_d" + std::to_string(row.head_dim);
}

// Rows of a head in the workspace, in whole blocks: of one sequence, or with cu_seqlens of all,
// each of which begins in a new one.
inline int64_t room_rows(const ForwardParams& params) {
  const int64_t blocks = params.cu_seqlens_q != nullptr
                             ? params.total_q / kBackwardRows + params.batch
                             : (int64_t{params.seqlen_q} + kBackwardRows - 1) / kBackwardRows;
  return blocks * kBackwardRows;
}

inline int64_t room_heads(const ForwardParams& params) {
  return int64_t{params.num_heads_q} * (params.cu_seqlens_q != nullptr ? 1 : params.batch);
}

template <BackwardRow kRow>
int64_t backward_workspace_bytes(const ForwardParams& params) {
  const int64_t rows = room_rows(params) * room_heads(params);
  return rows * (kRow.head_dim + 2) * sizeof(float) +
         (rows / kBackwardRows * backward_arrivals(kRow) + 1 +
          int64_t{params.batch} * params.num_heads_kv) *
             sizeof(int32_t);
}

template <BackwardRow kRow>
RowRoom make_row_room(const BackwardParams& params) {
  const int64_t rows_of_head = room_rows(params.forward);
  const int64_t rows = rows_of_head * room_heads(params.forward);
  RowRoom room;
  room.sums = static_cast<float*>(params.workspace);
  room.lse = room.sums + rows * kRow.head_dim;
  room.minus_delta = room.lse + rows;
  room.tiles_taken = reinterpret_cast<int32_t*>(room.minus_delta + rows);
  room.tiles_through = room.tiles_taken + 1;
  room.arrivals = room.tiles_through + int64_t{params.forward.batch} * params.forward.num_heads_kv;
  room.num_rows = rows_of_head;
  return room;
}

inline TileOrder make_key_order(const ForwardParams& params, int block_n, bool windowed,
                                bool last_first, int32_t* tickets) {
  const int64_t blocks = (int64_t{params.seqlen_k} + block_n - 1) / block_n;
  const int64_t heads = int64_t{params.num_heads_kv} * params.batch;
  int64_t last_section = 1;
  while (windowed && last_section < heads && last_section * blocks < params.num_sms) {
    last_section = std::min(heads, 2 * last_section);
  }
  const int64_t tiles = params.num_heads_kv * tiles_of_batch(block_n, params.seqlen_k, params.batch,
                                                             params.cu_seqlens_k, params.total_k);
  if (std::max(tiles, heads) > INT_MAX / 2) {
    fail("launch of a backward", "more than 2^30 tiles of keys");
  }
  TileOrder order;
  order.num_row_blocks = static_cast<int>(blocks);
  order.num_heads_total = static_cast<int>(heads);
  order.num_tiles = static_cast<int>(tiles);
  order.section_heads = 1;
  order.last_section_heads = static_cast<int>(last_section);
  order.last_rows_first = last_first;
  order.counter = nullptr;
  order.tickets = tickets;
  order.ragged = {params.cu_seqlens_q != nullptr ? params.ragged_order : nullptr, params.batch};
  return order;
}

template <BackwardRow kRow>
BackwardArguments make_backward_arguments(const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool variable = forward.cu_seqlens_q != nullptr;
  const int entries = variable ? 1 : forward.batch;
  const TensorMapShape q_shape{forward.head_dim, variable ? forward.total_q : forward.seqlen_q,
                               forward.num_heads_q, entries};
  const TensorMapShape k_shape{forward.head_dim, variable ? forward.total_k : forward.seqlen_k,
                               forward.num_heads_kv, entries};
  TensorMapShape v_shape = k_shape, out_shape = q_shape;
  v_shape.head_dim = out_shape.head_dim = forward.head_dim_v;
  const auto map = [&](const char* name, const void* data, const TensorMapShape& shape,
                       const Strides& stride, int box_rows) {
    return make_tensor_map(name, kRow.dtype, data, forward.q, shape, stride, box_rows);
  };
  constexpr int keys = backward_keys(kRow) / (backward_in_pairs(kRow) ? 2 : 1);  // of a CTA
  BackwardArguments args;
  args.q = map("q", forward.q, q_shape, forward.q_stride, kBackwardRows);
  args.k = map("k", forward.k, k_shape, forward.k_stride, keys);
  args.v = map("v", forward.v, v_shape, forward.v_stride, keys);
  args.dout = map("dout", params.dout, out_shape, params.dout_stride, kBackwardRows);
  args.dk_map = map("dk", params.dk, k_shape, params.dk_stride, kRowsOfWarp);
  args.dv_map = map("dv", params.dv, v_shape, params.dv_stride, kRowsOfWarp);
  args.dq = static_cast<uint16_t*>(params.dq);
  args.dk = static_cast<uint16_t*>(params.dk);
  args.dv = static_cast<uint16_t*>(params.dv);
  args.dq_batch = variable ? 0 : params.dq_stride.batch;
  args.dq_seq = params.dq_stride.seq;
  args.dq_head = params.dq_stride.head;
  args.dk_batch = variable ? 0 : params.dk_stride.batch;
  args.dk_seq = params.dk_stride.seq;
  args.dk_head = params.dk_stride.head;
  args.dv_batch = variable ? 0 : params.dv_stride.batch;
  args.dv_seq = params.dv_stride.seq;
  args.dv_head = params.dv_stride.head;
  args.rows = {forward.cu_seqlens_q, forward.seqused_q, forward.seqlen_q, forward.total_q};
  args.keys = {forward.cu_seqlens_k, forward.seqused_k, forward.seqlen_k, forward.total_k};
  args.room = make_row_room<kRow>(params);
  args.statistics = make_float_map("statistics", args.room.lse,
                                   room_rows(forward) * room_heads(forward), 2, kBackwardRows);
  const bool windowed = forward.window_left >= 0 || forward.window_right >= 0;
  // With a mask the longest tiles are the first; in order the last ones have to be.
  args.order = make_key_order(forward, backward_keys(kRow), windowed, windowed && params.ordered,
                              args.room.tiles_taken);
  const bool shared = forward.num_heads_q > forward.num_heads_kv;
  if (windowed) {
    args.walk = shared && !params.ordered && !backward_in_pairs(kRow) ? RowWalk::kHeadsInside
                                                                      : RowWalk::kDiagonal;
  } else {
    args.walk = params.ordered ? RowWalk::kUpwards : RowWalk::kRotated;
  }
  args.num_heads_q = forward.num_heads_q;
  args.num_heads_kv = forward.num_heads_kv;
  args.heads_per_kv = forward.num_heads_q / forward.num_heads_kv;
  args.head_dim = forward.head_dim;
  args.head_dim_v = forward.head_dim_v;
  const Windows windows = windows_of(forward);
  args.window_left = windows.left;
  args.window_right = windows.right;
  args.ordered = params.ordered;
  const ScoreScales scales = score_scales_of(forward);
  args.softmax_scale = forward.softmax_scale;
  args.score_scale = scales.score;
  args.tanh_scale = scales.tanh;
  return args;
}

template <BackwardRow kRow>
StatisticsArguments make_statistics_arguments(const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool variable = forward.cu_seqlens_q != nullptr;
  return {.out = static_cast<const uint16_t*>(forward.out),
          .dout = static_cast<const uint16_t*>(params.dout),
          .lse = forward.lse,
          .dlse = params.dlse,
          .out_batch = variable ? 0 : forward.out_stride.batch,
          .out_seq = forward.out_stride.seq,
          .out_head = forward.out_stride.head,
          .dout_batch = variable ? 0 : params.dout_stride.batch,
          .dout_seq = params.dout_stride.seq,
          .dout_head = params.dout_stride.head,
          .lse_batch = variable ? 0 : forward.lse_stride.batch,
          .lse_seq = forward.lse_stride.seq,
          .lse_head = forward.lse_stride.head,
          .dlse_batch = variable ? 0 : params.dlse_stride.batch,
          .dlse_seq = params.dlse_stride.seq,
          .dlse_head = params.dlse_stride.head,
          .rows = {forward.cu_seqlens_q, forward.seqused_q, forward.seqlen_q, forward.total_q},
          .room = make_row_room<kRow>(params),
          .batch = forward.batch,
          .num_heads = forward.num_heads_q,
          .num_heads_total = forward.num_heads_kv * forward.batch,
          .head_dim_v = forward.head_dim_v,
          .num_arrivals = backward_arrivals(kRow),
          .sum_columns = backward_in_pairs(kRow) ? kRow.head_dim : 0};
}

template <BackwardRow kRow>
using BackwardConfigOf =
    std::conditional_t<backward_in_pairs(kRow), PairConfig<kRow>, BackwardConfig<kRow>>;

template <BackwardRow kRow>
constexpr auto backward_kernel() {
  if constexpr (backward_in_pairs(kRow)) {
    return &backward_attention_in_pairs<PairConfig<kRow>>;
  } else {
    return &backward_attention<BackwardConfig<kRow>>;
  }
}

template <BackwardRow kRow>
void launch_main(const ForwardParams& params, const BackwardArguments& args, bool early,
                 cudaStream_t stream) {
  constexpr auto kKernel = backward_kernel<kRow>();
  allow_shared_memory<kKernel>(backward_shared_bytes(kRow));
  // In pairs each cluster has one tile, with a ragged order perhaps none.
  const int grid =
      backward_in_pairs(kRow)
          ? 2 * args.order.num_tiles
          : std::max(1, std::min(params.num_sms - params.sm_margin, args.order.num_tiles));
  launch_kernel([] { return describe(kRow); }, kKernel, dim3(grid), backward_num_threads(kRow),
                backward_shared_bytes(kRow), stream, early, args);
}

// Enqueues the three kernels; waits for nothing. Throws std::runtime_error, naming the row, the
// grid and the shared memory. A problem without a query or a key row leaves the gradients as they
// are.
template <BackwardRow kRow>
void launch_backward(const BackwardParams& params, cudaStream_t stream) {
  const ForwardParams& forward = params.forward;
  if (forward.batch <= 0 || forward.num_heads_q <= 0 || forward.seqlen_q <= 0) return;
  if (forward.cu_seqlens_q != nullptr && (forward.total_q <= 0 || forward.total_k <= 0)) return;
  if (forward.seqlen_k <= 0) return;
  if (forward.head_dim > kRow.head_dim || forward.head_dim_v > kRow.head_dim) {
    fail("launch of " + describe(kRow), "the head dim is larger than the row's");
  }
  if (room_rows(forward) * room_heads(forward) > INT_MAX) {
    fail("launch of " + describe(kRow), "more than 2^31 rows of queries");
  }
  const BackwardArguments args = make_backward_arguments<kRow>(params);
  if (forward.cu_seqlens_q != nullptr) order_ragged_keys(forward, backward_keys(kRow), stream);
  const bool early = forward.tile_counter != nullptr;  // null: perhaps in a graph capture
  const int64_t row_blocks = room_rows(forward) * room_heads(forward) / kBackwardRows;
  launch_kernel([] { return describe(kRow) + "'s statistics"; }, backward_statistics<kRow.dtype>,
                dim3(row_blocks), kStatisticsThreads, 0, stream, early,
                make_statistics_arguments<kRow>(params));
  launch_main<kRow>(forward, args, early, stream);
  launch_kernel([] { return describe(kRow) + "'s dq"; }, backward_finish<BackwardConfigOf<kRow>>,
                dim3(row_blocks), 128, 0, stream, early, args);
}

}  // namespace flashattn3
