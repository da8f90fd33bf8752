// Arguments of the decode kernel; launch/decode.cuh builds them from DecodeParams.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/seqlen.cuh"
#include "attention/tree_mask.cuh"
#include "attention/variant.cuh"
#include "decode/config.h"
#include "decode/counters.h"
#include "decode/part_memory.h"

namespace flashattn3::decode {

// K and V of the cache. Element strides; `slot` is between tokens of a page, or of a dense cache.
struct CacheTensor {
  const uint16_t* data;
  int64_t page, slot, head;
};

// Descales of heads, (batch, num_heads_kv); null: all are 1. Strides in elements.
struct HeadDescales {
  const float* data;
  int batch, head;

  __device__ __forceinline__ float at(int batch_idx, int kv_head) const {
    return data == nullptr ? 1.f : data[batch_idx * batch + kv_head * head];
  }
};

// Descales of the keys of a cache of 8 bits; null: all are 1. Strides in elements; `slot` is 0
// where the tokens of a page share one.
struct KeyDescales {
  const float* data;
  int64_t page, slot, head;
};

// The packed rows of a KV head: query tokens x the query heads that share it, token by token. A
// work tile holds `tokens` tokens of `heads` heads: row r is token r / heads, head r % heads of the
// tile. Divisors are known on the host: a division by a number that is not takes about 30
// instructions.
struct PackedRows {
  int heads;
  int reciprocal;  // of heads, times 2^16, rounded up
  cutlass::FastDivmod tokens;
  int head_tiles;  // tiles that the query heads of a KV head take

  static PackedRows of(int qhead_per_kvhead) {
    const int heads = std::min(qhead_per_kvhead, kBlockM);
    return {.heads = heads,
            .reciprocal = (1 << 16) / heads + 1,
            .tokens = cutlass::FastDivmod(kBlockM / heads),
            .head_tiles = (qhead_per_kvhead + heads - 1) / heads};
  }
};

struct Arguments {
  const uint16_t* q;
  uint16_t* out;
  float* lse;  // null: not written
  // Strides in elements. The batch strides are 0 with cu_seqlens_q.
  int64_t q_batch, q_seq, q_head;
  int64_t out_batch, out_seq, out_head;
  int64_t lse_batch, lse_seq, lse_head;

  CacheTensor k, v;
  const int32_t* page_table;  // (num_caches, max_pages); null: the cache is dense
  int64_t page_table_stride;  // between its first dimension's entries
  cutlass::FastDivmod page_size;
  bool even_blocks;  // all keys of a KV block are in one page
  int num_pages;     // of the cache; dense: num_caches
  int num_caches;    // entries of the page table or of the dense cache
  int capacity;      // tokens of one entry

  SequenceTable seqlens_q;
  const int32_t* cache_seqlens;     // (batch), or null: seqlen_k
  const int32_t* cu_seqlens_k_new;  // (batch + 1), or null: seqlen_new
  const int32_t* cache_leftpad;     // (batch), or null
  const int32_t* cache_batch_idx;   // (batch), or null: batch_idx
  int seqlen_k, seqlen_new;
  int batch;
  int max_queries;  // sequences with more are skipped

  // Shares of the work (work_share.cuh), and how many neighbouring CTAs take each of them, one for
  // each of as many KV heads. The launch has num_shares * share_heads CTAs.
  cutlass::FastDivmod num_shares, share_heads;

  PackedRows rows;
  int num_heads_kv, qhead_per_kvhead;
  int head_groups;  // num_heads_kv / share_heads
  int head_dim, head_dim_v;
  cutlass::FastDivmod out_vectors;  // of four elements, of a row of O
  int window_left, window_right;    // INT_MAX: unbounded

  ScoreScale score_scale;
  HeadDescales q_descale, k_descale, v_descale;
  const float* sinks;  // (num_heads_q), natural log, or null

  bool whole_tiles;  // no work tile is split among CTAs
  int log2_stages;   // of the stages in use
  // Partial results (workspace.h): O of each part, (num_partials, partial_rows, head_dim_v), and
  // its row statistics, (num_partials, partial_rows), then those of groups of parts. partial_rows:
  // rows of a work tile that there can be, at most kBlockM. A warp kernel has
  // part_memory instead.
  int partial_rows;
  float* partial_out;
  float2* partial_stats;
  PartMemory* part_memory;
  int part_records;    // of part_memory; 0: no work tile has several CTAs
  Counters* counters;  // null with whole_tiles
  // Kernels with spans read how many KV blocks a span has, and how many slots for partial results
  // each CTA has (spans.cuh).
  int span_blocks, span_slots;

  // A cache of 8 bits has these; `data` of k and v then points to bytes.
  bool is_int8;           // else e4m3
  bool has_key_descales;  // columns of S and P are multiplied by them
  KeyDescales k_key_descales, v_key_descales;
};

struct TreeArguments : Arguments {
  TreeMask tree;
};

// A prefix: keys that all sequences have in front of their own. Its work tiles are those of one
// more sequence, the last of the batch, whose queries are all tokens of q: each sees all of its
// keys. So rows have two results, which join_prefix.cuh joins.
struct PrefixArguments : Arguments {
  const int32_t* prefix_pages;   // pages of the cache
  const int32_t* prefix_seqlen;  // (1), or null: prefix_len
  int prefix_len;
  int prefix_capacity;  // tokens of its pages
  int total_q;          // tokens of q
  // (2, total_q, num_heads_q, head_dim_v) and (2, total_q, num_heads_q): the results of the
  // sequences' own keys, then those of the prefix.
  float* row_out;
  float2* row_stats;

  // Whether a sequence of the batch is the prefix.
  __host__ __device__ __forceinline__ bool is_prefix(int batch_idx) const {
    return batch_idx == batch - 1;
  }
};

// The arguments of a plain call (is_plain in launch/decode_arguments.h), with constants for those
// that all plain calls have in common: the code for others is not compiled.
template <int kHeadDim>
__device__ __forceinline__ Arguments plain(Arguments args) {
  args.seqlens_q = {nullptr, nullptr, 1};
  args.max_queries = 1;
  args.rows.tokens = cutlass::FastDivmod(1);
  args.rows.head_tiles = 1;
  args.rows.reciprocal = 0;  // all rows are of the one query
  args.head_dim = args.head_dim_v = kHeadDim;
  args.out_vectors = cutlass::FastDivmod(kHeadDim / 4);
  args.cu_seqlens_k_new = args.cache_leftpad = args.cache_batch_idx = nullptr;
  args.window_right = INT_MAX;
  if constexpr (!plain_has_window(kHeadDim)) {
    args.window_left = INT_MAX;
    args.sinks = nullptr;
  }
  args.q_descale = args.k_descale = args.v_descale = {};
  args.score_scale.tanh_scale = 0.f;
  args.whole_tiles = false;
  return args;
}

}  // namespace flashattn3::decode
