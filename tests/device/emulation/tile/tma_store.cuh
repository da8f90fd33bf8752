// Emulation of csrc/tile/tma_store.cuh.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cute/arch/copy_sm90_tma.hpp"
#include "emulation.h"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "tensor_map.h"
#include "tile/fragment.h"

namespace flashattn3 {

template <int kWords>
void stage_rows(uint8_t* tile, const uint32_t (&word)[kWords], int first = 0) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < kWords; ++i) {
    const int row = thread_row(lane) + register_row(2 * i);
    const int column = 16 * first + thread_column(lane) + register_column(2 * i);
    std::memcpy(tile + row * 128 + (column / 8 ^ row % 8) * 16 + column % 8 * 2, &word[i], 4);
  }
  __syncwarp();
}

inline uint4 staged_columns(const uint8_t* tile, int row, int vec) {
  uint4 columns;
  std::memcpy(&columns, tile + row * 128 + (vec ^ row % 8) * 16, sizeof(columns));
  return columns;
}

inline void store_columns(uint16_t* row, int column, int num_columns, uint4 elements) {
  std::memcpy(row + column, &elements, 2 * std::min(8, num_columns - column));
}

struct RowTarget {
  const void* tensor_map;
  int row, head, batch_coord;
  uint16_t* data;
  int64_t row_stride;
  int num_rows;
  int num_columns;
};

template <int kAtoms>
void store_staged(const RowTarget& to, const uint8_t* staged, int atom_stride, int first_column) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  const auto map = emulation::TensorMap::unpack(to.tensor_map);
  if (to.num_rows == kRowsOfWarp && (to.row < 0 || to.head < 0 || to.batch_coord < 0)) {
    std::printf("a TMA store must not begin before the tensor: row %d\n", to.row);
    std::abort();
  }
  for (int i = lane; i < to.num_rows * 64 * kAtoms; i += 32) {
    const int row = i / (64 * kAtoms), column = i % (64 * kAtoms);
    if (first_column + column >= to.num_columns) continue;
    const uint8_t* from = staged + column / 64 * atom_stride + row * 128 +
                          (column % 64 / 8 ^ row % 8) * 16 + column % 8 * 2;
    uint16_t* at = to.data + row * to.row_stride + first_column + column;
    if (to.num_rows == kRowsOfWarp) {
      at = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(
          map.find({first_column + column, to.row + row, to.head, to.batch_coord})));
      if (at == nullptr) continue;
    }
    std::memcpy(at, from, 2);
  }
  __syncwarp();
}

}  // namespace flashattn3
