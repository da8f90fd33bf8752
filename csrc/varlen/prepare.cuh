// Prepares a varlen forward: writes the order in which the kernel visits the sequences, and zeros
// the rows of out and lse that no sequence owns.
#pragma once

#include <cstdint>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"
#include "attention/tile_shape.h"
#include "tile/tma_store.cuh"

namespace flashattn3::varlen {

struct Arguments {
  SequenceTable seqlens_q;
  SequenceTable seqlens_k;
  int batch;
  TileShape shape;
  VarlenSchedule schedule;  // output

  uint16_t* out;  // (rows, heads, columns), strides in elements
  float* lse;     // null: not written
  int64_t out_seq, out_head;
  int64_t lse_seq, lse_head;
  int num_heads;
  int head_dim_v;

  int min_queries;     // sequences with fewer have no block
  int32_t* semaphore;  // set to 0, or null
};

constexpr int kThreads = 1024;

// Sorts the sequences by their number of keys, most first, so that no long sequence starts last.
// Runs in one CTA; a larger batch is sorted in parts of 1024 sequences.
__device__ inline void order_sequences(const Arguments& args) {
  using Sort = cub::BlockRadixSort<int, kThreads, 1, int>;
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
  } temp_storage;
  int blocks_before = 0;
  for (int begin = 0; begin < args.batch; begin += kThreads) {
    const int place = begin + static_cast<int>(threadIdx.x);
    int num_keys[1] = {place < args.batch ? find_sequence(args.seqlens_k, place).length : -1};
    int batch_idx[1] = {place};
    Sort(temp_storage.sort).SortDescending(num_keys, batch_idx);
    __syncthreads();
    // Padding sorts last, so batch_idx[0] is a sequence if place < batch.
    int blocks = 0;
    if (place < args.batch) {
      const int length = find_sequence(args.seqlens_q, batch_idx[0]).length;
      if (length >= args.min_queries) blocks = static_cast<int>(args.shape.num_blocks(length));
    }
    int before, all;
    Scan(temp_storage.scan).ExclusiveSum(blocks, before, all);
    __syncthreads();
    if (place < args.batch) {
      args.schedule.batch_indices()[place] = batch_idx[0];
      args.schedule.first_blocks()[place] = blocks_before + before;
    }
    blocks_before += all;
  }
  if (threadIdx.x != 0) return;
  args.schedule.first_blocks()[args.batch] = blocks_before;
  if (args.semaphore != nullptr) *args.semaphore = 0;
}

// Writes out 0 and lse -inf to rows begin to end - 1.
__device__ inline void zero_unused_rows(const Arguments& args, int begin, int end) {
  const int vecs = (args.head_dim_v + 7) / 8;
  const int64_t count = static_cast<int64_t>(max(0, end - begin)) * args.num_heads * vecs;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int vec = static_cast<int>(i % vecs);
    const int head = static_cast<int>(i / vecs % args.num_heads);
    const int64_t row = begin + i / vecs / args.num_heads;
    store_columns(args.out + row * args.out_seq + head * args.out_head, vec * 8, args.head_dim_v,
                  make_uint4(0, 0, 0, 0));
    if (vec == 0 && args.lse != nullptr) {
      args.lse[row * args.lse_seq + head * args.lse_head] = -INFINITY;
    }
  }
}

// CTA 0 sorts; CTA 1 + b zeros the rows between the used rows of sequence b and the next sequence;
// the last CTA zeros the rows before the first sequence and after the last. Every row that no
// sequence owns is in one of these ranges, whatever the table holds: between the first and the last
// offset, some pair of neighbouring offsets encloses it. Owned rows in them are written later.
__global__ void __launch_bounds__(kThreads) prepare(const Arguments args) {
  if (blockIdx.x == 0) {
    order_sequences(args);
  } else if (static_cast<int>(blockIdx.x) <= args.batch) {
    const int batch_idx = blockIdx.x - 1;
    const Sequence rows = find_sequence(args.seqlens_q, batch_idx);
    zero_unused_rows(args, rows.offset + rows.length,
                     min(args.seqlens_q.cu_seqlens[batch_idx + 1], args.seqlens_q.total));
  } else {
    const int first = args.seqlens_q.cu_seqlens[0], last = args.seqlens_q.cu_seqlens[args.batch];
    zero_unused_rows(args, 0, min(first, args.seqlens_q.total));
    zero_unused_rows(args, max(last, 0), args.seqlens_q.total);
  }
}

}  // namespace flashattn3::varlen
