// Values that the compiler must take as unknown, which keeps it from moving code or keeping what
// follows from them in registers.
#pragma once

#include <cstdint>

namespace flashattn3 {

__device__ __forceinline__ void make_opaque(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void make_opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// All ones where the lanes of a warp are converged. ptxas does not know this value, which it takes
// from the mask of active lanes (one uniform instruction).
__device__ __forceinline__ uint32_t opaque_ones() {
  uint32_t lanes;
  asm volatile("activemask.b32 %0;" : "=r"(lanes));
  return lanes;
}

}  // namespace flashattn3
