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
inline uint32_t count_up_to(uint32_t* counter, int count) {
  const uint32_t before = *counter;
  arrive_last(counter, count);
  return before;
}

}  // namespace flashattn3
