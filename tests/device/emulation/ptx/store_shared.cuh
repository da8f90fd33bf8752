// Emulation of csrc/ptx/store_shared.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulation.h"
#include "tile/tma_store.cuh"

namespace flashattn3 {

inline uint32_t staged_row_of_lane(int lane) {
  return lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
}
inline void stage_rows_at(uint32_t row_of_lane, const uint32_t (&word)[16]) {
  const uint32_t first = row_of_lane - staged_row_of_lane(threadIdx.x % 32);
  stage_rows(emulation::shared_memory + first, word);
}

// As load_matrices.
template <bool kTransposed>
void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int lane = threadIdx.x % 32, near = lane / 4, pair = lane % 4 * 2;
  const uint32_t word[4] = {a, b, c, d};
  const uint64_t (&addresses)[32] = emulation::of_warp(address);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const int row = kTransposed ? pair + j : near, column = kTransposed ? near : pair + j;
      const uint64_t to = addresses[8 * i + row] + column * 2;
      const auto element = static_cast<uint16_t>(word[i] >> (16 * j));
      std::memcpy(emulation::shared_memory + to, &element, 2);
    }
  }
  __syncwarp();
}

}  // namespace flashattn3
