// Conversion of 8-bit numbers to fp16, which holds all of them exactly: four at a time, the first
// is the lowest byte and the low half of x.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn3 {

__device__ __forceinline__ uint2 widen_e4m3(uint32_t bytes) {
  uint2 halves;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(halves.x), "=r"(halves.y)
      : "r"(bytes));
  return halves;
}

// The fp16 number with the bits 0x6400 + u is 1024 + u.
__device__ __forceinline__ uint2 widen_int8(uint32_t bytes) {
  constexpr uint32_t kHighBytes = 0x64646464u, k1152 = 0x64806480u;
  const uint32_t biased = bytes ^ 0x80808080u;  // x + 128
  uint2 halves;
  asm("sub.f16x2 %0, %1, %2;"
      : "=r"(halves.x)
      : "r"(__byte_perm(biased, kHighBytes, 0x4140)), "r"(k1152));
  asm("sub.f16x2 %0, %1, %2;"
      : "=r"(halves.y)
      : "r"(__byte_perm(biased, kHighBytes, 0x4342)), "r"(k1152));
  return halves;
}

}  // namespace flashattn3
