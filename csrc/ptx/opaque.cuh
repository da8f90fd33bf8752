// Values that the compiler must take as unknown, which keeps it from moving code or keeping what
// follows from them in registers.
#pragma once

#include <cstdint>

namespace flashattn3 {

__device__ __forceinline__ void make_opaque(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void make_opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

}  // namespace flashattn3
