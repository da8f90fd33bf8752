// TMA loads of a tile into the chunked, swizzled layout of tile_product.cuh.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "blocks/barrier.cuh"

namespace flashattn3 {

// What L2 should do with the lines: Q is read once, K and V again by other CTAs.
constexpr uint64_t kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr uint64_t kReadAgain = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

// Loads kRows x (64 * kChunks) elements that start at (row, head, batch entry); whatever lies
// outside the tensor arrives as 0. One thread calls it; `full` completes when all bytes are there.
template <int kRows, int kChunks>
__device__ __forceinline__ void load_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int entry) {
  full.arrive_and_expect(kRows * kChunks * 128);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile + chunk * kRows * 128,
                                 chunk * 64, row, head, entry);
  }
}

}  // namespace flashattn3
