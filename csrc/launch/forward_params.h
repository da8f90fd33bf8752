// A cached call as forward kernels take it: its queries and results, and where its keys are.
#pragma once

#include <algorithm>

#include "attention/cached_keys.cuh"
#include "launch/decode_params.h"
#include "launch/params.h"

namespace flashattn3 {

// The queries and results of a cached call; its sequences have `capacity` keys. Without the scale
// of scores.
inline ForwardParams forward_params_of(const DecodeParams& params) {
  ForwardParams forward{};
  forward.batch = params.batch;
  forward.seqlen_q = params.seqlen_q;
  forward.seqlen_k = params.capacity;
  forward.total_q = params.total_q;
  forward.num_heads_q = params.num_heads_q;
  forward.num_heads_kv = params.num_heads_kv;
  forward.head_dim = params.head_dim;
  forward.head_dim_v = params.head_dim_v;
  forward.varlen = params.cu_seqlens_q != nullptr;
  forward.window_left = params.window_left;
  forward.window_right = params.window_right;
  forward.num_sms = params.num_sms;
  forward.q = params.q;
  forward.out = params.out;
  forward.lse = params.lse;
  forward.sinks = params.sinks;
  forward.q_stride = params.q_stride;
  forward.out_stride = params.out_stride;
  forward.lse_stride = params.lse_stride;
  forward.positions_q = {params.cu_seqlens_q, nullptr};
  forward.positions_k = {nullptr, params.cache_seqlens};  // for the order of the sequences alone
  forward.varlen_schedule = params.workspace;
  forward.tile_counter = params.counters == nullptr ? nullptr : params.counters->tile;
  forward.pdl = params.pdl;
  return forward;
}

inline CachedKeys cached_keys_of(const DecodeParams& params) {
  const bool paged = params.page_table != nullptr;
  const int pages = paged ? params.num_pages : params.num_caches;
  const int slots = paged ? params.page_size : params.capacity;
  const bool no_keys = pages == 0 || params.k.data == nullptr || params.v.data == nullptr;
  return {.page_table = params.page_table,
          .page_table_stride = params.page_table_stride,
          .page_size = cutlass::FastDivmod(std::max(slots, 1)),
          .num_pages = pages,
          .num_caches = params.num_caches,
          .capacity = no_keys ? 0 : params.capacity,
          .cache_seqlens = params.cache_seqlens,
          .cu_seqlens_k_new = params.cu_seqlens_k_new,
          .cache_leftpad = params.cache_leftpad,
          .cache_batch_idx = params.cache_batch_idx,
          .seqlen_k = params.seqlen_k,
          .seqlen_new = params.seqlen_new};
}

}  // namespace flashattn3
