// Conversion to e4m3.
#pragma once

#include <cstdint>

namespace flashattn3 {

// To the nearest, ties to even; beyond ±448, infinities too, to ±448; NaN to 0x7f. The first value
// is the lowest byte.
__device__ __forceinline__ uint32_t to_e4m3(float a, float b, float c, float d) {
  uint32_t bytes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

// Byte j of each word into word j: four rows of four bytes become four columns.
__device__ __forceinline__ void transpose_bytes(uint32_t (&word)[4]) {
  const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140);
  const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140);
  const uint32_t high01 = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t high23 = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(low01, low23, 0x5410);
  word[1] = __byte_perm(low01, low23, 0x7632);
  word[2] = __byte_perm(high01, high23, 0x5410);
  word[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace flashattn3
