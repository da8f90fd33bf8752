// Zeros over the keys of a V tile that lie behind the end of a sequence.
#pragma once

#include <cstdint>

#include "blocks/slot_order.h"

namespace flashattn3 {

// V in rows of kChunks chunks of 128 bytes; rows from `used` on become 0. thread: of num_threads.
template <int kRows, int kChunks>
__device__ __forceinline__ void clear_rows(uint8_t* values, int used, uint32_t thread,
                                           int num_threads) {
  // 8 threads to a row of 128 bytes; the swizzle stays inside a row.
  const uint32_t offset = thread % 8 * 16;
  for (int row = used + static_cast<int>(thread / 8); row < kRows; row += num_threads / 8) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      *reinterpret_cast<uint4*>(values + (chunk * kRows + row) * 128 + offset) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// V in slots (slot_order.h); the slots of keys from `used` on become 0. num_threads: of whole
// quads.
template <int kKeys, int kHeadDim>
__device__ __forceinline__ void clear_slots(uint8_t* values, int used, int thread,
                                            int num_threads) {
  constexpr int kStride = kKeys / kSlotsOfRow * kCoreBytes;  // from eight columns to the next
  const int in_unit = used % kSlotsOfRow;
  uint32_t kept = 0;  // of the thread's four slots, the same of every column
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (key_of_quad(thread % 4, i) < in_unit) kept |= 0xffu << (8 * i);
  }
  const int partly = used / kSlotsOfRow * kCoreBytes;
  const int clear = (used + kSlotsOfRow - 1) / kSlotsOfRow * kCoreBytes;
  for (int column = 0; column < kHeadDim; column += kCoreColumns) {
    uint8_t* group = values + column / kCoreColumns * kStride;
    for (int i = partly + thread * 4; i < clear; i += num_threads * 4) {
      *reinterpret_cast<uint32_t*>(group + i) &= kept;
    }
    for (int i = clear + thread * 16; i < kStride; i += num_threads * 16) {
      *reinterpret_cast<uint4*>(group + i) = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace flashattn3
