// Joins the parts of a work tile that CTAs of a warp kernel share. Each CTA joins a share of the
// tile's blocks (part_memory.h): it stores its own part and polls those of the others, whose words
// say that they were written. Every block is summed in a fixed order, so that two launches give the
// same bits.
//
// Synchronization of writers and readers. One warp of each CTA makes the CTA's own words of the
// memory kUnwritten, whatever they were, and then arrives at the counter of its KV head (release).
// The counter returns to 0 with the last CTA of the head, which the host knows, so no length
// changes that. A CTA reads words of others only once it has seen all of them arrive (acquire):
// what it finds was written by this launch.
//
// No CTA waits for one that has not started, because that one might need its SM: a CTA that does
// not see all of its head arrive when its own part is ready declines. The last one to arrive always
// sees it, and joins the blocks of those that declined.
//
// Lengths may change while the CTAs read them. CTAs then disagree on who shares a work tile, and
// one may wait for a part that no CTA writes: it finds that their Splits are not those that it
// expects, and gives up. All that remains of the launch are wrong numbers in out.
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

  __device__ __forceinline__ uint32_t word() const {
    static_assert(kWarpKernelBatch < 256 && PartMemory::kMostCtas < 256);
    return static_cast<uint32_t>(batch_idx + 1) << 16 | index << 8 | count;
  }
  static __device__ __forceinline__ Split of(uint32_t word) {
    return {static_cast<int>(word >> 16) - 1, static_cast<int>(word >> 8 & 255),
            static_cast<int>(word & 255)};
  }
};

// is_last: no CTA of the head started after this one. knows_all: all have started.
struct StartOrder {
  bool is_last, knows_all;
};

enum class Turn { kDone, kDeclines, kJoins, kJoinsLast };

template <class Traits>
class WarpJoin {
  static constexpr int kPairs = 16;  // of lanes, each of which loads a block of a part at a time
  static constexpr int kBatch = 4;   // parts that a lane loads at a time
  static constexpr int kLooks = 8;   // at the counter before the part is ready; 0.4 us each
  static constexpr int kPolls = 64;  // of a part until its CTAs are compared

 public:
  // cta: among those of the KV head.
  __device__ __forceinline__ WarpJoin(const Arguments& args, const Split& split, int kv_head,
                                      int cta)
      : args_(args),
        split_(split),
        kv_head_(kv_head),
        cta_(cta),
        pairs_of_block_(split.count > kBatch ? kPairs : 1),
        first_record_((first_cta() + cta - split.index) * blocks_of_tile()) {}

  // Called by one warp: initialises this CTA's words and arrives. The result is of lane 0.
  __device__ __forceinline__ StartOrder start() const {
    const int lane = threadIdx.x % 32;
    if (is_split()) {
      for (int i = lane; i < 2 * blocks_of_tile(); i += 32) {
        clear_marked(values_at(record(i / 2, split_.index)) + i % 2);
      }
      for (int i = lane; i < blocks_of_tile(); i += 32) {
        clear_marked(stats_at(record(i, split_.index)));
      }
    }
    StartOrder order{};
    if (lane == 0) {
      store_relaxed(args_.part_memory->splits + first_cta() + cta_, split_.word());
      store_relaxed(joins() + cta_, is_split() ? kUnwritten : 1);
    }
    __syncwarp();
    if (lane == 0) {
      order.is_last = order.knows_all = arrive_last(counter(), args_.num_shares);
      for (int i = 0; i < kLooks && !order.knows_all; ++i) order.knows_all = all_arrived(counter());
    }
    return order;
  }
  // Called by the same warp once the part is ready. The result is of lane 0.
  __device__ __forceinline__ Turn turn(const StartOrder& order) const {
    if (threadIdx.x % 32 != 0 || (!order.is_last && !is_split())) return Turn::kDone;
    if (order.is_last) return Turn::kJoinsLast;
    const bool knows_all = order.knows_all || all_arrived(counter());
    store_relaxed(joins() + cta_, knows_all);
    return knows_all ? Turn::kJoins : Turn::kDeclines;
  }
  // Called by the same warp of the CTA that started last: waits until each other CTA of the head
  // has said whether it joins its blocks.
  __device__ __forceinline__ bool some_declined() const {
    bool found = false;
    for (int other = threadIdx.x % 32; other < args_.num_shares; other += 32) {
      if (other == cta_) continue;
      uint32_t word;
      while ((word = load_relaxed(joins() + other)) == kUnwritten) poll_again();
      found = found || word == 0;
    }
    return __any_sync(~0u, found);
  }

  __device__ __forceinline__ bool is_split() const { return split_.count > 1; }

  // Stores vector i of the part's rows.
  __device__ __forceinline__ void store_part(int i, const float4& sum, const RowStats& all) const {
    const int at = record(i / 2, split_.index);
    store_marked(values_at(at) + i % 2, sum);
    if (i % 2 == 0) store_marked(stats_at(at), make_float2(all.max, all.sum));
  }

  // Joins the blocks of the CTA: index, index + count, ... A warp joins one at a time, or as many
  // as it has pairs of lanes where a lane can load all parts at a time. All loading warps call it,
  // once their part is stored and all CTAs have started.
  __device__ __forceinline__ void join_blocks(const PackedTile& tile, const RowStore& to) const {
    const int num_blocks = tile.num_rows() * args_.out_vectors / 2;
    const int blocks_of_warp = kPairs / pairs_of_block_;
    const int first = threadIdx.x / 32 * blocks_of_warp;
#pragma unroll 1
    for (int i = first; split_.index + i * split_.count < num_blocks;
         i += Traits::kWarps * blocks_of_warp) {
      const int pair = threadIdx.x % 32 / 2;
      const int block = split_.index + (i + pair / pairs_of_block_) * split_.count;
      join_block(block, pair % pairs_of_block_, block < num_blocks, to);
    }
  }

  // Joins the blocks of the CTAs that declined. sequence: any of the batch, whose queries are
  // alike.
  __device__ __forceinline__ void join_declined(const CachedSequence& sequence) const {
#pragma unroll 1
    for (int other = 0; other < args_.num_shares; ++other) {
      if (other == cta_ || load_relaxed(joins() + other) != 0) continue;
      const Split split = Split::of(load_relaxed(args_.part_memory->splits + first_cta() + other));
      Part part{};
      part.batch_idx = split.batch_idx, part.kv_head = kv_head_;
      const PackedTile its_tile = PackedTile::of(args_, sequence, part);
      const RowStore store(args_, its_tile, sequence, part);
      WarpJoin(args_, split, kv_head_, other).join_blocks(its_tile, store);
    }
  }

 private:
  __device__ __forceinline__ int first_cta() const { return kv_head_ * args_.num_shares; }
  __device__ __forceinline__ uint32_t* counter() const {
    return args_.counters->started + kv_head_;
  }
  __device__ __forceinline__ uint32_t* joins() const {
    return args_.part_memory->joins + first_cta();
  }
  __device__ __forceinline__ int blocks_of_tile() const {
    return args_.partial_rows * args_.out_vectors / 2;
  }

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

  // Returns whether the CTAs of the work tile have the Splits with which they write the parts that
  // this one reads. All lanes call it.
  __device__ __forceinline__ bool all_agree() const {
    const uint32_t* splits = args_.part_memory->splits + first_cta() + cta_ - split_.index;
    bool agree = true;
    for (int i = threadIdx.x % 32; i < split_.count; i += 32) {
      agree = agree && load_relaxed(splits + i) == Split{split_.batch_idx, i, split_.count}.word();
    }
    return __all_sync(~0u, agree);
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
  // once all are written. All lanes call it.
  __device__ __forceinline__ void add_parts(int records, int part, int end, float4& sum,
                                            RowStats& all) const {
    const float4* values = values_at(records + part) + threadIdx.x % 2;
    const float2* stats = stats_at(records + part);
    float4 new_sum;
    RowStats new_all;
#pragma unroll 1
    for (int polls = 1;; ++polls) {
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
      if (polls % kPolls == 0 && !all_agree()) break;
      poll_again();
    }
    sum = new_sum, all = new_all;
  }

  const Arguments& args_;
  const Split split_;
  const int kv_head_, cta_;
  const int pairs_of_block_;  // a power of 2
  const int first_record_;
};

}  // namespace flashattn3::decode
