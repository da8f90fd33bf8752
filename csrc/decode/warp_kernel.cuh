// The decode kernel for few rows and few sequences: the CTAs of a KV head are divided among the
// sequences, in proportion to their keys, and the warps of a sequence's CTAs take its KV blocks in
// turn (warp_mainloop.cuh). The warps of a single sequence know their first KV block before its
// length, so they load K and V at once.
//
// The warps of a CTA add their results in shared memory, and the last CTA of a work tile to arrive
// those of its CTAs (workspace.h has why in two levels), each in a fixed order.
#pragma once

#include "decode/epilogue.cuh"
#include "decode/warp_mainloop.cuh"
#include "decode/warp_traits.cuh"
#include "decode/workspace.h"
#include "ptx/arrival_counter.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::decode {

// O and the row statistics that the warps of a CTA exchange.
template <class Traits>
struct WarpStorage {
  RowStats stats[Traits::kWarps][Traits::kRows];
  float4 out[Traits::kWarps][Traits::kRows][Traits::kHeadDim / 4];
  int is_last;

  // Place of a vector of a row in `out`: eight lanes write vectors 2 (lane / 4) of rows
  // 2 (lane % 4), and 32 read neighbouring vectors of a row, each without a bank conflict.
  static __device__ __forceinline__ int place(int row, int vector) {
    return vector ^ (row >> 1 & 1) ^ (row >> 2 & 1) << 2;
  }
};

template <class Traits>
class WarpKernel {
  using Storage = WarpStorage<Traits>;
  static constexpr int kRowTiles = Traits::kRowTiles;

 public:
  __device__ __forceinline__ WarpKernel(const Arguments& args, Storage& storage)
      : args_(args), storage_(storage) {}

  __device__ __forceinline__ void run() {
    launch_dependents();
    griddepcontrol_wait();
    int cta;
    Part part{};
    args_.share_heads(cta, part.kv_head, blockIdx.x);
    const Split split = find_split(cta);
    if (split.batch_idx < 0) return;
    part.batch_idx = split.batch_idx;
    const CachedSequence sequence = find_cached_sequence<Traits::kBlockN>(args_, part.batch_idx);
    const PackedTile tile = PackedTile::of(args_, sequence, part);
    const int warp = threadIdx.x / 32;

    typename WarpMainloop<Traits>::Out o;
    RowStats row[kRowTiles];
    WarpMainloop<Traits> mainloop(args_);
    const int n_block = sequence.n_blocks.begin + warp * split.count + split.index;
    if (n_block * Traits::kBlockN < args_.capacity) {
      mainloop.load(mainloop.find_place(sequence, n_block), part.kv_head);
    }
    mainloop.load_q(tile, args_.q + part.batch_idx * args_.q_batch);
    mainloop.attend(o, row, tile, sequence, part.kv_head, scale_of(args_, part), n_block,
                    Traits::kWarps * split.count);
    store_warp(o, row);
    __syncthreads();  // Sync: all warps have stored O and its statistics.

    const RowStore store(args_, tile, sequence, part);
    first_part_ = part.kv_head * args_.num_shares + cta - split.index;
    add_warps(tile, store, split);
    if (split.count == 1) return;
    uint32_t* counters = args_.partial_counters + (part.kv_head * args_.batch + part.batch_idx) *
                                                      counters_of_tile(args_.num_shares);
    Parts parts{args_.partial_stats, 0, 1, split.count};
    if (split.count > kMostInOneGroup) {
      const int group = split.index / kGroup, leader = group * kGroup;
      parts = {args_.partial_stats, leader, 1, min(kGroup, split.count - leader)};
      if (!arrive(counters + 1 + group, parts.count)) return;
      combine(parts, tile, store, false);
      parts = {group_stats(), 0, kGroup, (split.count + kGroup - 1) / kGroup};
    }
    if (!arrive(counters, parts.count)) return;
    combine(parts, tile, store, true);
  }

 private:
  // Parts first, first + step, ... of the work tile.
  struct Parts {
    const float2* stats;
    int first, step, count;
  };

  // The CTA is the index-th of `count` CTAs of a sequence. batch_idx -1: it has none.
  struct Split {
    int batch_idx, index, count;
  };

  // cta: among those of its KV head. Each sequence gets one, and the others by its share of the
  // KV blocks. All threads of a warp call it; lane b computes for sequence b.
  __device__ __forceinline__ Split find_split(int cta) const {
    const int num_ctas = args_.num_shares;
    if (args_.batch == 1) return {0, cta, num_ctas};
    if (args_.batch == num_ctas) return {cta, 0, 1};
    const int lane = threadIdx.x % 32;
    int n_blocks = 0;
    if (lane < args_.batch) {
      const BlockRange of_lane = find_cached_sequence<Traits::kBlockN>(args_, lane).n_blocks;
      n_blocks = of_lane.end - of_lane.begin;
    }
    const int total = __reduce_add_sync(~0u, n_blocks);
    // The factor is a little too large, so that whole numbers stay whole: no sum of quotients that
    // are rounded down exceeds the CTAs by it.
    const float per_block = static_cast<float>(num_ctas - args_.batch) * (1.f + 0x1p-16f) / total;
    const int mine = lane < args_.batch ? 1 + static_cast<int>(n_blocks * per_block) : 0;
    int end = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += before;
    }
    const uint32_t later = __ballot_sync(~0u, cta < end);
    if (later == 0) return {-1, 0, 0};
    const int batch_idx = __ffs(later) - 1;
    const int first = __shfl_sync(~0u, end - mine, batch_idx);
    return {batch_idx, cta - first, __shfl_sync(~0u, mine, batch_idx)};
  }

  // Returns whether this CTA is the last of `count` to arrive. All threads call it.
  __device__ __forceinline__ bool arrive(uint32_t* counter, int count) const {
    __syncthreads();  // Sync: the CTA's results are stored, and is_last was read.
    if (threadIdx.x == 0) storage_.is_last = arrive_last(counter, count);
    __syncthreads();  // Sync: is_last is written.
    return storage_.is_last;
  }

  __device__ __forceinline__ void store_warp(const typename WarpMainloop<Traits>::Out& o,
                                             const RowStats (&row)[kRowTiles]) const {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (t == 0) storage_.stats[warp][g + 8 * r] = row[r];
#pragma unroll
      for (int j = 0; j < Traits::kVecs / 8; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const auto &a = o[r][j][2 * half], &b = o[r][j][2 * half + 1];
            const int to = 8 * r + 2 * t + odd, vector = 2 * (g + 8 * j) + half;
            storage_.out[warp][to][Storage::place(to, vector)] =
                make_float4(a[odd], a[2 + odd], b[odd], b[2 + odd]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ float2* group_stats() const {
    return args_.partial_stats + gridDim.x * args_.partial_rows;
  }
  // Index of a row of a part of the work tile among those of all.
  __device__ __forceinline__ int row_at(int part, int row) const {
    return (first_part_ + part) * args_.partial_rows + row;
  }
  __device__ __forceinline__ float* out_at(int row, int column) const {
    return args_.partial_out + int64_t{row} * args_.head_dim_v + column;
  }

  // Adds the results of the warps: the part of this CTA, or all of the work tile.
  __device__ __forceinline__ void add_warps(const PackedTile& tile, const RowStore& store,
                                            const Split& split) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.num_rows() * args_.out_vectors; i += Traits::kThreads) {
      int row, vector;
      args_.out_vectors(row, vector, i);
      float4 value[Traits::kWarps];
      float2 stats[Traits::kWarps];
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) {
        value[w] = storage_.out[w][row][Storage::place(row, vector)];
        stats[w] = make_float2(storage_.stats[w][row].max, storage_.stats[w][row].sum);
      }
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      RowStats all{-INFINITY, 0.f};
      add_results(value, stats, sum, all);
      if (split.count == 1) {
        store.template store<Traits::kElement>(row, 4 * vector, sum, all);
      } else {
        const int at = row_at(split.index, row);
        *reinterpret_cast<float4*>(out_at(at, 4 * vector)) = sum;
        if (vector == 0) args_.partial_stats[at] = make_float2(all.max, all.sum);
      }
    }
  }

  // Adds an element of parts first to first + kGroup - 1, as far as there are any. All values are
  // loaded before the first is used.
  __device__ __forceinline__ void add_parts(const Parts& parts, int first, int row, int column,
                                            float4& sum, RowStats& all) const {
    float4 value[kGroup];
    float2 stats[kGroup];
    const int at = row_at(parts.first + first * parts.step, row);
    const float* value_at = out_at(at, column);
    const float2* stats_at = parts.stats + at;
    const int rows = parts.step * args_.partial_rows;
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      value[k] = make_float4(0.f, 0.f, 0.f, 0.f);
      stats[k] = make_float2(-INFINITY, 0.f);
      if (first + k < parts.count) {
        // L2 only: other SMs have written these lines during the kernel.
        value[k] = __ldcg(reinterpret_cast<const float4*>(value_at));
        stats[k] = __ldcg(stats_at);
      }
      value_at += rows * args_.head_dim_v;
      stats_at += rows;
    }
    add_results(value, stats, sum, all);
  }

  // Adds the parts: rows of out if they are the whole work tile, else the result of the group, in
  // place of its first part.
  __device__ __forceinline__ void combine(const Parts& parts, const PackedTile& tile,
                                          const RowStore& store, bool is_whole) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.num_rows() * args_.out_vectors; i += Traits::kThreads) {
      int row, vector;
      args_.out_vectors(row, vector, i);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      RowStats all{-INFINITY, 0.f};
#pragma unroll 1
      for (int first = 0; first < parts.count; first += kGroup) {
        add_parts(parts, first, row, 4 * vector, sum, all);
      }
      if (is_whole) {
        store.template store<Traits::kElement>(row, 4 * vector, sum, all);
      } else {
        const int at = row_at(parts.first, row);
        *reinterpret_cast<float4*>(out_at(at, 4 * vector)) = sum;
        if (vector == 0) group_stats()[at] = make_float2(all.max, all.sum);
      }
    }
  }

  const Arguments& args_;
  Storage& storage_;
  int first_part_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    warp_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<WarpStorage<Traits>*>(shared);
  if constexpr (Traits::kPlain) {
    WarpKernel<Traits>(plain<Traits::kHeadDim>(args), storage).run();
  } else {
    WarpKernel<Traits>(args, storage).run();
  }
}

}  // namespace flashattn3::decode
