// Launch arguments of kernels with a bias, for both passes.
#pragma once

#include <algorithm>
#include <climits>
#include <string>

#include "backward/reduce_bias.cuh"
#include "launch/launch.cuh"
#include "launch/params.h"
#include "launch/tensor_map.h"

namespace flashattn3 {

// Tensor map of a bias or its gradient: (seqlen_k, seqlen_q, heads, batch), innermost first. Box:
// 64 keys x box_rows queries.
inline CUtensorMap make_bias_map(const char* name, ElementType type, const BiasParams& bias,
                                 const ForwardParams& problem, int box_rows) {
  const TensorMapShape shape{problem.seqlen_k, problem.seqlen_q,
                             bias.one_head ? 1 : problem.num_heads_q,
                             bias.one_sequence ? 1 : problem.batch};
  return make_tensor_map(name, type, bias.data, problem.q, shape, bias.stride, box_rows);
}

// Throws unless the call has a bias exactly where the kernel config adds one.
inline void expect_bias(const char* name, bool adds_bias, const ForwardParams& params) {
  const bool given = params.bias.data != nullptr;
  if (given == adds_bias || params.seqlen_k <= 0) return;
  const std::string wanted = std::string(adds_bias ? "a tensor" : "none") + " for " + name;
  expect(false, "launch", "bias", wanted, given ? "one" : "none");
}

// Work tiles of sequences that share a bias take turns, so that its tiles are read from L2: up to
// eight, since more would read the K and V of too many. Kernels number the heads of such a call
// with the sequences innermost.
inline HeadGroups heads_with_bias(const ForwardParams& params, WorkTiles tiles) {
  constexpr int kTakeTurns = 8;
  if (params.bias.one_sequence) {
    tiles.l2_group_heads = std::max(tiles.l2_group_heads, std::min(params.batch, kTakeTurns));
  }
  return make_scheduler_params(params, tiles).heads;
}

inline backward::ReduceBiasArguments make_reduce_bias_arguments(const BackwardParams& params) {
  const ForwardParams& forward = params.forward;
  const bool one_sequence = forward.bias.one_sequence, one_head = forward.bias.one_head;
  const int heads = forward.num_heads_q, batch = forward.batch;
  const int64_t pitch = bias_pitch(forward.seqlen_k), plane = forward.seqlen_q * pitch;
  return {.ds = static_cast<const uint16_t*>(params.ds),
          .dbias = static_cast<uint16_t*>(params.dbias),
          .plane = plane,
          .num_vecs = (one_sequence ? 1 : batch) * (one_head ? 1 : heads) * plane / 8,
          .num_terms = num_bias_terms(forward),
          .first_step = one_head ? heads : 1,
          .term_step = one_head ? 1 : heads,
          .seqlen_q = forward.seqlen_q,
          .seqlen_k = forward.seqlen_k,
          .pitch = static_cast<int>(pitch),
          .window = window_of(forward)};
}

inline unsigned num_reduce_bias_ctas(const backward::ReduceBiasArguments& args) {
  constexpr int kThreads = backward::kReduceBiasThreads;
  const int64_t ctas = (args.num_vecs + kThreads - 1) / kThreads;
  expect(ctas <= INT_MAX, "launch", "elements of the bias", "below 2^42", args.num_vecs * 8);
  return static_cast<unsigned>(ctas);
}

inline int64_t bias_gradient_bytes(const BackwardParams& params) {
  return make_reduce_bias_arguments(params).num_vecs * 16;
}

// Two work tiles add to it.
inline void clear_bias_gradient(const BackwardParams& params, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(params.dbias, 0, bias_gradient_bytes(params), stream),
             "clearing the gradient of a bias");
}

}  // namespace flashattn3
