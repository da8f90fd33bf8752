// What the forward kernel is launched with; host/launch_forward.cuh makes it from ForwardParams.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "blocks/sequence.cuh"
#include "blocks/tile_order.cuh"

namespace flashattn3 {

struct ForwardArguments {
  // (head_dim, rows, heads, entries), innermost first; entries is 1 with cu_seqlens.
  CUtensorMap q;  // boxes of 64 columns x block_m rows
  CUtensorMap k;  // boxes of 64 columns x block_n rows
  CUtensorMap v;
  CUtensorMap out_map;  // boxes of 64 columns x kRowsOfWarp rows

  uint16_t* out;  // 16-bit elements of the row's type
  float* lse;     // null: not written
  // In elements. The batch strides are 0 with cu_seqlens_q.
  int64_t out_batch, out_seq, out_head;
  int64_t lse_batch, lse_seq, lse_head;

  SequenceTable rows;  // of q and out
  SequenceTable keys;  // of k and v
  TileOrder order;
  int num_heads_q;
  int heads_per_kv;  // query heads that share one head of k and v
  int head_dim_v;
  int window_left;  // at most the longer of the longest sequences: nothing is "open" here
  int window_right;
  float score_scale;  // scores, after the cap if there is one, to log2 units
  float tanh_scale;   // blocks/online_softmax.cuh, cap_scores; 0: no cap
};

}  // namespace flashattn3
