// Transposition of a small matrix by one warp.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Returns the transposed of 8 x 8 numbers of 16 bits. Lane 4 row + i has those of columns 2 i and
// 2 i + 1.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
  return transposed;
}

}  // namespace flashattn3
