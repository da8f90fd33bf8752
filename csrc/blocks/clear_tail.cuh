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

// V in slots (slot_order.h); the slots of keys from `used` on become 0. num_threads: a multiple of
// kCoreColumns, each of which has 16 slots of a column at a time.
template <int kKeys, int kHeadDim>
__device__ __forceinline__ void clear_slots(uint8_t* values, int used, int thread,
                                            int num_threads) {
  constexpr int kUnits = kKeys / kSlotsOfRow;
  const int in_unit = used % kSlotsOfRow;
  uint32_t kept[4] = {};  // of the slots of the unit that is used in part
#pragma unroll
  for (int i = 0; i < kSlotsOfRow; ++i) {
    if (key_of_quad(i / 4, i % 4) < in_unit) kept[i / 4] |= 0xffu << (i % 4 * 8);
  }
  for (int group = thread / kCoreColumns; group < kHeadDim / kCoreColumns;
       group += num_threads / kCoreColumns) {
    uint4* slots = reinterpret_cast<uint4*>(values) +
                   (group * kUnits + used / kSlotsOfRow) * kCoreColumns + thread % kCoreColumns;
    uint4* const end = reinterpret_cast<uint4*>(values) + (group + 1) * kUnits * kCoreColumns;
    if (in_unit != 0) {
      *slots = make_uint4(slots->x & kept[0], slots->y & kept[1], slots->z & kept[2],
                          slots->w & kept[3]);
      slots += kCoreColumns;
    }
    for (; slots < end; slots += kCoreColumns) *slots = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace flashattn3
