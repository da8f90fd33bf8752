// TMA loads of a tile into the swizzled layout of gemm.cuh. TMA writes zeros past the end of a
// tensor, but not past the end of a sequence in it: zero_fill_rows writes those.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ptx/mbarrier.cuh"

namespace flashattn3 {

// L2 cache hints: Q is read once; K and V are read again by other CTAs, a bias perhaps.
constexpr uint64_t kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr uint64_t kReadAgain = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
constexpr uint64_t kReadNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// Copies kRows rows of kAtoms swizzle atoms, each of 128 bytes or kAtomColumns elements, from (row,
// head, batch_coord) and atom first_atom on, to a tile of kTileRows rows. Elements outside the
// tensor arrive as 0. One thread calls it; `full`, which already expects the bytes, counts them.
template <int kRows, int kAtoms, int kAtomColumns, int kTileRows = kRows>
__device__ __forceinline__ void copy_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int batch_coord,
                                          int first_atom = 0) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    cute::SM90_TMA_LOAD_4D::copy(tensor_map, &full.word, cache_hint, tile + atom * kTileRows * 128,
                                 (first_atom + atom) * kAtomColumns, row, head, batch_coord);
  }
}

// Copies consecutive bytes, a multiple of 16, from global memory; `full` expects and counts them.
__device__ __forceinline__ void copy_bytes(uint8_t* to, const void* from, Barrier& full,
                                           uint32_t bytes) {
  cute::SM90_BULK_COPY_G2S::copy(from, &full.word, to, static_cast<int32_t>(bytes));
}

// Arrives at `full` and copies a tile, whose bytes complete the phase.
template <int kRows, int kAtoms, int kAtomColumns>
__device__ __forceinline__ void load_tile(uint8_t* tile, const void* tensor_map, Barrier& full,
                                          uint64_t cache_hint, int row, int head, int batch_coord) {
  full.arrive_and_expect(kRows * kAtoms * 128);
  copy_tile<kRows, kAtoms, kAtomColumns>(tile, tensor_map, full, cache_hint, row, head,
                                         batch_coord);
}

// Sets the rows of a tile from row `used` on to 0. values: a tile of kRows rows and kAtoms atoms.
// thread: index of the calling thread, below num_threads.
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

}  // namespace flashattn3
