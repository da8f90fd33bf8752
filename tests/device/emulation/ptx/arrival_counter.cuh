// Emulation of csrc/ptx/arrival_counter.cuh.
#pragma once

#include <algorithm>
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
inline bool all_arrived(const uint32_t* counter) { return *counter == 0; }

constexpr uint64_t kLaunchStep = 1 << 16;

inline uint64_t start_launch(uint64_t* launches, int num_ctas) {
  const uint64_t before = (*launches)++;
  if (before % kLaunchStep == static_cast<uint64_t>(num_ctas - 1))
    *launches += kLaunchStep - num_ctas;
  return before & ~(kLaunchStep - 1);
}
inline bool arrive_last(uint64_t* counter, uint64_t launch, int count) {
  *counter = std::max(*counter, launch);
  return (*counter)++ == launch + static_cast<uint64_t>(count - 1);
}
inline void arrive_unordered(uint64_t* counter, uint64_t launch) {
  arrive_last(counter, launch, 0);
}
inline bool has_counted(const uint64_t* counter, uint64_t launch, uint64_t count) {
  return *counter >= launch + count;
}
inline bool have_arrived(const uint64_t* counter, uint64_t launch, uint64_t count) {
  return *counter >= launch + count;
}

}  // namespace flashattn3
