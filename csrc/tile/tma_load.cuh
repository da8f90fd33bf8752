// TMA loads of a tile into the chunked, swizzled layout of gemm.cuh.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ptx/mbarrier.cuh"
#include "tile/permuted_v.h"

namespace flashattn3 {

// What L2 should do with the lines: Q is read once, K and V again by other CTAs.
constexpr uint64_t kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr uint64_t kReadAgain = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

// Copies kRows rows of kAtoms chunks, 128 bytes or kAtomColumns elements each, from (row, head,
// batch entry) and chunk first_atom on; what lies outside the tensor arrives as 0. One thread
// calls it; the bytes count at `full`, which was told of them.
template <int kRows, int kAtoms, int kAtomColumns>
__device__ __forceinline__ void copy_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int batch_coord,
                                          int first_atom = 0) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile + atom * kRows * 128,
                                 (first_atom + atom) * kAtomColumns, row, head, batch_coord);
  }
}

// Copies a box of floats, from (column, row) of a tensor of two dimensions on; as above.
__device__ __forceinline__ void copy_floats(float* to, const void* tensor_map, Barrier& full,
                                            uint64_t cache_hint, int column, int row) {
  cute::SM90_TMA_LOAD_2D::copy(tensor_map, &full.word, cache_hint, to, column, row);
}

// One arrival at `full`, and a tile that completes it.
template <int kRows, int kAtoms, int kAtomColumns>
__device__ __forceinline__ void load_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int batch_coord) {
  full.arrive_and_expect(kRows * kAtoms * 128);
  copy_tile<kRows, kAtoms, kAtomColumns>(tile, tensor_map, full, cache_hint, row, head,
                                         batch_coord);
}

// The same of V in slots (permuted_v.h), from this slot of a head on, a multiple of kCoreRowKeys.
template <int kKeys, int kColumns>
__device__ __forceinline__ void load_permuted_v(uint8_t* tile, const void* tensor_map,
                                                Barrier& full, uint64_t cache_hint,
                                                int permuted_key, int head) {
  full.arrive_and_expect(kKeys * kColumns);
  cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile, 0,
                               permuted_key / kCoreRowKeys, 0, head);
}

}  // namespace flashattn3
