// Conversion of floats and integers to 8-bit numbers, four at a time.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn3 {

// Rounds to the nearest e4m3 number, ties to even. Values beyond ±448 and infinities become ±448,
// NaN becomes 0x7f. The first value is in the lowest byte.
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

// Returns the float of the e4m3 number that to_e4m3 rounds to.
__device__ __forceinline__ float rounded_to_e4m3(float x) {
  uint32_t halves;
  asm("{\n.reg .b16 pair;\n"
      "cvt.rn.satfinite.e4m3x2.f32 pair, %1, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, pair;\n}"
      : "=r"(halves)
      : "f"(x));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(halves)));
}

// Packs integers, saturated to -128 and 127 or to 0 and 255; the first is in the lowest byte. The
// compiler merges a conversion of floats to integers before it into the same instruction.
template <bool kSigned>
__device__ __forceinline__ uint32_t saturated_bytes(int a, int b, int c, int d) {
  uint32_t high, bytes;
  if constexpr (kSigned) {
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(b), "r"(a), "r"(high));
  } else {
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(b), "r"(a), "r"(high));
  }
  return bytes;
}

// Rounds to the nearest integers, ties to even, and saturates; NaN becomes 0.
template <bool kSigned>
__device__ __forceinline__ uint32_t nearest_bytes(float a, float b, float c, float d) {
  return saturated_bytes<kSigned>(__float2int_rn(a), __float2int_rn(b), __float2int_rn(c),
                                  __float2int_rn(d));
}

__device__ __forceinline__ uint32_t to_int8(float a, float b, float c, float d) {
  return nearest_bytes<true>(a, b, c, d);
}

__device__ __forceinline__ uint32_t to_uint8(float a, float b, float c, float d) {
  return nearest_bytes<false>(a, b, c, d);
}

// Saturates integers. The bits of a negative float are a negative integer and become 0.
__device__ __forceinline__ uint32_t to_uint8(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return saturated_bytes<false>(a, b, c, d);
}

// Like fmaxf, but returns NaN if one of the values is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float highest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(highest) : "f"(a), "f"(b));
  return highest;
}

// Moves byte j of each word into word j: four rows of four bytes become four columns.
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
