// Prepares a varlen call: writes the order in which the kernel visits the sequences, and clears the
// rows of the results that no sequence owns.
#pragma once

#include <cstdint>

#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"
#include "attention/tile_shape.h"
#include "ptx/pdl.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::varlen {

// A result in rows of tokens, whose rows outside the sequences become 0.
struct Result {
  uint16_t* data;     // (rows, heads, columns); null: nothing is written
  int64_t seq, head;  // strides in elements
  int num_heads, columns;
};

// The backward's work tiles are n_blocks: keys take the place of the forward's queries.
struct Arguments {
  SequenceTable seqlens;        // of the tokens that work tiles have: queries in the forward
  SequenceTable other_seqlens;  // of the tokens that they visit
  int batch;
  TileShape shape;
  VarlenSchedule schedule;  // output

  Result of_tiles[2];  // forward: out; backward: dk, dv
  Result of_others;    // backward: dq
  float* lse;          // of the rows of of_tiles[0]: -inf outside the sequences; null: not written
  int64_t lse_seq, lse_head;

  int min_tokens;      // sequences with fewer tokens have no block
  int32_t* semaphore;  // set to 0, or null
};

constexpr int kThreads = 256;
constexpr int kTokensPerStep = 128;

// Sequences with a greater weight come first: those whose tiles visit more tokens, then those with
// more blocks. The lower half is the number of blocks; a sequence without blocks weighs 0.
__device__ __forceinline__ int64_t weight_of(const Arguments& args, int batch_idx) {
  const int tokens = find_sequence(args.seqlens, batch_idx).length;
  if (tokens <= 0 || tokens < args.min_tokens) return 0;
  const int64_t visited = find_sequence(args.other_seqlens, batch_idx).length;
  const int64_t steps = (visited + kTokensPerStep - 1) / kTokensPerStep;
  return steps << 32 | args.shape.num_blocks(tokens);
}

// Writes the place of a sequence, found by comparing its weight with all others'; sequences of one
// weight are a run. batch_idx -1: writes the totals.
__device__ inline void write_place(const Arguments& args, int batch_idx) {
  const int64_t weight = batch_idx < 0 ? 0 : weight_of(args, batch_idx);
  if (batch_idx >= 0 && weight == 0) return;
  enum { kGreater, kBlocksOfGreater, kEqual, kEqualBefore, kNumCounts };
  __shared__ int sums[kNumCounts];
  if (threadIdx.x < kNumCounts) sums[threadIdx.x] = 0;
  __syncthreads();
  int counts[kNumCounts] = {};
  for (int other = threadIdx.x; other < args.batch; other += kThreads) {
    const int64_t other_weight = weight_of(args, other);
    if (other_weight > weight) {
      counts[kGreater] += 1;
      counts[kBlocksOfGreater] += static_cast<int>(other_weight);
    } else if (other_weight == weight) {
      counts[kEqual] += 1;
      counts[kEqualBefore] += other < batch_idx;
    }
  }
  for (int i = 0; i < kNumCounts; ++i) {
    const int sum = __reduce_add_sync(~0u, counts[i]);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[i], sum);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int greater = sums[kGreater], blocks_before = sums[kBlocksOfGreater];
  if (batch_idx < 0) {
    args.schedule.places()[-1] = {.first_block = blocks_before, .num_blocks = greater};
    return;
  }
  const int num_blocks = static_cast<int>(weight), place = greater + sums[kEqualBefore];
  args.schedule.places()[place] = {.first_block = blocks_before + sums[kEqualBefore] * num_blocks,
                                   .num_blocks = num_blocks,
                                   .first_of_run = greater,
                                   .run_length = sums[kEqual]};
  args.schedule.batch_indices()[place] = batch_idx;
}

// A warp clears a row at a time.
__device__ inline void zero_rows(const Result& result, int begin, int end) {
  if (result.data == nullptr) return;
  const int vecs = (result.columns + 7) / 8, count = result.num_heads * vecs;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = begin + warp; row < end; row += kThreads / 32) {
    uint16_t* data = result.data + row * result.seq;
    for (int i = lane; i < count; i += 32) {
      const int head = i / vecs, vec = i - head * vecs;
      store_columns(data + head * result.head, vec * 8, result.columns, make_uint4(0, 0, 0, 0));
    }
  }
}

__device__ inline void clear_lse(const Arguments& args, int begin, int end) {
  if (args.lse == nullptr) return;
  const int first = begin + static_cast<int>(threadIdx.x);
  for (int head = 0; head < args.of_tiles[0].num_heads; ++head) {
    float* lse = args.lse + head * args.lse_head;
    for (int row = first; row < end; row += kThreads) lse[row * args.lse_seq] = -INFINITY;
  }
}

// One of the CTAs that divide the rows of a sequence.
struct Part {
  int index, count;

  // Calls clear with this part of the rows from begin to end. begin: not negative.
  template <class Clear>
  __device__ __forceinline__ void of_rows(int begin, int end, const Clear& clear) const {
    if (end <= begin) return;  // begin may be the largest integer, so clear must not add to it
    const int rows = end - begin, share = (rows + count - 1) / count;
    const int first = min(index * share, rows);
    clear(begin + first, begin + min(first + share, rows));
  }
};

// Calls clear with a part of the rows between the used rows of a sequence and the next sequence;
// for batch_idx -1 of those before the first sequence and after the last. Every row that no
// sequence owns is in one of these ranges, whatever the table holds: between the first and the last
// offset, some pair of neighbouring offsets encloses it. Owned rows in them are written later.
template <class Clear>
__device__ __forceinline__ void clear_unused_rows(const SequenceTable& table, int batch,
                                                  int batch_idx, Part part, const Clear& clear) {
  if (batch_idx < 0) {
    part.of_rows(0, min(table.cu_seqlens[0], table.total), clear);
    part.of_rows(max(table.cu_seqlens[batch], 0), table.total, clear);
  } else {
    const Sequence rows = find_sequence(table, batch_idx);
    const int next = min(table.cu_seqlens[batch_idx + 1], table.total);
    part.of_rows(rows.offset + rows.length, next, clear);
  }
}

// CTA 1 + b of each batch + 1 CTAs is for sequence b, CTA 0 for what no sequence has. The rows that
// they clear are divided between the CTAs of a sequence, the first of which writes its place.
__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ Arguments args) {
  launch_dependents();
  griddepcontrol_wait();
  const int ctas = args.batch + 1, cta = static_cast<int>(blockIdx.x);
  const int batch_idx = cta % ctas - 1;
  const Part part{cta / ctas, static_cast<int>(gridDim.x) / ctas};
  if (part.index == 0) {
    write_place(args, batch_idx);
    if (batch_idx < 0 && args.semaphore != nullptr && threadIdx.x == 0) *args.semaphore = 0;
  }
  clear_unused_rows(args.seqlens, args.batch, batch_idx, part, [&](int begin, int end) {
    for (const Result& result : args.of_tiles) zero_rows(result, begin, end);
    clear_lse(args, begin, end);
  });
  if (args.of_others.data == nullptr) return;
  clear_unused_rows(args.other_seqlens, args.batch, batch_idx, part,
                    [&](int begin, int end) { zero_rows(args.of_others, begin, end); });
}

}  // namespace flashattn3::varlen
