// TMA loads of a tile into the chunked, swizzled layout of tile_product.cuh.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "blocks/barrier.cuh"
#include "blocks/slot_order.h"

namespace flashattn3 {

// What L2 should do with the lines: Q is read once, K and V again by other CTAs.
constexpr uint64_t kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr uint64_t kReadAgain = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

// Copies kRows rows of kChunks chunks, 128 bytes or kChunkColumns elements each, from (row, head,
// batch entry) and chunk first_chunk on; what lies outside the tensor arrives as 0. One thread
// calls it; the bytes count at `full`, which was told of them.
template <int kRows, int kChunks, int kChunkColumns>
__device__ __forceinline__ void copy_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int entry,
                                          int first_chunk = 0) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile + chunk * kRows * 128,
                                 (first_chunk + chunk) * kChunkColumns, row, head, entry);
  }
}

// Copies a box of floats, from (column, row) of a tensor of two dimensions on; as above.
__device__ __forceinline__ void copy_floats(float* to, const void* tensor_map, Barrier& full,
                                            uint64_t cache_hint, int column, int row) {
  cute::SM90_TMA_LOAD_2D::copy(tensor_map, &full.word, cache_hint, to, column, row);
}

// One arrival at `full`, and a tile that completes it.
template <int kRows, int kChunks, int kChunkColumns>
__device__ __forceinline__ void load_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int entry) {
  full.arrive_and_expect(kRows * kChunks * 128);
  copy_tile<kRows, kChunks, kChunkColumns>(tile, tensor_map, full, cache_hint, row, head, entry);
}

// The same of V in slots (slot_order.h), from this slot of a head on, a multiple of kSlotsOfRow.
template <int kSlots, int kColumns>
__device__ __forceinline__ void load_slots(uint8_t* tile, const void* tensor_map, Barrier& full,
                                           uint64_t cache_hint, int slot, int head) {
  full.arrive_and_expect(kSlots * kColumns);
  cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile, 0, slot / kSlotsOfRow, 0,
                               head);
}

}  // namespace flashattn3
