// A tile of permuted V (permuted_v.h) in shared memory: its TMA load and the zeros past the end of
// a sequence.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ptx/mbarrier.cuh"
#include "tile/permuted_v.h"

namespace flashattn3 {

// Copies the map's box, from permuted_key of a head on, a multiple of kCoreRowKeys. `full`, which
// already expects the bytes, counts them.
__device__ __forceinline__ void copy_permuted_v(uint8_t* tile, const void* tensor_map,
                                                Barrier& full, uint64_t cache_hint,
                                                int permuted_key, int head) {
  cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile, 0,
                               permuted_key / kCoreRowKeys, 0, head);
}

// Sets the keys of a tile from key `used` on to 0. thread: index of the calling thread, below
// num_threads, a multiple of kCoreColumns; a thread writes 16 keys of a column at a time.
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
