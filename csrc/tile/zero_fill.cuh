// Zero fill of the keys of a V tile that are past the end of a sequence, or before its first key.
#pragma once

#include <cstdint>

#include "tile/permuted_v.h"

namespace flashattn3 {

// Sets the rows of a tile from row `used` on to 0. values: a tile of kRows rows and kAtoms atoms
// (gemm.cuh). thread: index of the calling thread, below num_threads.
template <int kRows, int kAtoms>
__device__ __forceinline__ void zero_fill_rows(uint8_t* values, int used, uint32_t thread,
                                               int num_threads) {
  // Eight threads write the 128 bytes of a row; the swizzle permutes bytes within a row.
  const uint32_t offset = thread % 8 * 16;
  for (int row = used + static_cast<int>(thread / 8); row < kRows; row += num_threads / 8) {
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      *reinterpret_cast<uint4*>(values + (atom * kRows + row) * 128 + offset) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// The same for the rows before `begin` and from `end` on.
template <int kRows, int kAtoms>
__device__ __forceinline__ void zero_fill_rows_outside(uint8_t* values, int begin, int end,
                                                       uint32_t thread, int num_threads) {
  const uint32_t offset = thread % 8 * 16;
  for (int row = static_cast<int>(thread / 8); row < kRows; row += num_threads / 8) {
    if (row >= begin && row < end) continue;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      *reinterpret_cast<uint4*>(values + (atom * kRows + row) * 128 + offset) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// The same for permuted V (permuted_v.h), whose keys from `used` on become 0. num_threads: a
// multiple of kCoreColumns; a thread writes 16 keys of a column at a time.
template <int kKeys, int kHeadDim>
__device__ __forceinline__ void zero_fill_permuted_v(uint8_t* values, int used, int thread,
                                                     int num_threads) {
  constexpr int kVecs = kKeys / kCoreRowKeys;
  const int in_vec = used % kCoreRowKeys;
  uint32_t kept[4] = {};  // mask of the bytes to keep in the vector that holds key `used`
#pragma unroll
  for (int i = 0; i < kCoreRowKeys; ++i) {
    if (permuted_key(i / 4, i % 4) < in_vec) kept[i / 4] |= 0xffu << (i % 4 * 8);
  }
  for (int group = thread / kCoreColumns; group < kHeadDim / kCoreColumns;
       group += num_threads / kCoreColumns) {
    uint4* permuted = reinterpret_cast<uint4*>(values) +
                      (group * kVecs + used / kCoreRowKeys) * kCoreColumns + thread % kCoreColumns;
    uint4* const end = reinterpret_cast<uint4*>(values) + (group + 1) * kVecs * kCoreColumns;
    if (in_vec != 0) {
      *permuted = make_uint4(permuted->x & kept[0], permuted->y & kept[1], permuted->z & kept[2],
                             permuted->w & kept[3]);
      permuted += kCoreColumns;
    }
    for (; permuted < end; permuted += kCoreColumns) *permuted = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace flashattn3
