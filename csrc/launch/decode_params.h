// Parameters of one cached call. torch_binding (or a test) fills them, and launch_decode or
// launch_cached_forward reads them. No torch here. All pointers are device pointers.
#pragma once

#include <climits>
#include <cstdint>

#include "decode/counters.h"
#include "launch/params.h"

namespace flashattn3 {

// The numbers of a cached call that do not change from step to step: FIELD(type, name) for each, in
// the order of the operator prepare_decode. flashattn3/backends/hopper/launch_record.py has the
// same. DecodeParams says what they mean; further:
//
//   page_size: 0: the cache is dense
//   byte_cache: the cache has 8 bits. Kernels that read 16 read it widened (launch/widen_cache.h)
//   split_tokens: 0, or the keys of a span; of a config with spans
//   short_config: index of the decode kernel config that takes sequences of a varlen batch with at
//       most short_queries queries, beside the forward kernel that takes the others; -1: none
#define FLASHATTN3_CACHED_FIELDS(FIELD) \
  FIELD(int, num_heads_q)               \
  FIELD(int, num_heads_kv)              \
  FIELD(int, head_dim)                  \
  FIELD(int, head_dim_v)                \
  FIELD(int, page_size)                 \
  FIELD(bool, byte_cache)               \
  FIELD(float, softmax_scale)           \
  FIELD(float, softcap)                 \
  FIELD(int, window_left)               \
  FIELD(int, window_right)              \
  FIELD(int, split_tokens)              \
  FIELD(bool, whole_tiles)              \
  FIELD(bool, leaves_sms)               \
  FIELD(int, num_sms)                   \
  FIELD(int, short_config)              \
  FIELD(int, short_queries)

struct CachedProblem {
#define FLASHATTN3_MEMBER(type, name) type name;
  FLASHATTN3_CACHED_FIELDS(FLASHATTN3_MEMBER)
#undef FLASHATTN3_MEMBER
};

// K or V of the cache: (num_caches, capacity, num_heads_kv, ·), or pages of it, (num_pages,
// page_size, num_heads_kv, ·). Any strides that are multiples of 16 bytes; the last one is 1.
struct CacheParams {
  const void* data;  // a multiple of 16 bytes
  Strides stride;    // in elements; batch: between pages, or sequences of a dense cache
};

// In elements, between sequences and between KV heads. 0: they share a descale.
struct DescaleStrides {
  int batch = 0, head = 0;
};

struct DecodeParams {
  const void* q;  // (batch, seqlen_q, num_heads_q, head_dim); with cu_seqlens_q (total_q, ...)
  void* out;      // (batch, seqlen_q, num_heads_q, head_dim_v); else as q
  float* lse;     // (batch, num_heads_q, seqlen_q), natural log; with cu_seqlens_q (num_heads_q,
                  // total_q); null: not written
  Strides q_stride, out_stride;  // multiples of 16 bytes; batch is not read with cu_seqlens_q
  Strides lse_stride;            // any value
  CacheParams k, v;

  // int32; values are clamped to the tensors, so no value causes an access outside. Each may be
  // null but for page_table of a paged cache.
  const int32_t* page_table;        // (num_caches, max_pages); null: the cache is dense
  const int32_t* cache_seqlens;     // (batch); null: seqlen_k
  const int32_t* cu_seqlens_q;      // (batch + 1)
  const int32_t* cu_seqlens_k_new;  // (batch + 1); null: seqlen_new
  const int32_t* cache_leftpad;     // (batch); keys before it are hidden
  const int32_t* cache_batch_idx;   // (batch); null: sequence i has entry i
  int64_t page_table_stride;        // in elements, between the first dimension's entries

  // float32, or null.
  const float *q_descale, *k_descale, *v_descale;  // (batch, num_heads_kv)
  const float* sinks;                              // (num_heads_q), dense

  int batch;
  int seqlen_q;    // queries of a sequence; with cu_seqlens_q of the longest
  int total_q;     // with cu_seqlens_q: tokens of q
  int seqlen_k;    // cached tokens where cache_seqlens is null
  int seqlen_new;  // tokens that were appended to every sequence where cu_seqlens_k_new is null
  int num_heads_q, num_heads_kv;
  int head_dim, head_dim_v;  // multiples of 8, at most the config's
  int num_caches;            // first dimension of the page table or of the dense cache
  int num_pages, page_size;  // of a paged cache
  int capacity;              // tokens of one of num_caches

  float softmax_scale, softcap;   // as in AttentionProblem
  int window_left, window_right;  // as in AttentionProblem
  int split_tokens;  // keys of a span, a multiple of 128; 0: none, in a config without spans
  bool whole_tiles;  // num_splits 1: no work tile is split among CTAs; the work tiles
                     // of cached forward kernels never are
  bool leaves_sms;   // num_sms is less than the GPU has
  int num_sms;       // that the call may use, at least 1

  // A forward kernel skips sequences of a varlen batch with fewer queries than min_queries, a
  // decode kernel those with more than max_queries.
  int min_queries = 0, max_queries = INT_MAX;

  // LaunchSize::workspace_bytes, an address that is a multiple of 16, not initialised; null if
  // there are none.
  void* workspace;
  // Zero before the first launch that uses them. Launches that may run concurrently must not share
  // them. A cached forward kernel may have none: null.
  decode::Counters* counters;
  bool pdl;  // as in ForwardParams

  DescaleStrides q_descale_stride, k_descale_stride, v_descale_stride;

  // (batch, seqlen_q, tree_words) int32, with cu_seqlens_q (total_q, tree_words); null: none. Of a
  // config with a tree.
  const int32_t* tree_mask = nullptr;
  int tree_words = 0;     // 1 or 2; bit j % 32 of word j / 32: the query sees new token j
  Strides tree_stride{};  // in elements, of batch and seq; batch is not read with cu_seqlens_q

  // Pages of the cache with keys that all sequences have in front of their own, in a config with a
  // prefix; null: none. The cache is paged, queries see all keys to their left, sequences
  // have no descales of their own, and q_stride.batch is seqlen_q * q_stride.seq.
  const int32_t* prefix_pages = nullptr;
  const int32_t* prefix_seqlen = nullptr;  // (1): its tokens; null: prefix_len
  int prefix_len = 0, prefix_capacity = 0;

  int64_t tokens() const { return cu_seqlens_q != nullptr ? total_q : int64_t{batch} * seqlen_q; }
};

// The parameters of a problem without tensors, lengths and sizes.
inline DecodeParams decode_params_of(const CachedProblem& problem) {
  return {.num_heads_q = problem.num_heads_q,
          .num_heads_kv = problem.num_heads_kv,
          .head_dim = problem.head_dim,
          .head_dim_v = problem.head_dim_v,
          .page_size = problem.page_size,
          .softmax_scale = problem.softmax_scale,
          .softcap = problem.softcap,
          .window_left = problem.window_left,
          .window_right = problem.window_right,
          .split_tokens = problem.split_tokens,
          .whole_tiles = problem.whole_tiles,
          .leaves_sms = problem.leaves_sms,
          .num_sms = problem.num_sms};
}

}  // namespace flashattn3
