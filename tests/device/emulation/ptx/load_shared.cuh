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

}  // namespace flashattn3
