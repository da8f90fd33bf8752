// Zeros over the keys of a V tile that lie behind the end of a sequence.
#pragma once

#include <cstdint>

namespace flashattn3 {

// V in rows of kChunks chunks of 128 bytes; rows from `used` on become 0. thread: of num_threads.
template <int kRows, int kChunks>
__device__ __forceinline__ void clear_rows(uint8_t* values, int used, int thread, int num_threads) {
  // 8 threads to a row of 128 bytes; the swizzle stays inside a row.
  const int offset = thread % 8 * 16;
  for (int row = used + thread / 8; row < kRows; row += num_threads / 8) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      *reinterpret_cast<uint4*>(values + (chunk * kRows + row) * 128 + offset) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// V in slots (slot_order.h); the slots of keys from `used` on become 0.
template <int kKeys, int kHeadDim>
__device__ __forceinline__ void clear_slots(uint8_t* values, int used, int thread,
                                            int num_threads) {
  const int first_unit = used / 16;  // 16 keys, which are 16 slots of each column
  for (int i = thread; i < (kKeys / 16 - first_unit) * kHeadDim; i += num_threads) {
    uint4* slots = reinterpret_cast<uint4*>(values) + first_unit * kHeadDim + i;
    uint32_t word[4] = {0, 0, 0, 0};
    if (i < kHeadDim && used % 16 != 0) {
      const uint4 before = *slots;
      const uint32_t old[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {  // keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
        uint32_t kept = 0;
        if (2 * t < used % 16) kept |= 0xffu;
        if (2 * t + 1 < used % 16) kept |= 0xff00u;
        if (8 + 2 * t < used % 16) kept |= 0xff0000u;
        if (9 + 2 * t < used % 16) kept |= 0xff000000u;
        word[t] = old[t] & kept;
      }
    }
    *slots = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace flashattn3
