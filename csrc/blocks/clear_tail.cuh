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
  constexpr int kUnit = kSlotsOfRow * kHeadDim;  // bytes: 16 keys, 16 slots of each column
  const int in_unit = used % kSlotsOfRow;
  if (in_unit != 0) {
    uint32_t kept = 0;  // of the thread's four slots, the same of every column
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key_of_quad(thread % 4, i) < in_unit) kept |= 0xffu << (8 * i);
    }
    auto* words = reinterpret_cast<uint32_t*>(values + used / kSlotsOfRow * kUnit);
    for (int i = thread; i < kUnit / 4; i += num_threads) words[i] &= kept;
  }
  const int first_clear = (used + kSlotsOfRow - 1) / kSlotsOfRow * kUnit;
  for (int i = first_clear + thread * 16; i < kKeys * kHeadDim; i += num_threads * 16) {
    *reinterpret_cast<uint4*>(values + i) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace flashattn3
