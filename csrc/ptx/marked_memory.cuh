// Global memory whose words say whether they were written. A word that was not is kUnwritten, so a
// CTA that reads another one's results needs neither a memory fence nor an arrival: it reads again
// until no word is kUnwritten. The LL protocol of NCCL does so with a flag beside each word.
#pragma once

#include <cstdint>

namespace flashattn3 {

// A NaN that is the result of no operation: those are 0x7fffffff.
constexpr uint32_t kUnwritten = 0xffffffffu;

__device__ __forceinline__ bool is_unwritten(float x) { return __float_as_uint(x) == kUnwritten; }
__device__ __forceinline__ bool is_unwritten(const float4& x) {
  return is_unwritten(x.x) || is_unwritten(x.y) || is_unwritten(x.z) || is_unwritten(x.w);
}
__device__ __forceinline__ bool is_unwritten(const float2& x) {
  return is_unwritten(x.x) || is_unwritten(x.y);
}

// A word that was not written yet is kUnwritten. The load reads L2.
__device__ __forceinline__ float4 load_marked(const float4* at) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 load_marked(const float2* at) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "l"(at)
               : "memory");
  return x;
}

// Such memory stays in L2 when others read much between two launches: who reads it before it is
// written would else wait for DRAM.
__device__ __forceinline__ uint64_t keep_policy() {
  uint64_t bits;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(bits));
  return bits;
}

// x: results of operations.
__device__ __forceinline__ void store_marked(float4* at, const float4& x) {
  asm volatile("st.relaxed.gpu.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(keep_policy())
               : "memory");
}
__device__ __forceinline__ void store_marked(float2* at, const float2& x) {
  asm volatile("st.relaxed.gpu.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(at),
               "f"(x.x), "f"(x.y), "l"(keep_policy())
               : "memory");
}

// Makes the words kUnwritten.
__device__ __forceinline__ void clear_marked(float4* at) {
  const float x = __uint_as_float(kUnwritten);
  store_marked(at, make_float4(x, x, x, x));
}
__device__ __forceinline__ void clear_marked(float2* at) {
  const float x = __uint_as_float(kUnwritten);
  store_marked(at, make_float2(x, x));
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* at) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(uint32_t* at, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Called before unwritten words are read again.
__device__ __forceinline__ void poll_again() {}

}  // namespace flashattn3
