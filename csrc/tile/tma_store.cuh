// Stores output rows from accumulators: through shared memory, and from there by TMA if all rows
// of a box exist, otherwise with stores of 16 bytes per thread.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90.hpp>

#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// Stages a warp's 16 rows x 4 * kWords columns, from column 16 * first on, in a tile of 64 columns
// with the 128-byte swizzle, 128 bytes per row, at a multiple of 1024 bytes. word[i]: the 16-bit
// values of accumulator registers 2 * i and 2 * i + 1, two neighbouring columns (fragment.h).
template <int kWords>
__device__ __forceinline__ void stage_rows(uint8_t* tile, const uint32_t (&word)[kWords],
                                           int first = 0) {
  const int lane = threadIdx.x % 32;
  // stmatrix stores four 8 x 8 matrices, and 8 lanes give the addresses of each matrix's rows: the
  // upper and lower 8 rows of 8 columns, then those of the next 8 columns.
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

// Returns the 16 bytes of columns 8 * vec to 8 * vec + 7 of a staged row.
__device__ __forceinline__ uint4 staged_columns(const uint8_t* tile, int row, int vec) {
  return *reinterpret_cast<const uint4*>(tile + row * 128 + (vec ^ (row % 8)) * 16);
}

// Stores 8 neighbouring elements at column `column` of a row with num_columns columns, without
// those past the last column. row is 16-byte aligned; column is a multiple of 8.
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

// Destination of a warp's 16 rows.
struct RowTarget {
  const void* tensor_map;      // boxes of 64 columns x kRowsOfWarp rows
  int row, head, batch_coord;  // coordinates of the first row in the tensor map
  uint16_t* data;              // the first row's first element
  int64_t row_stride;          // in elements
  int num_rows;                // rows that exist, the same in all lanes; rows past them may belong
                               // to another sequence
  int num_columns;
};

// Stores kAtoms staged atoms, the first of them at first_column. All lanes call it after they have
// staged the rows; afterwards copies of lane 0 may still read shared memory (wait_for_stores).
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
