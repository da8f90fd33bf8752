// Kernel arguments of the backward; launch/backward.cuh fills them from BackwardParams.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "attention/alibi.cuh"
#include "attention/mask_lists.cuh"
#include "attention/seqlen.cuh"
#include "attention/sinks.cuh"
#include "attention/tile_scheduler.cuh"
#include "attention/variant.cuh"
#include "backward/config.h"

namespace flashattn3::backward {

// Order in which a work tile (n_block) visits m_blocks and, if deterministic, in which work tiles
// add to an m_block of dQ. A tile may wait for tiles that were scheduled before it, never for later
// ones. Except for kHeadsInnermost, the query heads of a KV head are visited one after the other.
//   kAscending: from the first m_block; tiles add from the first tile on, each one step behind the
//     previous one.
//   kDiagonal: as kAscending, but with a mask, so that tiles start at different m_blocks; tiles
//     add from the last tile on, so that all advance at the same pace and none waits.
//   kDiagonalReversed: as kDiagonal, but the tiles of the last L2 head group descend from the last
//     m_block, and there tiles add from the first tile on. So the longest tiles are scheduled
//     first, and all SMs finish together.
//   kStaggered: each tile starts at an m_block of its own and wraps around; no fixed order.
//   kHeadsInnermost: descending from near the last m_block, wrapping around, all heads at each
//     m_block; each tile starts at an m_block and head of its own; no fixed order. With a mask,
//     tiles see different numbers of queries; this keeps them near the same ones, in L2.
enum class Traversal { kAscending, kDiagonal, kDiagonalReversed, kStaggered, kHeadsInnermost };

// Workspace shared by the kernels. Rows of a head are in blocks of 64; each sequence starts
// at a new block. lse and minus_delta are fp32 (heads, rows); dq_accum is in tiles of 64 rows, in
// accumulator order.
struct Workspace {
  float* lse;               // log2 units; +inf for rows that see no key or do not exist. P is
                            // 2^(score - lse) in the config's unit_of_probabilities()
  float* minus_delta;       // minus the row's sum of dout * out, plus the gradient of its lse
  float* dq_accum;          // (heads, rows / 64, the config's head_dim, 64)
  int32_t* tile_semaphore;  // number of work tiles drawn
  // (sequences, heads of k): how often a dQ writer, or a CTA of a cluster, finished a tile.
  int32_t* tiles_done;
  int32_t* dq_semaphore;  // (heads, rows / 64, num_dq_semaphores()): state or number of additions
                          // to dq_accum; dq_semaphore.cuh
  int64_t num_rows;       // of a head, a multiple of 64
  float* sink_gradients;  // (heads, rows / 64): what the rows of a block add to that of a sink

  // First row of a sequence. Heads are counted per head with cu_seqlens, else across the batch.
  __device__ __forceinline__ int64_t first(const SequenceTable& table, int batch_idx, int head,
                                           int num_heads, int offset) const {
    if (table.cu_seqlens == nullptr) return (int64_t{batch_idx} * num_heads + head) * num_rows;
    return head * num_rows + int64_t{offset / kBlockM + batch_idx} * kBlockM;
  }
};

// Partial sums of dK and dV over the parts of a KV head's query heads (reduce_parts.cuh). Each
// sequence starts at a new tile.
struct PartialSums {
  float4* sums;           // (tiles, heads of k, warps_of_tile(), nodes, reduced_floats() / 4, 32)
  int32_t* states;        // (tiles, heads of k, warps_of_tile(), nodes): dq_semaphore.cuh
  int tiles_of_sequence;  // with cu_seqlens 1, since key_offset also counts
};

struct Arguments {
  // (head_dim, rows, heads, batch), innermost first; batch is 1 with cu_seqlens. Boxes of 64
  // columns x 64 rows (q, dout), an n_block's rows (k, v) or 16 rows (dk, dv).
  CUtensorMap q, k, v, dout, dk_map, dv_map;
  // (rows of all heads, 2): the workspace's lse and minus_delta; boxes of 64 rows.
  CUtensorMap lse_delta;

  uint16_t *dq, *dk, *dv;  // 16-bit elements of the config's type
  // In elements. The batch strides are 0 with cu_seqlens.
  int64_t dq_batch, dq_seq, dq_head;
  int64_t dk_batch, dk_seq, dk_head;
  int64_t dv_batch, dv_seq, dv_head;

  SequenceTable seqlens_q;        // of q, out, dout and dq
  SequenceTable seqlens_k;        // of k, v, dk and dv
  TileSchedulerParams scheduler;  // of n_blocks
  Workspace workspace;
  int num_heads_q;
  int num_heads_kv;                // of work tiles: heads of k and v times head_parts
  cutlass::FastDivmod head_parts;  // parts into which the query heads of a KV head are divided
  int qhead_per_kvhead;            // query heads of a part
  int head_dim;
  int head_dim_v;
  Window window;
  Traversal traversal;
  bool deterministic;   // work tiles add to dQ in a fixed order
  bool zeroes_dq;       // cluster2: work tiles write the zeros of dq_accum, not preprocess
  float softmax_scale;  // of dq and dk
  ScoreScale score_scale;
  PartialSums partial_sums;
  Slopes slopes;  // read by kernel configs with slopes
  void* dsinks;   // (num_heads_q), null: not written
  SinkType sink_type;
};

// Additional arguments of kernel configs with a bias.
struct BiasArguments : Arguments {
  // (seqlen_k, seqlen_q, heads, batch), innermost first; boxes of 64 keys x 64 queries.
  CUtensorMap bias, ds;
  bool writes_ds;  // the bias needs a gradient
  bool adds_ds;    // ds is the bias's gradient, to which two work tiles add theirs
  // 0 where one head, or one sequence, of the bias or of ds serves all; else 1.
  int heads_differ, sequences_differ;
  int ds_heads_differ, ds_sequences_differ;
  int batch;
};

// Additional arguments of kernel configs whose mask is lists of blocks.
struct ListedArguments : Arguments {
  MaskLists lists;       // of keys: each n_block has a list of m_blocks
  const int32_t* turns;  // as lists.entries: n_blocks that add to the m_block before this one
                         // (masks/block_lists.py, turns_of); read if deterministic
};

// The 64 rows of a head that a CTA of preprocess or postprocess computes: a block of the workspace.
// The number of these CTAs thus depends on the number of rows and not on the longest sequence.
struct MBlock {
  int head, batch_idx;
  Sequence rows;  // of the sequence
  int first_row;  // in the sequence

  // With cu_seqlens the workspace has up to one block per sequence more than there are rows for.
  __device__ __forceinline__ bool any() const { return first_row >= 0 && first_row < rows.length; }

  // number: index of a workspace block, head-major. All lanes of the warp must call it.
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
  // With cu_seqlens: first block of a sequence among a head's workspace blocks.
  static __device__ __forceinline__ int first_block(const SequenceTable& table, int batch_idx) {
    return find_sequence(table, batch_idx).offset / kBlockM + batch_idx;
  }

  // Last sequence that begins at or before this block: a search with 32 probes (a warp) per step.
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

// Arguments of preprocess. out and dout: rows are multiples of 16 bytes.
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
  int64_t num_counts;  // of tiles_done and of the states of partial sums after it
  int head_dim_v;
  int dq_semaphores_per_block;  // per block of 64 rows
  int dq_accum_columns;         // columns of dq_accum to set to 0; 0: none
  float log2_unit;              // log2_unit_of_probabilities()
  Sinks sinks;                  // read only if their gradients are summed
};

}  // namespace flashattn3::backward
