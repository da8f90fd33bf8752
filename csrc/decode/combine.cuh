// Combines the results for one work tile: first of the two warpgroups of a CTA, then of the CTAs
// that share the work tile. The last CTA to arrive combines, so no second kernel runs, and always
// in the order of the keys, so that two launches give the same bits.
//
// More than kMostInOneGroup parts are combined in two levels: the last CTA of each group of kGroup
// combines its group, the last of those all groups, kGroup at a time. One CTA alone would read 128
// parts ten times slower.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/epilogue.cuh"
#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
#include "decode/spans.cuh"
#include "decode/traits.cuh"
#include "decode/workspace.h"
#include "ptx/arrival_counter.cuh"
#include "tile/fragment.h"

namespace flashattn3::decode {

// One warpgroup's O in shared memory, as the other's registers hold theirs.
template <class Traits>
class Exchange {
  static constexpr int kVectors = Traits::kOutRegisters / 4;

 public:
  // shared: of the CTA. Both warpgroups read and write the elements of their own thread index.
  __device__ __forceinline__ explicit Exchange(uint8_t* shared)
      : vectors_(reinterpret_cast<float4*>(shared + Traits::kExchangeOffset) + threadIdx.x % 128) {}

  __device__ __forceinline__ void write(const float (&o)[Traits::kOutRegisters],
                                        const RowStats (&row)[2]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors_[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    vectors_[kVectors * 128] = make_float4(row[0].max, row[0].sum, row[1].max, row[1].sum);
  }

  // Adds what was written to o and its statistics.
  __device__ __forceinline__ void add_to(float (&o)[Traits::kOutRegisters], RowStats (&row)[2]) {
    const float4 stats = vectors_[kVectors * 128];
    const RowStats other[2] = {{stats.x, stats.y}, {stats.z, stats.w}};
    float mine[2], theirs[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float max = fmaxf(row[r].max, other[r].max);
      mine[r] = rescale_factor(row[r].max, max);
      theirs[r] = rescale_factor(other[r].max, max);
      row[r] = {max, row[r].sum * mine[r] + other[r].sum * theirs[r]};
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = vectors_[i * 128];
      o[4 * i] = o[4 * i] * mine[0] + x.x * theirs[0];
      o[4 * i + 1] = o[4 * i + 1] * mine[0] + x.y * theirs[0];
      o[4 * i + 2] = o[4 * i + 2] * mine[1] + x.z * theirs[1];
      o[4 * i + 3] = o[4 * i + 3] * mine[1] + x.w * theirs[1];
    }
  }

 private:
  float4* vectors_;
};

// Combines the parts of the work tiles that this CTA shares with others. There are at most two: the
// first and the last of its share. They arrive together, after the last KV block, so that no part
// waits for the memory fence of an arrival. All consumer threads take part.
template <class Traits, class Storage>
class Combine {
  static constexpr int kCombineThreads = 128 * Traits::kConsumers;

 public:
  __device__ __forceinline__ Combine(const Arguments& args, Storage& storage)
      : args_(args), storage_(storage) {}

  // Stores the results of pending part `index`, from the accumulators of warpgroup 0.
  __device__ __forceinline__ void store_part(int index, const Part& part,
                                             const CachedSequence& sequence,
                                             const float (&o)[Traits::kOutRegisters],
                                             const RowStats (&stats)[2]) const {
    const int thread = threadIdx.x % 128, column = thread_column(thread);
    if (thread == 0) storage_.pending[index] = {part, sequence};
    const int num_rows = PackedTile::of(args_, sequence, part).num_rows();
    const int partial = partial_of(storage_.share.cta, part.first_cta);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = thread_row(thread) + kRowStride * r;
      if (row >= num_rows) continue;
      const int at = row_at(partial, row);
      if (column == 0) args_.partial_stats[at] = as_float2(stats[r]);
      float* out = out_at(at);
#pragma unroll
      for (int i = 2 * r; i < Traits::kOutRegisters; i += 4) {
        const int at = column + register_column(i);
        if (at < args_.head_dim_v) {
          *reinterpret_cast<float2*>(out + at) = make_float2(o[i], o[i + 1]);
        }
      }
    }
  }

  // Combines the work tiles of pending parts 0 to count - 1 of which no part is missing.
  __device__ __forceinline__ void run(int count) const {
    if (count == 0) return;
    named_barrier_sync(1, kCombineThreads);  // Sync: all threads have stored the parts.
    const int warp = threadIdx.x / 32;
    if (warp < count && threadIdx.x % 32 == 0) {
      const Part& part = storage_.pending[warp].part;
      const ArrivalGroup group = Traits::kConfig.spans ? ArrivalGroup{part.first_cta, part.num_ctas}
                                                       : ArrivalGroup::of(storage_.share.cta, part);
      storage_.is_last[warp] =
          arrive_last(group.counter(*args_.counters, part), storage_.launch, group.num_ctas);
    }
    named_barrier_sync(1, kCombineThreads);  // Sync: is_last is written.
    for (int i = 0; i < count; ++i) {
      if constexpr (Traits::kConfig.spans) {
        if (storage_.is_last[i]) join_spans(storage_.pending[i]);
      } else {
        if (storage_.is_last[i]) combine_tile(storage_.pending[i], storage_.is_last[i]);
      }
    }
  }

 private:
  static __device__ __forceinline__ float2 as_float2(RowStats stats) {
    return make_float2(stats.max, stats.sum);
  }
  __device__ __forceinline__ float2* group_stats() const {
    return args_.partial_stats + num_partials(gridDim.x) * args_.partial_rows;
  }
  // Index of a row of a partial result among those of all.
  __device__ __forceinline__ int row_at(int partial, int row) const {
    return partial * args_.partial_rows + row;
  }
  // O of such a row.
  __device__ __forceinline__ float* out_at(int row) const {
    return args_.partial_out + int64_t{row} * args_.head_dim_v;
  }

  // Joins the spans of a work tile, all of which are stored, in the order of their keys. kGroup
  // values are loaded before the first is used.
  __device__ __forceinline__ void join_spans(const PendingPart& pending) const {
    const Part& part = pending.part;
    const PackedTile tile = PackedTile::of(args_, pending.sequence, part);
    const RowStore store(args_, tile, pending.sequence, part);
    const BlockRange blocks =
        visible_blocks<Traits::kBlockN>(args_, pending.sequence, tile, pending.sequence.n_blocks);
    const int vectors = args_.out_vectors;
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.num_rows() * vectors; i += kCombineThreads) {
      int row, column;
      args_.out_vectors(row, column, i);
      SpanWalk walk(args_, storage_.share, pending.sequence, part, blocks);
      const auto load = [&](float4& value, float2& stats) {
        const SpanSlots slots(args_, walk.cta());
        const int64_t at = slots.row_at(walk.slot(), row);
        // L2 only: other SMs have written these lines during the kernel.
        value = __ldcg(reinterpret_cast<const float4*>(slots.out_at(at)) + column);
        stats = __ldcg(slots.stats_at(at));
      };
      float4 sum;
      float2 first;
      load(sum, first);
      RowStats all{first.x, first.y};
#pragma unroll 1
      for (int left = walk.num_more(); left > 0; left -= kGroup) {
        float4 value[kGroup];
        float2 stats[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          // Without a branch below, factors are computed before the sums that wait for each other.
          value[k] = make_float4(0.f, 0.f, 0.f, 0.f), stats[k] = make_float2(-INFINITY, 0.f);
          if (k < left) walk.advance(), load(value[k], stats[k]);
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          const SpanJoin join = SpanJoin::of(all, {stats[k].x, stats[k].y});
          sum = make_float4(join(sum.x, value[k].x), join(sum.y, value[k].y),
                            join(sum.z, value[k].z), join(sum.w, value[k].w));
        }
      }
      store.template store<Traits::kElement>(row, column * 4, sum, all);
    }
  }

  // Combines this CTA's group of parts, which is complete, then the groups if they are.
  __device__ __forceinline__ void combine_tile(const PendingPart& pending, int& is_last) const {
    const Part& part = pending.part;
    const PackedTile tile = PackedTile::of(args_, pending.sequence, part);
    const RowStore store(args_, tile, pending.sequence, part);
    const ArrivalGroup group = ArrivalGroup::of(storage_.share.cta, part);
    const int groups = ArrivalGroup::count(part.num_ctas);
    Parts parts{args_.partial_stats, group.leader, 1, group.num_ctas, part.first_cta};
    bool is_whole = groups == 1;
    while (true) {
      combine(parts, tile, store, is_whole);
      if (is_whole) return;
      named_barrier_sync(1, kCombineThreads);  // Sync: the group is stored, and is_last was read.
      if (threadIdx.x == 0) {
        is_last = arrive_last(ArrivalGroup::counter_of_groups(*args_.counters, part),
                              storage_.launch, groups);
      }
      named_barrier_sync(1, kCombineThreads);  // Sync: is_last is written.
      if (!is_last) return;
      parts = {group_stats(), part.first_cta, kGroup, groups, part.first_cta};
      is_whole = true;
    }
  }

  // The parts of `count` CTAs: first, first + step, ...
  struct Parts {
    const float2* stats;
    int first, step, count, first_cta;
    __device__ __forceinline__ int partial(int i) const {
      return partial_of(first + i * step, first_cta);
    }
    // Between parts in which the work tile does not begin.
    __device__ __forceinline__ int distance() const { return 2 * step; }
  };

  // Adds an element of the parts first to first + kGroup - 1, as far as there are any. All values
  // are loaded before the first is used.
  __device__ __forceinline__ void add_parts(const Parts& parts, int first, int row, int column,
                                            float4& sum, RowStats& all) const {
    float4 value[kGroup];
    float2 stats[kGroup];
    // Addresses by addition: each product for an address would be computed 2 * kGroup times.
    const int at = row_at(parts.partial(first), row);
    const float* value_at = out_at(at) + column;
    const float2* stats_at = parts.stats + at;
    int rows = row_at(parts.partial(first + 1) - parts.partial(first), 0);  // to the next part
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      value[k] = make_float4(0.f, 0.f, 0.f, 0.f);
      stats[k] = make_float2(-INFINITY, 0.f);
      if (first + k < parts.count) {
        // L2 only: other SMs have written these lines during the kernel.
        value[k] = __ldcg(reinterpret_cast<const float4*>(value_at));
        stats[k] = __ldcg(stats_at);
      }
      value_at += int64_t{rows} * args_.head_dim_v;
      stats_at += rows;
      // The work tile begins in the first part alone, so the others are equally far apart.
      if (k == 0) rows = row_at(parts.distance(), 0);
    }
    add_results(value, stats, sum, all);
  }

  // Sums all elements over the parts. They become rows of out if they are the whole work tile, else
  // the result of the group, in place of its first part.
  __device__ __forceinline__ void combine(const Parts& parts, const PackedTile& tile,
                                          const RowStore& store, bool is_whole) const {
    static_assert(kGroup == 16);
    const int vectors = args_.out_vectors;
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.num_rows() * vectors; i += kCombineThreads) {
      int row, column;
      args_.out_vectors(row, column, i);
      column *= 4;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      RowStats all{-INFINITY, 0.f};
#pragma unroll 1
      for (int first = 0; first < parts.count; first += kGroup) {
        add_parts(parts, first, row, column, sum, all);
      }
      if (!is_whole) {
        // In place: no other thread reads these columns of the first part. Its statistics are read
        // by other threads, so those of the group are elsewhere.
        const int at = row_at(parts.partial(0), row);
        *reinterpret_cast<float4*>(out_at(at) + column) = sum;
        if (column == 0) group_stats()[at] = as_float2(all);
      } else {
        store.template store<Traits::kElement>(row, column, sum, all);
      }
    }
  }

  const Arguments& args_;
  Storage& storage_;
};

}  // namespace flashattn3::decode
