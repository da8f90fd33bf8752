// Counters of CTAs in device memory.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Arrives at the counter, which returns to 0 with the last of `count` arrivals, and returns whether
// this was the last one. What CTAs wrote before their arrival (and a CTA barrier before it) is
// visible to the last one afterwards.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, int count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count - 1)
               : "memory");
  return before == static_cast<uint32_t>(count - 1);
}

// Returns whether all of the arrivals have happened; the calling thread has arrived. What CTAs
// wrote before their arrivals is then visible.
__device__ __forceinline__ bool all_arrived(const uint32_t* counter) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now == 0;
}

// Counters that need not be 0 before a launch. The upper bits of a counter, a multiple of
// kLaunchStep, are the number of the launch that used it last.
constexpr uint64_t kLaunchStep = 1 << 16;  // more than the arrivals of a launch

// Called once by each of the launch's num_ctas CTAs. `launches` counts those that have started and,
// with the last one, the launch. Returns the number of the launch.
__device__ __forceinline__ uint64_t start_launch(uint64_t* launches, int num_ctas) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;"
               : "=l"(before)
               : "l"(launches)
               : "memory");
  if (before % kLaunchStep == static_cast<uint64_t>(num_ctas - 1)) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(launches),
                 "l"(kLaunchStep - num_ctas)
                 : "memory");
  }
  return before & ~(kLaunchStep - 1);
}

// Like arrive_last above, for the launch of this number: arrivals of earlier ones do not count.
__device__ __forceinline__ bool arrive_last(uint64_t* counter, uint64_t launch, int count) {
  uint64_t before;
  asm volatile(
      "red.relaxed.gpu.global.max.u64 [%1], %2;\n"
      "atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;"
      : "=l"(before)
      : "l"(counter), "l"(launch)
      : "memory");
  return before == launch + static_cast<uint64_t>(count - 1);
}

// The same arrival, for CTAs that wait for none: nothing is ordered by it.
__device__ __forceinline__ void arrive_unordered(uint64_t* counter, uint64_t launch) {
  asm volatile(
      "red.relaxed.gpu.global.max.u64 [%0], %1;\n"
      "red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(counter),
      "l"(launch)
      : "memory");
}

// Whether so many arrivals of the launch have happened. At the counter of start_launch: whether all
// CTAs have started, with count kLaunchStep.
__device__ __forceinline__ bool has_counted(const uint64_t* counter, uint64_t launch,
                                            uint64_t count) {
  uint64_t now;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
  return now >= launch + count;
}

// The same; what CTAs wrote before their arrivals is then visible.
__device__ __forceinline__ bool have_arrived(const uint64_t* counter, uint64_t launch,
                                             uint64_t count) {
  uint64_t now;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
  return now >= launch + count;
}

}  // namespace flashattn3
