// The packed rows of a work tile: which query, which head and which keys a row has.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/variant.cuh"
#include "decode/arguments.h"
#include "decode/config.h"
#include "decode/work_share.cuh"

namespace flashattn3::decode {

struct PackedTile {
  int heads_per_tile;
  int reciprocal;                // as in PackedRows
  int first_query, num_queries;  // of the sequence
  int first_head, num_heads;     // of q and out

  static __host__ __device__ __forceinline__ PackedTile of(const Arguments& args,
                                                           const CachedSequence& sequence,
                                                           const Part& part) {
    const PackedRows& rows = args.rows;
    int token_tile = part.row_tile, head_tile = 0;
    if (rows.head_tiles > 1) {  // rarely; a division takes about 30 instructions
      token_tile = part.row_tile / rows.head_tiles;
      head_tile = part.row_tile % rows.head_tiles;
    }
    const int tokens = rows.tokens;
    const int query = token_tile * tokens;
    const int head = head_tile * rows.heads;  // among those of the KV head
    return {.heads_per_tile = rows.heads,
            .reciprocal = rows.reciprocal,
            .first_query = query,
            .num_queries = min(tokens, sequence.num_queries - query),
            .first_head = part.kv_head * args.qhead_per_kvhead + head,
            .num_heads = min(rows.heads, args.qhead_per_kvhead - head)};
  }

  // One past the last row that exists. Rows before it may not exist in the last tile of heads.
  __host__ __device__ __forceinline__ int num_rows() const { return num_queries * heads_per_tile; }
  __host__ __device__ __forceinline__ bool has(int row) const {
    return row < num_rows() && head_in_tile(row) < num_heads;
  }
  __host__ __device__ __forceinline__ int query_of(int row) const {
    return first_query + token_in_tile(row);
  }
  __host__ __device__ __forceinline__ int head_of(int row) const {
    return first_head + head_in_tile(row);
  }

 private:
  // Exact for rows up to kBlockM.
  __host__ __device__ __forceinline__ int token_in_tile(int row) const {
    return row * reciprocal >> 16;
  }
  __host__ __device__ __forceinline__ int head_in_tile(int row) const {
    return row - token_in_tile(row) * heads_per_tile;
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

// The KV blocks of a part that a query of its work tile may see, and one at least. The first
// are those of the sequence.
template <int kBlockN>
__host__ __device__ __forceinline__ BlockRange visible_blocks(const Arguments& args,
                                                              const CachedSequence& sequence,
                                                              const PackedTile& tile,
                                                              const BlockRange& n_blocks) {
  const int keys = visible_keys(args, sequence, tile.first_query + tile.num_queries - 1).end;
  const int end = (max(keys, 0) + kBlockN - 1) / kBlockN;
  return {n_blocks.begin, max(n_blocks.begin + 1, min(n_blocks.end, end))};
}

// The scale of a part's scores, with its descales.
__device__ __forceinline__ ScoreScale scale_of(const Arguments& args, const Part& part) {
  const float descale = args.q_descale.at(part.batch_idx, part.kv_head) *
                        args.k_descale.at(part.batch_idx, part.kv_head);
  ScoreScale scale = args.score_scale;
  (scale.caps() ? scale.tanh_scale : scale.factor) *= descale;
  return scale;
}

}  // namespace flashattn3::decode
