// What a batch of unequal lengths needs before its forward: the order in which its sequences are
// worked on, and the rows of out and lse that no sequence owns.
#pragma once

#include <cstdint>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "blocks/row_store.cuh"
#include "blocks/sequence.cuh"
#include "blocks/tile_order.cuh"

namespace flashattn3 {

struct RaggedArguments {
  SequenceTable rows;
  SequenceTable keys;
  int batch;
  int block_m;
  RaggedOrder order;  // to be written

  uint16_t* out;  // (rows, heads, columns), strides in elements
  float* lse;     // null: not written
  int64_t out_seq, out_head;
  int64_t lse_seq, lse_head;
  int num_heads;
  int head_dim_v;
};

constexpr int kRaggedThreads = 1024;

// One CTA. Sequences in the order of their keys, most first, so that what is long is not begun at
// the end; by the thousand, in a larger batch.
__device__ inline void order_sequences(const RaggedArguments& args) {
  using Sort = cub::BlockRadixSort<int, kRaggedThreads, 1, int>;
  using Scan = cub::BlockScan<int, kRaggedThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
  } room;
  int blocks_before = 0;
  for (int begin = 0; begin < args.batch; begin += kRaggedThreads) {
    const int place = begin + static_cast<int>(threadIdx.x);
    int num_keys[1] = {place < args.batch ? find_sequence(args.keys, place).length : -1};
    int entry[1] = {place};
    Sort(room.sort).SortDescending(num_keys, entry);
    __syncthreads();
    // Padding sorts behind everything, so this thread's entry is real where its place is.
    int blocks = 0;
    if (place < args.batch) {
      blocks = (find_sequence(args.rows, entry[0]).length + args.block_m - 1) / args.block_m;
    }
    int before, all;
    Scan(room.scan).ExclusiveSum(blocks, before, all);
    __syncthreads();
    if (place < args.batch) {
      args.order.entries()[place] = entry[0];
      args.order.first_blocks()[place] = blocks_before + before;
    }
    blocks_before += all;
  }
  if (threadIdx.x == 0) args.order.first_blocks()[args.batch] = blocks_before;
}

// out 0 and lse -inf in rows begin to end - 1.
__device__ inline void clear_rows(const RaggedArguments& args, int begin, int end) {
  const int units = (args.head_dim_v + 7) / 8;
  const int64_t count = static_cast<int64_t>(max(0, end - begin)) * args.num_heads * units;
  for (int64_t i = threadIdx.x; i < count; i += kRaggedThreads) {
    const int unit = static_cast<int>(i % units);
    const int head = static_cast<int>(i / units % args.num_heads);
    const int64_t row = begin + i / units / args.num_heads;
    store_columns(args.out + row * args.out_seq + head * args.out_head, unit * 8, args.head_dim_v,
                  make_uint4(0, 0, 0, 0));
    if (unit == 0 && args.lse != nullptr) {
      args.lse[row * args.lse_seq + head * args.lse_head] = -INFINITY;
    }
  }
}

// CTA 0 orders; CTA 1 + b clears between the used rows of sequence b and the next one; the last
// clears before the first sequence and behind the last. A row that no sequence owns lies in one of
// these stretches whatever the table holds: going up from the first edge to the last, some pair of
// neighbouring edges has it between them. Rows of theirs that are owned are written afterwards.
__global__ void __launch_bounds__(kRaggedThreads) prepare_ragged(const RaggedArguments args) {
  if (blockIdx.x == 0) {
    order_sequences(args);
  } else if (static_cast<int>(blockIdx.x) <= args.batch) {
    const int entry = blockIdx.x - 1;
    const Sequence rows = find_sequence(args.rows, entry);
    clear_rows(args, rows.offset + rows.length,
               min(args.rows.cu_seqlens[entry + 1], args.rows.total));
  } else {
    const int first = args.rows.cu_seqlens[0], last = args.rows.cu_seqlens[args.batch];
    clear_rows(args, 0, min(first, args.rows.total));
    clear_rows(args, max(last, 0), args.rows.total);
  }
}

}  // namespace flashattn3
