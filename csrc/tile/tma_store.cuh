// Output rows on their way from accumulators to memory: through shared memory, then by the copy
// engine where whole boxes of rows are to be written, else 16 bytes a thread.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/util.hpp>

#include "ptx/mbarrier.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// A warp's 16 rows x 4 * kWords columns of 64 in the 128-byte swizzle, 128 bytes a row, at a
// multiple of 1024. word[i]: two neighbouring columns, as an accumulator fragment holds them
// (wgmma.cuh): even i row lane / 4, odd i 8 below; columns 8 * (i / 2) + lane % 4 * 2, from column
// 16 * first on.
template <int kWords>
__device__ __forceinline__ void stage_rows(uint8_t* tile, const uint32_t (&word)[kWords],
                                           int first = 0) {
  const int lane = threadIdx.x % 32;
  // stmatrix takes four 8 x 8 blocks, their rows at the addresses that 8 lanes each give: upper and
  // lower rows of 8 columns, then of the next 8.
  const int row = lane % 16;
  const int vec = (lane / 16) ^ (row % 8);
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    auto* at =
        reinterpret_cast<cute::uint128_t*>(tile + row * 128 + (vec ^ (2 * (first + i))) * 16);
    cute::SM90_U32x4_STSM_N::copy(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3],
                                  *at);
  }
}

// The 16 bytes of columns 8 * unit to 8 * unit + 7 of a staged row.
__device__ __forceinline__ uint4 staged_columns(const uint8_t* tile, int row, int vec) {
  return *reinterpret_cast<const uint4*>(tile + row * 128 + (vec ^ (row % 8)) * 16);
}

// Stores 8 neighbouring elements at column `column` of a row with `num_columns`; `row` is 16-byte
// aligned and column a multiple of 8.
__device__ __forceinline__ void store_columns(uint16_t* row, int column, int num_columns,
                                              uint4 elements) {
  if (column + 8 <= num_columns) {
    *reinterpret_cast<uint4*>(row + column) = elements;
    return;
  }
  const uint32_t word[4] = {elements.x, elements.y, elements.z, elements.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < num_columns) {
      row[column + i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
    }
  }
}

// One thread: starts the copy of a staged box; what lies outside the tensor is not written. L2 need
// not keep the lines: 1 % of the time where memory binds.
__device__ __forceinline__ void start_store(const void* tensor_map, const uint8_t* tile, int column,
                                            int row, int head, int batch_coord) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, "
      "%5}], "
      "[%1], %6;" ::"l"(tensor_map),
      "r"(cute::cast_smem_ptr_to_uint(tile)), "r"(column), "r"(row), "r"(head), "r"(batch_coord),
      "l"(static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST))
      : "memory");
}
__device__ __forceinline__ void commit_stores() { cute::tma_store_arrive(); }
// The same thread: until the copies have read shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Where a warp's 16 rows go.
struct RowTarget {
  const void* tensor_map;      // boxes of 64 columns x kRowsOfWarp rows
  int row, head, batch_coord;  // of the first one, there
  uint16_t* data;              // its first element
  int64_t row_stride;
  int num_rows;  // that exist, the same in all lanes: those behind may belong to another sequence
  int num_columns;
};

// Stores kAtoms staged chunks, the first of them at first_column. All lanes call it, after the
// staging; then lane 0 may have copies under way (wait_for_stores).
template <int kAtoms>
__device__ __forceinline__ void store_staged(const RowTarget& to, const uint8_t* staged,
                                             int atom_stride, int first_column) {
  fence_async_proxy();
  __syncwarp();
  const int lane = threadIdx.x % 32;
  const int columns = min(64 * kAtoms, to.num_columns - first_column);
  if (to.num_rows == kRowsOfWarp) {
    if (lane == 0) {
#pragma unroll
      for (int at = 0; at < 64 * kAtoms; at += 64) {
        if (at < columns) {
          start_store(to.tensor_map, staged + at / 64 * atom_stride, first_column + at, to.row,
                      to.head, to.batch_coord);
        }
      }
      commit_stores();
    }
  } else {
    const int vecs = (columns + 7) / 8;
    for (int begin = 0; begin < to.num_rows * vecs; begin += 32) {
      const int i = begin + lane, row = i / vecs, vec = i % vecs;
      if (row >= to.num_rows) continue;
      store_columns(to.data + row * to.row_stride, first_column + vec * 8, to.num_columns,
                    staged_columns(staged + vec / 8 * atom_stride, row, vec % 8));
    }
    __syncwarp();
  }
}

}  // namespace flashattn3
