// Accesses to global memory that other CTAs order theirs by, and additions.
#pragma once

#include <cstdint>

namespace flashattn3 {

__device__ __forceinline__ int load_acquire(const int32_t* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int32_t* at, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Replaces the value if it is `expected`; returns the value found.
__device__ __forceinline__ int32_t exchange_if(int32_t* at, int32_t expected, int32_t replacement) {
  int32_t found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(at), "r"(expected), "r"(replacement)
               : "memory");
  return found;
}

// Proxy fence between a bulk copy's memory accesses and the semaphore accesses that order them;
// needed on both sides.
__device__ __forceinline__ void fence_global_proxies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Adds to four consecutive floats.
__device__ __forceinline__ void add_to_memory(float* at, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

}  // namespace flashattn3
