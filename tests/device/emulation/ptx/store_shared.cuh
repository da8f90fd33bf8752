// Emulation of csrc/ptx/store_shared.cuh.
#pragma once

#include <cstdint>

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

}  // namespace flashattn3
