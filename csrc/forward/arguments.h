// What the forward kernel is launched with; launch/forward.cuh makes it from ForwardParams.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/descale.cuh"
#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"

namespace flashattn3::forward {

// What 8-bit kernel configs have besides.
struct QuantizedArguments {
  Descale q, k, v;
  bool out_is_fp16;  // else bf16
  // Promoted sums of out (promotion.cuh), (CTAs, promoted_words(head_dim), threads that
  // multiply) of 16 bytes; null: out is not promoted.
  float4* promoted;
};

struct Arguments {
  // (head_dim, rows, heads, entries), innermost first; entries is 1 with cu_seqlens.
  CUtensorMap q;        // boxes of 128 bytes of columns x block_m rows
  CUtensorMap k;        // boxes of 128 bytes of columns x block_n rows
  CUtensorMap v;        // as k; in 8-bit kernel configs slots, see make_permuted_v_map
  CUtensorMap out_map;  // boxes of 64 columns x kRowsOfWarp rows

  uint16_t* out;  // 16-bit elements of the row's type
  float* lse;     // null: not written
  // In elements. The batch strides are 0 with cu_seqlens_q.
  int64_t out_batch, out_seq, out_head;
  int64_t lse_batch, lse_seq, lse_head;

  SequenceTable seqlens_q;  // of q and out
  SequenceTable seqlens_k;  // of k and v
  TileSchedulerParams scheduler;
  QuantizedArguments quantized;
  int num_heads_q;
  int num_heads_kv;
  int qhead_per_kvhead;  // query heads that share one head of k and v
  int head_dim_v;
  int window_left;  // at most the longer of the longest sequences: nothing is "open" here
  int window_right;
  float score_scale;   // scores, after the cap if there is one, to log2 units
  float tanh_scale;    // attention/score_scale.cuh, cap_scores; 0: no cap
  float one_over_cap;  // 8 bits, in log2 units: there score_scale is that of scores without a cap
};

}  // namespace flashattn3::forward
