// Arguments of the forward kernel; launch/forward.cuh builds them from ForwardParams.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/alibi.cuh"
#include "attention/seqlen.cuh"
#include "attention/sinks.cuh"
#include "attention/tile_scheduler.cuh"
#include "attention/variant.cuh"
#include "forward/quantized_arguments.h"

namespace flashattn3::forward {

struct Arguments {
  // (head_dim, seqlen, heads, batch), innermost first; batch is 1 with cu_seqlens.
  CUtensorMap q;        // boxes of 128 bytes of columns x query_box_rows
  CUtensorMap k;        // boxes of 128 bytes of columns x block_n rows
  CUtensorMap v;        // as k; 8-bit kernel configs: permuted V, see make_permuted_v_map
  CUtensorMap out_map;  // boxes of 64 columns x kRowsOfWarp rows

  uint16_t* out;  // 16-bit elements, fp16 or bf16
  float* lse;     // null: not written
  // Strides in elements. The batch strides are 0 with cu_seqlens_q.
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
  Variant variant;
  Sinks sinks;
  Slopes slopes;     // read by kernel configs with slopes
  float* max_logit;  // (num_heads_q), initially -inf; null: not written; of ScoreTerm::kLargest
};

}  // namespace flashattn3::forward
