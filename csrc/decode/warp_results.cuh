// The results of a CTA's warps for one work tile, O and the row statistics, which they exchange in
// shared memory.
#pragma once

#include <type_traits>

#include "attention/row_stats.cuh"
#include "decode/arguments.h"
#include "decode/byte_mainloop.cuh"
#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
#include "decode/warp_mainloop.cuh"
#include "decode/warp_traits.cuh"

namespace flashattn3::decode {

template <class Traits>
using MainloopOf =
    std::conditional_t<Traits::kHasBytes, ByteMainloop<Traits>, WarpMainloop<Traits>>;

template <class Traits>
struct WarpResults {
  using Mainloop = MainloopOf<Traits>;
  static constexpr int kRowTiles = Traits::kRowTiles;

  RowStats stats[Traits::kWarps][Traits::kRows];
  float4 out[Traits::kWarps][Traits::kRows][Traits::kHeadDim / 4];

  // Stores those of the calling warp as number `warp`.
  __device__ __forceinline__ void store(const typename Mainloop::Out& o,
                                        const RowStats (&row)[kRowTiles], int warp) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (t == 0) stats[warp][g + 8 * r] = row[r];
#pragma unroll
      for (int j = 0; j < Traits::kVecs / 8; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const auto &a = o[r][j][2 * half], &b = o[r][j][2 * half + 1];
            const int to = 8 * r + 2 * t + odd, vector = 2 * Mainloop::value_vec(g, j) + half;
            out[warp][to][place(to, vector)] = make_float4(a[odd], a[2 + odd], b[odd], b[2 + odd]);
          }
        }
      }
    }
  }

  // Calls use(i, row, vector, sum, stats) with the sum of the warps' results, for each vector i of
  // O. All of their threads call it, once all have stored. kBatch: warps whose results a thread
  // loads at a time.
  template <int kBatch = Traits::kWarps, class Use>
  __device__ __forceinline__ void add(const Arguments& args, const PackedTile& tile,
                                      Use&& use) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.num_rows() * args.out_vectors; i += 32 * Traits::kWarps) {
      int row, vector;
      args.out_vectors(row, vector, i);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      RowStats all{-INFINITY, 0.f};
#pragma unroll
      for (int first = 0; first < Traits::kWarps; first += kBatch) {
        float4 value[kBatch];
        float2 of_warp[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int w = first + k;
          value[k] = out[w][row][place(row, vector)];
          of_warp[k] = make_float2(stats[w][row].max, stats[w][row].sum);
        }
        add_results(value, of_warp, sum, all);
      }
      use(i, row, vector, sum, all);
    }
  }

 private:
  // Place of a vector of a row in `out`: eight lanes write two vectors of rows 2 (lane % 4), 2 or 4
  // apart, and 32 read neighbouring vectors of a row, each without a bank conflict.
  static __device__ __forceinline__ int place(int row, int vector) {
    // A bit that the two have in common.
    constexpr int kOther = Mainloop::value_vec(1, 0) == 2 ? 1 : 2;
    return vector ^ (row >> 1 & 1) ^ (row >> 2 & 1) << kOther;
  }
};

}  // namespace flashattn3::decode
