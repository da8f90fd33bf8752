// Stores to shared memory by address.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Stores four 8 x 8 matrices of 16-bit elements, kTransposed or as they are; lane i gives the
// address of row i % 8 of matrix i / 8.
template <bool kTransposed = false>
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
    return;
  }
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Offset of a lane's first 16 bytes for stmatrix (stage_rows) from the warp's first row.
__device__ __forceinline__ uint32_t staged_row_of_lane(int lane) {
  const int row = lane % 16;
  return row * 128 + ((lane / 16) ^ (row % 8)) * 16;
}

// stage_rows of 64 columns with the lane's address from the caller, which can keep it in a
// register. row_of_lane: address of the warp's first row, a multiple of 1024, plus
// staged_row_of_lane.
__device__ __forceinline__ void stage_rows_at(uint32_t row_of_lane, const uint32_t (&word)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_matrices(row_of_lane ^ (i * 32), word[4 * i], word[4 * i + 1], word[4 * i + 2],
                   word[4 * i + 3]);
  }
}

}  // namespace flashattn3
