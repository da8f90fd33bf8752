// Combines the results for one work tile: first of the two warpgroups of a CTA, then of the CTAs
// that share the work tile. The last CTA to arrive combines, so no second kernel runs, and always
// in the order of the keys, so that two launches give the same bits.
//
// More than kGroup parts are combined in two levels: the last CTA of each group of kGroup combines
// its group, the last of those all groups. One CTA alone would read 128 parts ten times slower.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/epilogue.cuh"
#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
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

// Combines the parts of one work tile across CTAs. The 128 threads of warpgroup 0 use it.
template <class Traits>
class Combine {
 public:
  // is_last: an int in shared memory for this class alone.
  __device__ __forceinline__ Combine(const Arguments& args, const PackedTile& tile,
                                     const RowStore& store, int& is_last)
      : args_(args), tile_(tile), store_(store), is_last_(is_last) {}

  // Stores this CTA's part and combines what is complete with it.
  __device__ __forceinline__ void add(const Part& part, const float (&o)[Traits::kOutRegisters],
                                      const RowStats (&stats)[2]) {
    const int cta = blockIdx.x, first_cta = part.first_cta;
    store_part(partial_of(cta, first_cta), o, stats);
    const ArrivalGroup group = ArrivalGroup::of(cta, part);
    const int leader_part = partial_of(group.leader, first_cta);
    if (!arrive(args_.partial_counters + leader_part, group.num_ctas)) return;
    const bool one_group = part.num_ctas <= kGroup;
    combine(args_.partial_stats, group.leader, 1, group.num_ctas, first_cta,
            [&](const Element& element) {
              if (one_group) {
                store_element(element);
                return;
              }
              // In place: no other thread reads these columns of the leader's part. Its statistics
              // are read by other threads, so those of the group are elsewhere.
              *part_of_row(leader_part, element.row, element.column) = element.sum;
              if (element.column == 0)
                group_stats()[leader_part * kBlockM + element.row] = as_float2(element.stats);
            });
    if (one_group) return;
    const int groups = (part.num_ctas + kGroup - 1) / kGroup;
    if (!arrive(args_.partial_counters + num_partials(gridDim.x) + first_cta, groups)) return;
    combine(group_stats(), first_cta, kGroup, groups, first_cta,
            [&](const Element& element) { store_element(element); });
  }

 private:
  // Four columns of a row: sums relative to the row's statistics.
  struct Element {
    int row, column;
    float4 sum;
    RowStats stats;
  };

  static __device__ __forceinline__ float2 as_float2(RowStats stats) {
    return make_float2(stats.max, stats.sum);
  }
  __device__ __forceinline__ float2* group_stats() const {
    return args_.partial_stats + num_partials(gridDim.x) * kBlockM;
  }
  __device__ __forceinline__ float4* part_of_row(int partial, int row, int column) const {
    return reinterpret_cast<float4*>(args_.partial_out +
                                     int64_t{partial * kBlockM + row} * args_.head_dim_v + column);
  }

  __device__ __forceinline__ void store_part(int partial, const float (&o)[Traits::kOutRegisters],
                                             const RowStats (&stats)[2]) const {
    const int thread = threadIdx.x % 128, column = thread_column(thread);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = thread_row(thread) + kRowStride * r;
      if (row >= tile_.num_rows()) continue;
      if (column == 0) args_.partial_stats[partial * kBlockM + row] = as_float2(stats[r]);
      float* out = reinterpret_cast<float*>(part_of_row(partial, row, 0));
#pragma unroll
      for (int i = 2 * r; i < Traits::kOutRegisters; i += 4) {
        const int at = column + register_column(i);
        if (at < args_.head_dim_v) {
          *reinterpret_cast<float2*>(out + at) = make_float2(o[i], o[i + 1]);
        }
      }
    }
  }

  // Arrives for the warpgroup and returns whether it is the last of `count`.
  __device__ __forceinline__ bool arrive(uint32_t* counter, int count) {
    named_barrier_sync(1, 128);  // Sync: all threads have stored, and have read is_last.
    if (threadIdx.x % 128 == 0) is_last_ = arrive_last(counter, count);
    named_barrier_sync(1, 128);  // Sync: is_last is written.
    return is_last_ != 0;
  }

  // Calls take(element) for every element of the work tile, summed over the parts of `count` CTAs,
  // at most kGroup: first, first + step, ... All values are loaded before the first is used.
  template <class Take>
  __device__ __forceinline__ void combine(const float2* all_stats, int first, int step, int count,
                                          int first_cta, Take take) const {
    static_assert(kGroup == 16);
    const int vectors = args_.head_dim_v / 4;
    for (int i = threadIdx.x % 128; i < tile_.num_rows() * vectors; i += 128) {
      const int row = i / vectors, column = i % vectors * 4;
      float4 value[kGroup];
      float2 stats[kGroup];
#pragma unroll
      for (int part = 0; part < kGroup; ++part) {
        value[part] = make_float4(0.f, 0.f, 0.f, 0.f);
        stats[part] = make_float2(-INFINITY, 0.f);
        if (part < count) {
          const int partial = partial_of(first + part * step, first_cta);
          // L2 only: other SMs have written these lines during the kernel.
          value[part] = __ldcg(part_of_row(partial, row, column));
          stats[part] = __ldcg(all_stats + partial * kBlockM + row);
        }
      }
      Element element{row, column, make_float4(0.f, 0.f, 0.f, 0.f), {-INFINITY, 0.f}};
#pragma unroll
      for (int part = 0; part < kGroup; ++part) {
        element.stats.max = fmaxf(element.stats.max, stats[part].x);
      }
#pragma unroll
      for (int part = 0; part < kGroup; ++part) {
        const float factor = rescale_factor(stats[part].x, element.stats.max);
        element.stats.sum += stats[part].y * factor;
        element.sum.x += value[part].x * factor;
        element.sum.y += value[part].y * factor;
        element.sum.z += value[part].z * factor;
        element.sum.w += value[part].w * factor;
      }
      take(element);
    }
  }

  __device__ __forceinline__ void store_element(const Element& element) const {
    if (!tile_.has(element.row)) return;
    const float factor = store_.finish(element.row, element.stats, element.column == 0);
    const uint2 packed =
        make_uint2(pack<Traits::kElement>(element.sum.x * factor, element.sum.y * factor),
                   pack<Traits::kElement>(element.sum.z * factor, element.sum.w * factor));
    *reinterpret_cast<uint2*>(store_.row_of_out(element.row) + element.column) = packed;
  }

  const Arguments& args_;
  const PackedTile& tile_;
  const RowStore& store_;
  int& is_last_;
};

}  // namespace flashattn3::decode
