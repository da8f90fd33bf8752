// Conversion of pairs of floats to fp16 or bf16, and back; the first element is the low half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/element.h"

namespace flashattn3 {

template <ElementType kElement>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (kElement == ElementType::kBFloat16) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <ElementType kElement>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kElement == ElementType::kBFloat16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

}  // namespace flashattn3
