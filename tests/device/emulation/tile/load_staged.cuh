// Emulation of csrc/tile/load_staged.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulation.h"
#include "tile/fragment.h"

namespace flashattn3 {

template <int kWords>
void load_staged_rows(uint32_t (&word)[kWords], const uint8_t* tile, int first = 0) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < kWords; ++i) {
    const int row = thread_row(lane) + register_row(2 * i);
    const int column = 16 * first + thread_column(lane) + register_column(2 * i);
    std::memcpy(&word[i], tile + row * 128 + (column / 8 ^ row % 8) * 16 + column % 8 * 2, 4);
  }
  __syncwarp();
}

}  // namespace flashattn3
