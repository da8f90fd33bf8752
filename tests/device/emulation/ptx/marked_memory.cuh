// Emulation of csrc/ptx/marked_memory.cuh. A thread that polls lets other threads run.
#pragma once

#include <cstdint>

#include "emulation.h"

namespace flashattn3 {

constexpr uint32_t kUnwritten = 0xffffffffu;

inline bool is_unwritten(float x) { return __float_as_uint(x) == kUnwritten; }
inline bool is_unwritten(const float4& x) {
  return is_unwritten(x.x) || is_unwritten(x.y) || is_unwritten(x.z) || is_unwritten(x.w);
}
inline bool is_unwritten(const float2& x) { return is_unwritten(x.x) || is_unwritten(x.y); }

template <class Vector>
Vector load_marked(const Vector* at) {
  return *at;
}
template <class Vector>
void store_marked(Vector* at, const Vector& x) {
  *at = x;
  ++emulation::progress;
}
inline void clear_marked(float4* at) {
  const float x = __uint_as_float(kUnwritten);
  *at = make_float4(x, x, x, x);
}
inline void clear_marked(float2* at) {
  const float x = __uint_as_float(kUnwritten);
  *at = make_float2(x, x);
}
inline uint32_t load_relaxed(const uint32_t* at) { return *at; }
inline void store_relaxed(uint32_t* at, uint32_t x) {
  *at = x;
  ++emulation::progress;
}
inline void poll_again() { emulation::pause("a part"); }

}  // namespace flashattn3
