// What the forward kernel is launched with; host/launch_forward.cuh makes it from ForwardParams.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "blocks/descale.cuh"
#include "blocks/sequence.cuh"
#include "blocks/tile_order.cuh"

namespace flashattn3 {

// What rows of 8 bits have besides.
struct QuantizedArguments {
  Descale q, k, v;
  bool out_is_fp16;  // else bf16
  // Promoted sums of out (promotion.cuh), (CTAs, forward_promoted_words(head_dim), threads that
  // multiply) of 16 bytes; null: out is not promoted.
  float4* promoted;
};

struct ForwardArguments {
  // (head_dim, rows, heads, entries), innermost first; entries is 1 with cu_seqlens.
  CUtensorMap q;        // boxes of 128 bytes of columns x block_m rows
  CUtensorMap k;        // boxes of 128 bytes of columns x block_n rows
  CUtensorMap v;        // as k; in quantized rows slots, see make_slots_map
  CUtensorMap out_map;  // boxes of 64 columns x kRowsOfWarp rows

  uint16_t* out;  // 16-bit elements of the row's type
  float* lse;     // null: not written
  // In elements. The batch strides are 0 with cu_seqlens_q.
  int64_t out_batch, out_seq, out_head;
  int64_t lse_batch, lse_seq, lse_head;

  SequenceTable rows;  // of q and out
  SequenceTable keys;  // of k and v
  TileOrder order;
  QuantizedArguments quantized;
  int num_heads_q;
  int num_heads_kv;
  int heads_per_kv;  // query heads that share one head of k and v
  int head_dim_v;
  int window_left;  // at most the longer of the longest sequences: nothing is "open" here
  int window_right;
  float score_scale;   // scores, after the cap if there is one, to log2 units
  float tanh_scale;    // blocks/score_scale.cuh, cap_scores; 0: no cap
  float one_over_cap;  // 8 bits, in log2 units: there score_scale is that of scores without a cap
};

}  // namespace flashattn3
