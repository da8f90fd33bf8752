// Stores of output rows straight from accumulators, 16 bytes a thread.
#pragma once

#include <cstdint>

namespace flashattn3 {

// word[i] of lane t of a quad goes to word[t] of lane i: before, lane t holds columns 2t, 2t + 1 of
// four groups of 8; after, all 8 columns of group t.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t& low = word[i];
      uint32_t& high = word[i | distance];
      const uint32_t received = __shfl_xor_sync(~0u, upper ? low : high, distance);
      (upper ? low : high) = received;
    }
  }
}

// Stores 8 neighbouring elements at column `column` of a row with `num_columns`; `row` is 16-byte
// aligned and column a multiple of 8.
__device__ __forceinline__ void store_columns(uint16_t* row, int column, int num_columns,
                                              const uint32_t (&word)[4]) {
  if (column + 8 <= num_columns) {
    *reinterpret_cast<uint4*>(row + column) = make_uint4(word[0], word[1], word[2], word[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < num_columns) {
      row[column + i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
    }
  }
}

}  // namespace flashattn3
