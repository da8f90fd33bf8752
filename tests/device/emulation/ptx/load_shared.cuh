// Emulation of csrc/ptx/load_shared.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulation.h"

namespace flashattn3 {

inline uint32_t load_shared(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, emulation::shared_memory + address, sizeof(word));
  return word;
}

// Matrix i has its rows where lanes 8 * i to 8 * i + 7 say.
template <bool kTransposed = false>
void load_matrices(uint32_t (&word)[4], uint32_t address) {
  const int lane = threadIdx.x % 32, near = lane / 4, pair = lane % 4 * 2;
  const uint64_t (&addresses)[32] = emulation::of_warp(address);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const int row = kTransposed ? pair + j : near, column = kTransposed ? near : pair + j;
      const uint64_t from = addresses[8 * i + row] + column * 2;
      std::memcpy(reinterpret_cast<uint8_t*>(&word[i]) + 2 * j, emulation::shared_memory + from, 2);
    }
  }
  __syncwarp();
}

}  // namespace flashattn3
