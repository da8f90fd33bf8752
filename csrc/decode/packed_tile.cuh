// The packed rows of a work tile: which query, which head and which keys a row has.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/mask.cuh"
#include "decode/arguments.h"
#include "decode/config.h"
#include "decode/work_share.cuh"

namespace flashattn3::decode {

struct PackedTile {
  int heads_per_tile;
  int first_query, num_queries;  // of the sequence
  int first_head, num_heads;     // of q and out

  static __host__ __device__ __forceinline__ PackedTile of(const Arguments& args,
                                                           const CachedSequence& sequence,
                                                           const Part& part) {
    const PackedRows& rows = args.rows;
    const int query = part.row_tile / rows.head_tiles * rows.tokens;
    const int head = part.row_tile % rows.head_tiles * rows.heads;  // among those of the KV head
    return {.heads_per_tile = rows.heads,
            .first_query = query,
            .num_queries = min(rows.tokens, sequence.num_queries - query),
            .first_head = part.kv_head * args.qhead_per_kvhead + head,
            .num_heads = min(rows.heads, args.qhead_per_kvhead - head)};
  }

  // One past the last row that exists. Rows before it may not exist in the last tile of heads.
  __host__ __device__ __forceinline__ int num_rows() const { return num_queries * heads_per_tile; }
  __host__ __device__ __forceinline__ bool has(int row) const {
    return row < num_rows() && row % heads_per_tile < num_heads;
  }
  __host__ __device__ __forceinline__ int query_of(int row) const {
    return first_query + row / heads_per_tile;
  }
  __host__ __device__ __forceinline__ int head_of(int row) const {
    return first_head + row % heads_per_tile;
  }
};

// Keys that a query sees: begin to end - 1; begin may be past end.
struct KeyRange {
  int begin, end;
};

__host__ __device__ __forceinline__ KeyRange visible_keys(const Arguments& args,
                                                          const CachedSequence& sequence,
                                                          int query) {
  const int position = sequence.position(query);
  KeyRange keys{sequence.first_key, sequence.num_keys};
  if (args.window_left != INT_MAX) keys.begin = max(keys.begin, position - args.window_left);
  if (args.window_right != INT_MAX) keys.end = min(keys.end, position + args.window_right + 1);
  return keys;
}

}  // namespace flashattn3::decode
