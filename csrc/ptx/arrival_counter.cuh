// Counters in device memory of CTAs; they return to 0 with the last one.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Arrives at the counter and returns whether this was the last of `count` arrivals. What CTAs wrote
// before their arrival (and a CTA barrier before it) is visible to the last one afterwards.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, int count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count - 1)
               : "memory");
  return before == static_cast<uint32_t>(count - 1);
}

// Counts a CTA and returns how many were counted before it. Orders no other memory access.
__device__ __forceinline__ uint32_t count_up_to(uint32_t* counter, int count) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count - 1)
               : "memory");
  return before;
}

}  // namespace flashattn3
