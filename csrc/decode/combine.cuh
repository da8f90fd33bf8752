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
#include "decode/row_results.cuh"
#include "decode/softmax.cuh"
#include "decode/spans.cuh"
#include "decode/traits.cuh"
#include "decode/workspace.h"
#include "ptx/arrival_counter.cuh"
#include "ptx/marked_memory.cuh"
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

  // Stores four elements of a row of this CTA's part of a work tile, and its statistics with the
  // first of them.
  __device__ __forceinline__ void store_part(const Part& part, int row, int column, float4 sum,
                                             RowStats stats) const {
    const int at = row_at(partial_of(storage_.share.cta, part.first_cta), row);
    if (column == 0) args_.partial_stats[at] = as_float2(stats);
    *reinterpret_cast<float4*>(out_at(at) + column) = sum;
  }

  // Combines the work tiles of pending parts 0 to count - 1 of which no part is missing.
  __device__ __forceinline__ void run(int count) const {
    if (count == 0) return;
    named_barrier_sync(1, kCombineThreads);  // Sync: all threads have stored the parts.
    const int warp = threadIdx.x / 32;
    if (warp < count && threadIdx.x % 32 == 0) {
      const Part& part = storage_.pending[warp].part;
      const ArrivalGroup group = ArrivalGroup::of(storage_.share.cta, part);
      storage_.is_last[warp] =
          arrive_last(group.counter(*args_.counters, part), storage_.launch, group.num_ctas);
    }
    named_barrier_sync(1, kCombineThreads);  // Sync: is_last is written.
    for (int i = 0; i < count; ++i) {
      if (storage_.is_last[i]) combine_tile(storage_.pending[i], storage_.is_last[i]);
    }
  }

  // Joins the spans of the work tiles of pending parts 0 to count - 1. All CTAs of a launch whose
  // work tiles may be shared call it.
  __device__ __forceinline__ void run_spans(int count) const {
    if (args_.counters == nullptr) return;
    // Loaded before the barrier, which hides the latency.
    const bool all_run =
        threadIdx.x == 0 && has_counted(&args_.counters->launch, storage_.launch, kLaunchStep);
    named_barrier_sync(1, kCombineThreads);  // Sync: all threads have stored the spans.
    if (threadIdx.x < 32) arrive_for_spans(count, __shfl_sync(~0u, int{all_run}, 0) != 0);
    named_barrier_sync(1, kCombineThreads);  // Sync: all have arrived, or the CTA leaves.
    for (int i = 0; i < count; ++i) {
      if (storage_.is_last[i] != kLeaves) join_spans(storage_.pending[i], storage_.is_last[i]);
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

  // This CTA's part in a work tile of several CTAs, after it has stored its spans.
  enum SpanTurn { kLeaves, kJoins, kJoinsLast };

  // Arrives for the pending parts and sets is_last to a SpanTurn for each. The CTAs of a work tile
  // join a share of its rows each, once all have arrived. None waits for a CTA that has not
  // started, which might need its SM: a CTA that does not see that all have started leaves, and the
  // last to arrive joins its share. If lengths change during the launch, the number of arrivals may
  // be wrong: then waiting ends once no CTA can arrive. One warp calls it. stays: whether all have
  // started.
  __device__ __forceinline__ void arrive_for_spans(int count, bool stays) const {
    const int lane = threadIdx.x % 32;
    const uint64_t launch = storage_.launch;
    Counters& counters = *args_.counters;
    if (lane == 0 && !stays) counters.left[storage_.share.cta] = launch + 1;
    __syncwarp();  // lane 1 arrives behind the store
    if (lane < count) {
      const Part& part = storage_.pending[lane].part;
      uint64_t* const arrivals = &counters.tiles[part.first_cta];
      const bool last = arrive_last(arrivals, launch, part.num_ctas);
      storage_.is_last[lane] = last ? kJoinsLast : stays ? kJoins : kLeaves;
    }
    __syncwarp();
    if (lane == 0) arrive_unordered(&counters.finished, launch);
    if (lane < count && storage_.is_last[lane] == kJoins) {
      const Part& part = storage_.pending[lane].part;
      while (!have_arrived(&counters.tiles[part.first_cta], launch, part.num_ctas) &&
             !has_counted(&counters.finished, launch, gridDim.x)) {
        poll_again();
      }
    }
  }

  // Joins this CTA's share of a work tile's rows, and of the last CTA those of CTAs that left.
  __device__ __forceinline__ void join_spans(const PendingPart& pending, int turn) const {
    const Part& part = pending.part;
    const PackedTile tile = PackedTile::of(args_, pending.sequence, part);
    const RowStore store(args_, tile, pending.sequence, part);
    const BlockRange blocks =
        visible_blocks<Traits::kBlockN>(args_, pending.sequence, tile, pending.sequence.n_blocks);
    const TileSlots slots(args_, storage_.share, part, pending.sequence, blocks);
    join_share(slots, tile, store, storage_.share.cta - part.first_cta, part.num_ctas);
    if (turn != kJoinsLast) return;
    for (int first = 0; first < part.num_ctas; first += 32) {
      const int other = min(first + static_cast<int>(threadIdx.x % 32), part.num_ctas - 1);
      const int cta = part.first_cta + other;
      const bool is_left = first + threadIdx.x % 32 == other && cta != storage_.share.cta &&
                           __ldcg(&args_.counters->left[cta]) == storage_.launch + 1;
      for (uint32_t left = __ballot_sync(~0u, is_left); left != 0; left &= left - 1) {
        join_share(slots, tile, store, first + __ffs(left) - 1, part.num_ctas);
      }
    }
  }

  // Joins the share number `rank` of `count`. A warp joins 32 columns of a row at a time.
  __device__ __forceinline__ void join_share(const TileSlots& slots, const PackedTile& tile,
                                             const RowStore& store, int rank, int count) const {
    constexpr int kWarps = 4 * Traits::kConsumers;
    const int groups = (args_.head_dim_v + 31) / 32;
    const int warp = uniform(threadIdx.x / 32);
    for (int i = rank * kWarps + warp; i < tile.num_rows() * groups; i += count * kWarps) {
      const int row = i / groups;
      join_columns(slots, row, (i - row * groups) * 32, tile, store);
    }
  }

  // Joins the slots of columns of a row, in the order of their keys. A lane has the statistics of a
  // slot, whose factors follow from maxima before any sum, and a column of 32 slots.
  __device__ __forceinline__ void join_columns(const TileSlots& slots, int row, int first_column,
                                               const PackedTile& tile,
                                               const RowStore& store) const {
    const int lane = threadIdx.x % 32, column = first_column + lane;
    const bool has_column = column < args_.head_dim_v;
    float sum = 0.f;
    RowStats all{-INFINITY, 0.f};
#pragma unroll 1
    for (int first = 0; first < slots.count(); first += 32) {
      const auto place = slots[min(first + lane, slots.count() - 1)];
      const SpanSlots of_cta(args_, place.cta);
      const int64_t at = of_cta.row_at(place.slot, row);
      // L2 only: other SMs have written these lines during the kernel.
      float2 stats = __ldcg(of_cta.stats_at(at));
      if (first + lane >= slots.count()) stats = make_float2(-INFINITY, 0.f);
      const float* const mine = of_cta.out_at(at) + first_column;
      float value[32];
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        const auto* from =
            reinterpret_cast<const float*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(mine), k));
        value[k] = 0.f;
        if (first + k < slots.count() && has_column) value[k] = __ldcg(from + lane);
      }
      float max = fmaxf(all.max, stats.x);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float before = __shfl_up_sync(~0u, max, distance);
        if (lane >= distance) max = fmaxf(max, before);
      }
      float before = __shfl_up_sync(~0u, max, 1);
      if (lane == 0) before = all.max;
      const SpanJoin join{rescale_factor(before, max), rescale_factor(stats.x, max)};
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        const SpanJoin of{__shfl_sync(~0u, join.before, k), __shfl_sync(~0u, join.added, k)};
        all.sum = of(all.sum, __shfl_sync(~0u, stats.y, k));
        sum = of(sum, value[k]);
      }
      all.max = __shfl_sync(~0u, max, 31);
    }
    if (has_column) store.template store<Traits::kElement>(row, column, sum, all);
  }

  // Combines this CTA's group of parts, which is complete, then the groups if they are.
  __device__ __forceinline__ void combine_tile(const PendingPart& pending, int& is_last) const {
    const Part& part = pending.part;
    const PackedTile tile = PackedTile::of(args_, pending.sequence, part);
    const StoreOf<Traits> store(args_, tile, pending.sequence, part);
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
                                          const StoreOf<Traits>& store, bool is_whole) const {
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
