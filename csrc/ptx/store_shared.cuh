// Stores to shared memory by address.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Stores four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix
// i / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace flashattn3
