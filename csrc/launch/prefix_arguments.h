// The arguments of the kernels of a call with a prefix: the decode kernel and the one that joins
// its results.
#pragma once

#include <climits>
#include <cstdint>
#include <string>

#include "decode/join_arguments.h"
#include "launch/decode_arguments.h"
#include "launch/errors.h"

namespace flashattn3 {

// The rows' results lie in front of the rest of the workspace.
inline int64_t num_result_rows(const DecodeParams& params) {
  return params.tokens() * params.num_heads_q;
}
inline int64_t result_bytes(const DecodeParams& params) {
  return 2 * num_result_rows(params) *
         (params.head_dim_v * int64_t{sizeof(float)} + int64_t{sizeof(float2)});
}
inline float* row_out_of(const DecodeParams& params) {
  return static_cast<float*>(params.workspace);
}
inline float2* row_stats_of(const DecodeParams& params) {
  return reinterpret_cast<float2*>(row_out_of(params) +
                                   2 * num_result_rows(params) * params.head_dim_v);
}

// The prefix is one sequence more, with all tokens of q as queries.
inline decode::PrefixArguments make_prefix_arguments(DecodeParams params, const DecodeGrid& grid,
                                                     int block_n) {
  float* const row_out = row_out_of(params);
  float2* const row_stats = row_stats_of(params);
  params.workspace = static_cast<uint8_t*>(params.workspace) + result_bytes(params);
  // The stride of a batch of one may be any number; find_prefix reads the end of q from it.
  if (params.batch == 1) params.q_stride.batch = params.seqlen_q * params.q_stride.seq;
  decode::PrefixArguments args{make_decode_arguments(params, grid, block_n)};
  args.batch = params.batch + 1;
  args.prefix_pages = params.prefix_pages;
  args.prefix_seqlen = params.prefix_seqlen;
  args.prefix_len = params.prefix_len;
  args.prefix_capacity = params.prefix_capacity;
  args.total_q = static_cast<int>(params.tokens());
  args.row_out = row_out;
  args.row_stats = row_stats;
  return args;
}

inline decode::JoinArguments make_join_arguments(const DecodeParams& params) {
  const bool varlen = params.cu_seqlens_q != nullptr;
  return {.row_out = row_out_of(params),
          .row_stats = row_stats_of(params),
          .num_rows = num_result_rows(params),
          .num_heads_q = params.num_heads_q,
          .head_dim_v = params.head_dim_v,
          .tokens_of_batch = varlen ? params.total_q : params.seqlen_q,
          .sinks = params.sinks,
          .v_descale = params.v_descale,
          .out = static_cast<uint16_t*>(params.out),
          .lse = params.lse,
          .out_batch = params.out_stride.batch,
          .out_seq = params.out_stride.seq,
          .out_head = params.out_stride.head,
          .lse_batch = params.lse_stride.batch,
          .lse_seq = params.lse_stride.seq,
          .lse_head = params.lse_stride.head};
}
inline int64_t num_join_ctas(const DecodeParams& params) {
  return (num_result_rows(params) + decode::kJoinRows - 1) / decode::kJoinRows;
}

// Throws for a prefix that the kernel does not read, and for one that it lacks; the call has rows.
template <bool kPrefix>
void expect_prefix(const char* name, const DecodeParams& params) {
  const bool given = params.prefix_pages != nullptr;
  if (given != kPrefix) {
    expect(false, "launch", "prefix_pages", std::string(kPrefix ? "some for " : "none for ") + name,
           given ? "some" : "none");
  }
  if (!given) return;
  // A bound on one sequence with the rows of all, as the kernel counts them.
  expect(params.tokens() < INT_MAX / 2, "launch", "the tokens of q", "below 2^30", params.tokens());
  const bool of_one_row = params.cu_seqlens_q != nullptr || params.batch <= 1 ||
                          params.q_stride.batch == params.seqlen_q * params.q_stride.seq;
  expect(of_one_row, "launch", "q", "with one stride between tokens", "two");
  const auto is_one_number = [](const DescaleStrides& stride) {
    return stride.batch == 0 && stride.head == 0;
  };
  const bool fits = params.page_table != nullptr && params.window_left < 0 &&
                    is_one_number(params.q_descale_stride) &&
                    is_one_number(params.k_descale_stride) &&
                    is_one_number(params.v_descale_stride);
  expect(fits, "launch", "the call", "paged, without window_left and descales of sequences",
         "another one");
}

}  // namespace flashattn3
