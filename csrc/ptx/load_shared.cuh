// Loads from shared memory by its address there: 4 bytes, a vector of 16, or four matrices.
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

// Loads four 8 x 8 matrices of 16-bit elements, kTransposed or as they are; lane i gives the
// address of row i % 8 of matrix i / 8.
template <bool kTransposed = false>
__device__ __forceinline__ void load_matrices(uint32_t (&word)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
  }
}

}  // namespace flashattn3
