// Loads of data that a kernel reads once, with a cache policy.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Such data leaves L2 before what other kernels left there.
class StreamPolicy {
 public:
  __device__ __forceinline__ StreamPolicy() {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(bits_));
  }

  // at: a multiple of 16 bytes. The load is not cached in L1. What a kernel before wrote is seen
  // after griddepcontrol_wait().
  __device__ __forceinline__ uint4 load(const void* at) const {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at), "l"(bits_)
                 : "memory");
    return x;
  }

  // The same of 8 bytes.
  __device__ __forceinline__ uint2 load_half(const void* at) const {
    uint2 x;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(at), "l"(bits_)
                 : "memory");
    return x;
  }

 private:
  uint64_t bits_;
};

}  // namespace flashattn3
