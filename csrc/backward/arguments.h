// What the kernels of the backward are launched with; launch/backward.cuh makes it from
// BackwardParams.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/mask.cuh"
#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"
#include "backward/config.h"

namespace flashattn3::backward {

// In which order a tile of keys walks through the queries that see it, and, where the order of
// their additions to dQ is fixed, tiles come to a block of queries. A tile may wait for tiles that
// were handed out before it, never for later ones. But for the last way the heads that share the
// keys come one after the other.
//   kAscending: from the first on; the tiles from the first on too, each a step behind the one
//     before.
//   kDiagonal: as kAscending, but with a mask, so that each tile has a first block of its own; the
//     tiles last one first, so that all walk at the same pace, and none waits.
//   kStaggered: each from a block of its own on, and around; no order.
//   kHeadsInnermost: downwards from near the last block, and around, at each block all heads;
//     each tile from a block and head of its own; no order. With a mask tiles see unequally
//     many queries: so they are near the same ones nevertheless, which stay in L2.
enum class Traversal { kAscending, kDiagonal, kStaggered, kHeadsInnermost };

// Where a head's rows are kept between the three kernels: in whole blocks of 64, each sequence's
// rows from a block's start on. Statistics are fp32 (heads, rows); sums of dQ lie in tiles of 64
// rows, in the order of the accumulators.
struct Workspace {
  float* lse;               // log2 units; +inf where a row sees no key or is none
  float* minus_delta;       // minus the row's sum of dout * out, plus the gradient of its lse
  float* dq_accum;          // (heads, rows / 64, head_dim of the row, 64)
  int32_t* tile_semaphore;  // how many tiles of keys are handed out
  // Up to 128 columns (sequences, heads of k): how many threads that send have seen a tile through.
  int32_t* tiles_done;
  int32_t* dq_semaphore;  // (heads, rows / 64, num_dq_semaphores() of the row): how many tiles of
                          // keys have added to the sums; dq_semaphore.cuh
  int64_t num_rows;       // of a head, a multiple of 64

  // The first of a sequence's rows; batch_head_idx: with cu_seqlens the head alone, else counted
  // across the batch.
  __device__ __forceinline__ int64_t first(const SequenceTable& table, int batch_idx, int head,
                                           int num_heads, int offset) const {
    if (table.cu_seqlens == nullptr) return (int64_t{batch_idx} * num_heads + head) * num_rows;
    return head * num_rows + int64_t{offset / kBlockM + batch_idx} * kBlockM;
  }
};

struct Arguments {
  // (head_dim, rows, heads, entries), innermost first; entries is 1 with cu_seqlens. Boxes of 64
  // columns x 64 rows (q, dout), rows of a tile of keys (k, v), 16 rows (dk, dv).
  CUtensorMap q, k, v, dout, dk_map, dv_map;
  // (rows of all heads, 2): the room's lse and minus_delta; boxes of 64 rows.
  CUtensorMap lse_delta;

  uint16_t *dq, *dk, *dv;  // 16-bit elements of the row's type
  // In elements. The batch strides are 0 with cu_seqlens.
  int64_t dq_batch, dq_seq, dq_head;
  int64_t dk_batch, dk_seq, dk_head;
  int64_t dv_batch, dv_seq, dv_head;

  SequenceTable seqlens_q;        // of q, out, dout and dq
  SequenceTable seqlens_k;        // of k, v, dk and dv
  TileSchedulerParams scheduler;  // of tiles of keys
  Workspace workspace;
  int num_heads_q;
  int num_heads_kv;
  int qhead_per_kvhead;  // query heads that share one head of k and v
  int head_dim;
  int head_dim_v;
  int window_left;  // at most the longer of the longest sequences: nothing is "open" here
  int window_right;
  Traversal traversal;
  bool deterministic;   // tiles of keys add to dQ one after the other
  float softmax_scale;  // of dq and dk
  float score_scale;    // scores, after the cap if there is one, to log2 units
  float tanh_scale;     // attention/score_scale.cuh, cap_scores; 0: no cap
};

// The 64 rows of a head that a CTA of the kernels before and behind works on: a block of the room.
// So the number of these CTAs follows the rows that there are, and not the longest sequence.
struct MBlock {
  int head, batch_idx;
  Sequence rows;  // of the sequence
  int first_row;  // in the sequence

  // With cu_seqlens the room has up to a block more for each sequence than it has rows for.
  __device__ __forceinline__ bool any() const { return first_row >= 0 && first_row < rows.length; }

  // number: of the room's blocks, one head after the other. All lanes of the warp must call it.
  static __device__ __forceinline__ MBlock of_number(int number, const Workspace& workspace,
                                                     const SequenceTable& table, int batch,
                                                     int num_heads) {
    const int num_blocks = static_cast<int>(workspace.num_rows / kBlockM);
    const int batch_head_idx = number / num_blocks, block = number - batch_head_idx * num_blocks;
    MBlock found;
    found.head = batch_head_idx;
    found.batch_idx = 0;
    if (table.cu_seqlens == nullptr) {
      found.batch_idx = batch_head_idx / num_heads;
      found.head -= found.batch_idx * num_heads;
    } else {
      found.batch_idx = last_that_begins(table, batch, block);
    }
    found.rows = find_sequence(table, found.batch_idx);
    const int skipped = table.cu_seqlens == nullptr ? 0 : first_block(table, found.batch_idx);
    found.first_row = (block - skipped) * kBlockM;
    return found;
  }

 private:
  // With cu_seqlens: of a head's blocks in the room, the first of a sequence.
  static __device__ __forceinline__ int first_block(const SequenceTable& table, int batch_idx) {
    return find_sequence(table, batch_idx).offset / kBlockM + batch_idx;
  }

  // The last sequence that begins at this block or before it. A warp looks at 32 places at a time.
  static __device__ __forceinline__ int last_that_begins(const SequenceTable& table, int batch,
                                                         int block) {
    const int lane = threadIdx.x % 32;
    int low = 0;
    for (int count = batch; count > 1;) {
      const int distance = (count + 31) / 32, place = lane * distance;
      const bool begins = place < count && first_block(table, low + place) <= block;
      const int skipped = max(0, __popc(__ballot_sync(~0u, begins)) - 1) * distance;
      low += skipped;
      count = min(distance, count - skipped);
    }
    return low;
  }
};

// Before: statistics of the rows, and no arrivals. out and dout: rows of whole 16 bytes.
struct PreprocessArguments {
  const uint16_t *out, *dout;
  const float* lse;   // natural log
  const float* dlse;  // null: 0
  int64_t out_batch, out_seq, out_head;
  int64_t dout_batch, dout_seq, dout_head;
  int64_t lse_batch, lse_seq, lse_head;
  int64_t dlse_batch, dlse_seq, dlse_head;
  SequenceTable seqlens_q;
  Workspace workspace;
  int batch;
  int num_heads;
  int num_batch_heads;  // of k, times batch
  int head_dim_v;
  int dq_semaphores_per_block;  // of a block of 64 rows
  int dq_accum_columns;         // of the sums that are to be 0; 0: none
};

}  // namespace flashattn3::backward
