// Joins the parts of a work tile that CTAs of a warp kernel share. Each CTA joins a share of the
// tile's blocks (part_memory.h): it stores its own part and polls those of the others, whose words
// say that they were written. Every block is summed in a fixed order, so that two launches give the
// same bits.
//
// No CTA waits for one that has not started, because that one might need its SM. The CTAs of a tile
// count when they start, and one that does not see the count complete when its own part is ready
// declines. The last one to start always sees it, and joins the blocks of those that declined.
#pragma once

#include "decode/arguments.h"
#include "decode/epilogue.cuh"
#include "decode/softmax.cuh"
#include "ptx/arrival_counter.cuh"
#include "ptx/marked_memory.cuh"

namespace flashattn3::decode {

// The CTA is the index-th of `count` CTAs of a sequence. batch_idx -1: it has none.
struct Split {
  int batch_idx, index, count;
};

enum class Turn { kDeclines, kJoins, kJoinsLast };

template <class Traits>
class WarpJoin {
  static constexpr int kPairs = 16;  // of lanes, each of which loads a block of a part at a time
  static constexpr int kBatch = 4;   // parts that a lane loads at a time

 public:
  __device__ __forceinline__ WarpJoin(const Arguments& args, const Split& split, int kv_head,
                                      int cta)
      : args_(args),
        split_(split),
        counter_(args.part_memory->started + kv_head * args.batch + split.batch_idx),
        pairs_of_block_(split.count > kBatch ? kPairs : 1),
        first_part_(kv_head * args.num_shares + cta - split.index),
        first_record_(first_part_ * (args.partial_rows * args.out_vectors / 2)) {}

  // Counts the CTA.
  __device__ __forceinline__ void start() {
    if (threadIdx.x == 0) before_ = count_up_to(counter_, split_.count);
  }
  // Asks whether all CTAs have started.
  __device__ __forceinline__ void look() {
    if (threadIdx.x == 0) missing_ = load_relaxed(counter_);
  }
  // Called by thread 0. The counter returns to 0 with the last CTA.
  __device__ __forceinline__ Turn turn() const {
    if (before_ == static_cast<uint32_t>(split_.count - 1)) return Turn::kJoinsLast;
    return missing_ == 0 ? Turn::kJoins : Turn::kDeclines;
  }

  // Stores vector i of the part's rows.
  __device__ __forceinline__ void store_part(int i, const float4& sum, const RowStats& all) const {
    const int at = record(i / 2, split_.index);
    store_marked(values_at(at) + i % 2, sum);
    if (i % 2 == 0) store_marked(stats_at(at), make_float2(all.max, all.sum));
  }

  // Joins this CTA's blocks, and those of CTAs that declined if it is the last. All threads call it
  // after their part is stored.
  __device__ __forceinline__ void run(Turn turn, const PackedTile& tile, const RowStore& to) const {
    uint32_t* joins = args_.part_memory->joins + first_part_;
    if (turn != Turn::kJoinsLast && threadIdx.x == 0) {
      store_relaxed(joins + split_.index, turn == Turn::kJoins);
    }
    if (turn == Turn::kDeclines) return;
    int whose = split_.index, next = 0;
#pragma unroll 1
    while (true) {
      join_blocks(whose, tile, to);
      if (turn == Turn::kJoins) return;
      if (next == 0 && !__syncthreads_or(declines(joins))) break;  // nearly always
      while (next < split_.count && load_relaxed(joins + next) != 0) ++next;
      if (next == split_.count) break;
      whose = next++;
    }
    __syncthreads();  // Sync: all warps have read who declined.
    if (threadIdx.x < split_.count) joins[threadIdx.x] = kUnwritten;
  }

 private:
  // Index of a part of a block.
  __device__ __forceinline__ int record(int block, int part) const {
    return first_record_ + block * split_.count + part;
  }

  __device__ __forceinline__ float4* values_at(int record) const {
    return args_.part_memory->values() + 2 * record;
  }
  __device__ __forceinline__ float2* stats_at(int record) const {
    return args_.part_memory->stats(args_.part_records) + record;
  }

  // Waits for what another CTA says of its blocks. The last threads do, whose warps have the fewest
  // of their own.
  __device__ __forceinline__ bool declines(const uint32_t* joins) const {
    const int other = Traits::kThreads - 1 - static_cast<int>(threadIdx.x);
    if (other >= split_.count || other == split_.index) return false;
    uint32_t word;
    while ((word = load_relaxed(joins + other)) == kUnwritten) poll_again();
    return word == 0;
  }

  // Joins the blocks of a CTA: index, index + count, ... A warp joins one at a time, or as many as
  // it has pairs of lanes where a lane can load all parts at a time.
  __device__ __forceinline__ void join_blocks(int index, const PackedTile& tile,
                                              const RowStore& to) const {
    const int num_blocks = tile.num_rows() * args_.out_vectors / 2;
    const int blocks_of_warp = kPairs / pairs_of_block_;
    const int first = threadIdx.x / 32 * blocks_of_warp;
#pragma unroll 1
    for (int i = first; index + i * split_.count < num_blocks;
         i += Traits::kWarps * blocks_of_warp) {
      const int pair = threadIdx.x % 32 / 2;
      const int block = index + (i + pair / pairs_of_block_) * split_.count;
      join_block(block, pair % pairs_of_block_, block < num_blocks, to);
    }
  }

  // All lanes call it.
  __device__ __forceinline__ void join_block(int block, int pair, bool exists,
                                             const RowStore& to) const {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    RowStats all{-INFINITY, 0.f};
    const int end = exists ? split_.count : 0;
#pragma unroll 1
    for (int first = 0; first < split_.count; first += pairs_of_block_ * kBatch) {
      add_parts(record(block, 0), first + pair, end, sum, all);
    }
    if (pairs_of_block_ > 1) add_lanes(sum, all);
    if (!exists || pair != 0) return;
    int row, vector;
    args_.out_vectors(row, vector, 2 * block + static_cast<int>(threadIdx.x % 2));
    to.template store<Traits::kElement>(row, 4 * vector, sum, all);
  }

  // Adds the sums of all lanes with the same columns.
  static __device__ __forceinline__ void add_lanes(float4& sum, RowStats& all) {
    float max = all.max;
#pragma unroll
    for (int distance = 2; distance < 32; distance *= 2) {
      max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
    }
    const float factor = rescale_factor(all.max, max);
    all.max = max;
    float* const sums[] = {&sum.x, &sum.y, &sum.z, &sum.w, &all.sum};
#pragma unroll
    for (float* x : sums) {
      *x *= factor;
#pragma unroll
      for (int distance = 2; distance < 32; distance *= 2) {
        *x += __shfl_xor_sync(~0u, *x, distance);
      }
    }
  }

  // Adds parts part, part + pairs_of_block_, ..., kBatch at most, as far as they are before `end`,
  // once all are written, and makes their words kUnwritten. All lanes call it.
  __device__ __forceinline__ void add_parts(int records, int part, int end, float4& sum,
                                            RowStats& all) const {
    float4* values = values_at(records + part) + threadIdx.x % 2;
    float2* stats = stats_at(records + part);
    float4 new_sum;
    RowStats new_all;
    while (true) {
      float4 value[kBatch];
      float2 its_stats[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        value[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        its_stats[k] = make_float2(-INFINITY, 0.f);
        if (part + k * pairs_of_block_ < end) {
          value[k] = load_marked(values + 2 * k * pairs_of_block_);
          its_stats[k] = load_marked(stats + k * pairs_of_block_);
        }
      }
      new_sum = sum, new_all = all;
      add_results(value, its_stats, new_sum, new_all);
      // An unwritten word is a NaN, and makes a sum NaN. So may the attention's own numbers.
      const float x = new_sum.x + new_sum.y + (new_sum.z + new_sum.w) + new_all.sum;
      bool missing = false;
      if (x != x) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          missing = missing || is_unwritten(value[k]) || is_unwritten(its_stats[k]);
        }
      }
      // All lanes go on together: two of them read the same statistics.
      if (!__any_sync(~0u, missing)) break;
      poll_again();
    }
    sum = new_sum, all = new_all;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (part + k * pairs_of_block_ < end) {
        clear_marked(values + 2 * k * pairs_of_block_);
        if (threadIdx.x % 2 == 0) clear_marked(stats + k * pairs_of_block_);
      }
    }
  }

  const Arguments& args_;
  const Split split_;
  uint32_t* const counter_;
  const int pairs_of_block_;  // a power of 2
  const int first_part_, first_record_;
  uint32_t before_ = 0, missing_ = 0;
};

}  // namespace flashattn3::decode
