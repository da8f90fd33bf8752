// What the kernels of the backward are launched with; host/launch_backward.cuh makes it from
// BackwardParams.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "blocks/sequence.cuh"
#include "blocks/tile_order.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/backward/row.h"

namespace flashattn3 {

// In which order a tile of keys walks through the queries that see it, and, where the order of
// their additions to dQ is fixed, tiles come to a block of queries. A tile may wait for tiles that
// were handed out before it, never for later ones. But for the last way the heads that share the
// keys come one after the other.
//   kUpwards: from the first on; the tiles from the first on too, each a step behind the one
//     before.
//   kDiagonal: as kUpwards, but with a mask, so that each tile has a first block of its own; the
//     tiles last one first, so that all walk at the same pace, and none waits.
//   kRotated: each from a block of its own on, and around; no order.
//   kHeadsInside: downwards from near the last block, and around, at each block all heads;
//     each tile from a block and head of its own; no order. With a mask tiles see unequally
//     many queries: so they are near the same ones nevertheless, which stay in L2.
enum class RowWalk { kUpwards, kDiagonal, kRotated, kHeadsInside };

// Where a head's rows are kept between the three kernels: in whole blocks of 64, each sequence's
// rows from a block's start on. Statistics are fp32 (heads, rows); sums of dQ lie in tiles of 64
// rows, in the order of the accumulators.
struct RowRoom {
  float* lse;            // log2 units; +inf where a row sees no key or is none
  float* minus_delta;    // minus the row's sum of dout * out, plus the gradient of its lse
  float* sums;           // (heads, rows / 64, head_dim of the row, 64)
  int32_t* tiles_taken;  // how many tiles of keys are handed out
  // Up to 128 columns (sequences, heads of k): how many threads that send have seen a tile through.
  int32_t* tiles_through;
  int32_t* arrivals;  // (heads, rows / 64, backward_arrivals() of the row): how many tiles of keys
                      // have added to the sums; arrivals.cuh
  int64_t num_rows;   // of a head, a multiple of 64

  // The first of a sequence's rows; head_total: with cu_seqlens the head alone, else counted across
  // the batch.
  __device__ __forceinline__ int64_t first(const SequenceTable& table, int entry, int head,
                                           int num_heads, int offset) const {
    if (table.cu_seqlens == nullptr) return (int64_t{entry} * num_heads + head) * num_rows;
    return head * num_rows + int64_t{offset / kBackwardRows + entry} * kBackwardRows;
  }
};

struct BackwardArguments {
  // (head_dim, rows, heads, entries), innermost first; entries is 1 with cu_seqlens. Boxes of 64
  // columns x 64 rows (q, dout), rows of a tile of keys (k, v), 16 rows (dk, dv).
  CUtensorMap q, k, v, dout, dk_map, dv_map;
  // (rows of all heads, 2): the room's lse and minus_delta; boxes of 64 rows.
  CUtensorMap statistics;

  uint16_t *dq, *dk, *dv;  // 16-bit elements of the row's type
  // In elements. The batch strides are 0 with cu_seqlens.
  int64_t dq_batch, dq_seq, dq_head;
  int64_t dk_batch, dk_seq, dk_head;
  int64_t dv_batch, dv_seq, dv_head;

  SequenceTable rows;  // of q, out, dout and dq
  SequenceTable keys;  // of k, v, dk and dv
  TileOrder order;     // of tiles of keys
  RowRoom room;
  int num_heads_q;
  int num_heads_kv;
  int heads_per_kv;  // query heads that share one head of k and v
  int head_dim;
  int head_dim_v;
  int window_left;  // at most the longer of the longest sequences: nothing is "open" here
  int window_right;
  RowWalk walk;
  bool ordered;         // tiles of keys add to dQ one after the other
  float softmax_scale;  // of dq and dk
  float score_scale;    // scores, after the cap if there is one, to log2 units
  float tanh_scale;     // blocks/score_scale.cuh, cap_scores; 0: no cap
};

// Which 64 rows the kernels before and behind work on: the index-th of as many as there are blocks
// in all heads of all sequences.
struct RowBlock {
  int block, head, sequence;
  static __device__ __forceinline__ RowBlock of_number(int index, int num_blocks, int num_heads) {
    const int head_total = index / num_blocks;
    return {index % num_blocks, head_total % num_heads, head_total / num_heads};
  }
};

// Before: statistics of the rows, and no arrivals. out and dout: rows of whole 16 bytes.
struct StatisticsArguments {
  const uint16_t *out, *dout;
  const float* lse;   // natural log
  const float* dlse;  // null: 0
  int64_t out_batch, out_seq, out_head;
  int64_t dout_batch, dout_seq, dout_head;
  int64_t lse_batch, lse_seq, lse_head;
  int64_t dlse_batch, dlse_seq, dlse_head;
  SequenceTable rows;
  RowRoom room;
  int num_blocks;  // of 64 rows, of the longest sequence, in whole steps
  int num_heads;
  int heads_per_kv;
  int head_dim_v;
  int num_arrivals;  // of a block of 64 rows
  int sum_columns;   // of the sums that are to be 0; 0: none
};

}  // namespace flashattn3
