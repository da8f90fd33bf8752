// Arguments of the kernel in fill_rows.cuh.
#pragma once

#include <cstdint>

#include "attention/seqlen.cuh"

namespace flashattn3::decode {

struct FillArguments {
  uint16_t* out;  // strides in elements; the batch strides are 0 with cu_seqlens_q
  float* lse;     // null: not written
  int64_t out_batch, out_seq, out_head;
  int64_t lse_batch, lse_seq, lse_head;
  int num_heads_q, head_dim_v;

  SequenceTable seqlens_q;
  int batch;
  // As in DecodeParams.
  const int32_t* cache_seqlens;
  const int32_t* cu_seqlens_k_new;
  const int32_t* cache_leftpad;
  int seqlen_k, seqlen_new;

  const int32_t* metadata;  // null: none
  int options_hash;         // what the metadata must hold
};

}  // namespace flashattn3::decode
