// Adds a tile of the bias to the scores. The tile is in shared memory in the 128-byte swizzle, 64
// columns to an atom, 16 bits each.
#pragma once

#include <cstdint>

#include "ptx/approximations.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/store_shared.cuh"

namespace flashattn3 {

// Scores become score * factor + bias; both are then in natural units. row_of_lane: address of the
// warp's first row, a multiple of 1024, plus staged_row_of_lane. atom_stride: in bytes.
template <ElementType kElement, int kN>
__device__ __forceinline__ void add_bias(float (&s)[kN / 2], float factor, uint32_t row_of_lane,
                                         int atom_stride) {
#pragma unroll
  for (int i = 0; i < kN / 2; i += 8) {  // 16 columns
    uint32_t word[4];
    load_matrices(word, (row_of_lane ^ (i / 8 % 4 * 32)) + i / 32 * atom_stride);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack<kElement>(word[j]);
      s[i + 2 * j] = fmaf(s[i + 2 * j], factor, pair.x);
      s[i + 2 * j + 1] = fmaf(s[i + 2 * j + 1], factor, pair.y);
    }
  }
}

// The backward has keys as rows. A warp reads its 16 keys of a tile of queries x 64 keys by
// transposed matrices: this is the offset of a lane's 16 bytes for the first 16 queries; the next
// 16 queries are 2048 bytes further. thread: of the warpgroup.
__device__ __forceinline__ uint32_t transposed_columns_of_lane(int thread) {
  const int query = thread % 8 + thread / 16 % 2 * 8;
  return query * 128 + ((thread / 32 * 2 + thread / 8 % 2) ^ (query % 8)) * 16;
}

// Scores of keys x queries become 2^(score * factor + bias - lse), all in log2 units but the bias.
template <ElementType kElement, int kCount>
__device__ __forceinline__ void exponentiate_with_bias(float (&s)[kCount],
                                                       const float (&lse)[kCount], float factor,
                                                       uint32_t columns_of_lane) {
  constexpr float kLog2e = 1.44269504088896f;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {  // 16 queries
    uint32_t word[4];
    load_matrices<true>(word, columns_of_lane + i / 8 * 2048);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 pair = unpack<kElement>(word[j / 2]);
      s[i + j] = exp2_approx(fmaf(s[i + j], factor, fmaf(pair.x, kLog2e, -lse[i + j])));
      s[i + j + 1] = exp2_approx(fmaf(s[i + j + 1], factor, fmaf(pair.y, kLog2e, -lse[i + j + 1])));
    }
  }
}

// Writes values of keys x queries to where the bias was read.
template <int kRows>
__device__ __forceinline__ void stage_transposed(uint32_t columns_of_lane,
                                                 const uint32_t (&word)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    store_matrices<true>(columns_of_lane + i * 2048, word[i][0], word[i][1], word[i][2],
                         word[i][3]);
  }
}

}  // namespace flashattn3
