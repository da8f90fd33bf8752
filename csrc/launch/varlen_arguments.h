// Computes the arguments and the number of CTAs of varlen::prepare.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/tile_shape.h"
#include "launch/launch.cuh"
#include "launch/params.h"
#include "launch/varlen.h"
#include "varlen/prepare.cuh"

namespace flashattn3 {

static_assert(varlen_schedule_bytes(7) == 8 * sizeof(VarlenPlace) + 7 * sizeof(int32_t));

inline varlen::Result result_of(void* data, const Strides& strides, int num_heads, int columns) {
  return {static_cast<uint16_t*>(data), strides.seq, strides.head, num_heads, columns};
}

inline varlen::Arguments make_prepare_arguments(const ForwardParams& params, const TileShape& shape,
                                                int min_queries, int32_t* semaphore) {
  varlen::Arguments args{};
  args.seqlens = seqlens_q_of(params);
  args.other_seqlens = seqlens_k_of(params);
  args.batch = params.batch;
  args.shape = shape;
  args.schedule = {params.varlen_schedule, params.batch};
  args.of_tiles[0] =
      result_of(params.out, params.out_stride, params.num_heads_q, params.head_dim_v);
  args.lse = params.lse;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.min_tokens = min_queries;
  args.semaphore = semaphore;
  return args;
}

inline varlen::Arguments make_prepare_arguments(const BackwardParams& params, int block_n) {
  const ForwardParams& forward = params.forward;
  varlen::Arguments args{};
  args.seqlens = seqlens_k_of(forward);
  args.other_seqlens = seqlens_q_of(forward);
  args.batch = forward.batch;
  args.shape = {.rows = block_n};
  args.schedule = {forward.varlen_schedule, forward.batch};
  args.of_tiles[0] = result_of(params.dk, params.dk_stride, forward.num_heads_kv, forward.head_dim);
  args.of_tiles[1] =
      result_of(params.dv, params.dv_stride, forward.num_heads_kv, forward.head_dim_v);
  args.of_others = result_of(params.dq, params.dq_stride, forward.num_heads_q, forward.head_dim);
  return args;
}

// Returns a multiple of batch + 1: each sequence, and the rows of no sequence, get the same number
// of CTAs, so that every SM has one. A sequence may have far more rows than it uses.
inline int num_prepare_ctas(const AttentionProblem& problem) {
  const int ctas = problem.batch + 1;
  return ctas * std::max(1, problem.num_sms / ctas);
}

}  // namespace flashattn3
