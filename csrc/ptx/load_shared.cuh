// Loads from shared memory by its address there: 4 bytes, or a vector of 16.
#pragma once

#include <cstdint>

namespace flashattn3 {

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ uint4 load_shared_unit(uint32_t address) {
  uint4 vec;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vec.x), "=r"(vec.y), "=r"(vec.z), "=r"(vec.w)
               : "r"(address)
               : "memory");
  return vec;
}

}  // namespace flashattn3
