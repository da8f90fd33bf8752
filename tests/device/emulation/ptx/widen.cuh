// Emulation of csrc/ptx/widen.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/convert_16bit.cuh"

namespace flashattn3 {

inline float value_of_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float x = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if ((bits & 0x7f) == 0x7f) x = emulation::kCanonicalNan;
  return bits & 0x80 ? -x : x;
}

template <class Value>
uint2 widen_bytes(uint32_t bytes, Value value) {
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = value(static_cast<uint8_t>(bytes >> 8 * i));
  return {pack<ElementType::kFloat16>(x[0], x[1]), pack<ElementType::kFloat16>(x[2], x[3])};
}

inline uint2 widen_e4m3(uint32_t bytes) { return widen_bytes(bytes, value_of_e4m3); }
inline uint2 widen_int8(uint32_t bytes) {
  return widen_bytes(bytes, [](uint8_t x) { return float(static_cast<int8_t>(x)); });
}

}  // namespace flashattn3
