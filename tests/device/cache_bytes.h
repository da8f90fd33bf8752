// Numbers of a cache of 8 bits, on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tensors.h"

inline uint8_t e4m3_of(float x) {
  const float magnitude = std::min(std::fabs(x), 448.f);
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  // 8 to 16, of a denormal number less; 16 is the next power of 2.
  const int significand = static_cast<int>(std::rint(std::ldexp(magnitude, 3 - exponent)));
  return (std::signbit(x) ? 0x80 : 0) | static_cast<uint8_t>((exponent + 6) * 8 + significand);
}

inline float of_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

inline uint8_t int8_of(float x) {
  return static_cast<uint8_t>(static_cast<int8_t>(std::clamp(std::rint(x), -128.f, 127.f)));
}

// The elements of a tensor whose low bytes are such numbers; NaN of e4m3 elsewhere.
inline std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  std::vector<uint8_t> bytes(tensor.host.size());
  std::transform(tensor.host.begin(), tensor.host.end(), bytes.begin(),
                 [](uint16_t x) { return x == kNaN ? uint8_t{0x7f} : static_cast<uint8_t>(x); });
  return bytes;
}
