// Emulation of csrc/ptx/arrival_counter.cuh.
#pragma once

#include <cstdint>

namespace flashattn3 {

inline bool arrive_last(uint32_t* counter, int count) {
  if (*counter + 1 != static_cast<uint32_t>(count)) {
    ++*counter;
    return false;
  }
  *counter = 0;
  return true;
}

}  // namespace flashattn3
