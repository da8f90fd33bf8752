// Emulation of csrc/ptx/transpose.cuh.
#pragma once

#include <cstdint>

#include "emulation.h"

namespace flashattn3 {

inline uint32_t transpose_8x8(uint32_t x) {
  struct Word {
    uint32_t x, transposed = 0;
  } mine{x};
  emulation::meet_warp(mine, [](auto of_lane) {
    for (int row = 0; row < 8; ++row) {
      for (int column = 0; column < 8; ++column) {
        const uint32_t element = of_lane(column * 4 + row / 2).x >> 16 * (row % 2) & 0xffffu;
        of_lane(row * 4 + column / 2).transposed |= element << 16 * (column % 2);
      }
    }
  });
  return mine.transposed;
}

}  // namespace flashattn3
