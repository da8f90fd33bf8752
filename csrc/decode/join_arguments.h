// Arguments of the kernel in join_prefix.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3::decode {

constexpr int kJoinThreads = 256;
constexpr int kJoinRows = kJoinThreads / 32;

struct JoinArguments {
  const float* row_out;  // as in PrefixArguments
  const float2* row_stats;
  int64_t num_rows;  // tokens of q times heads
  int num_heads_q, head_dim_v;
  int tokens_of_batch;     // tokens of an entry of out's first axis
  const float* sinks;      // as in Arguments
  const float* v_descale;  // of all keys, or null
  uint16_t* out;           // strides in elements
  float* lse;              // null: not written
  int64_t out_batch, out_seq, out_head;
  int64_t lse_batch, lse_seq, lse_head;
};

}  // namespace flashattn3::decode
