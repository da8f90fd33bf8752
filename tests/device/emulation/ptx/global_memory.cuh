// Emulation of csrc/ptx/global_memory.cuh. A thread that polls lets other threads run.
#pragma once

#include <cstdint>
#include <utility>

#include "emulation.h"

namespace flashattn3 {

inline int load_acquire(const int32_t* at) {
  emulation::pause("global memory");
  return *at;
}
inline void add_release(int32_t* at, int value) {
  *at += value;
  ++emulation::progress;
}
inline int32_t exchange_if(int32_t* at, int32_t expected, int32_t replacement) {
  return *at == expected ? std::exchange(*at, replacement) : *at;
}
inline void fence_global_proxies() {}
inline void add_to_memory(float* at, float a, float b, float c, float d) {
  at[0] += a, at[1] += b, at[2] += c, at[3] += d;
}

}  // namespace flashattn3
