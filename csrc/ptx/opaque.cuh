// Values that the compiler must take as unknown, which keeps it from moving code or keeping what
// follows from them in registers.
#pragma once

#include <cstdint>

namespace flashattn3 {

__device__ __forceinline__ void make_opaque(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void make_opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Returns all ones: the mask of active lanes, which ptxas does not know (one uniform instruction).
// The lanes of the warp are converged, as WGMMA requires.
__device__ __forceinline__ uint32_t opaque_ones() {
  uint32_t lanes;
  asm volatile("activemask.b32 %0;" : "=r"(lanes));
  return lanes;
}

// Returns x, which is equal in all lanes. ptxas does not see that the sum's lane 0 is x,
// so it keeps the result in a uniform register instead of computing x anew at each use.
__device__ __forceinline__ int opaque_uniform(int x) {
  return __shfl_sync(~0u, x + static_cast<int>(threadIdx.x % 32), 0);
}

}  // namespace flashattn3
