// Asynchronous copies of 16 bytes per thread (cp.async), and the mbarrier that their completion
// arrives at.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace flashattn3 {

// Copies 16 bytes to shared memory, or writes zeros there if !exists; `from` is then not read. Both
// addresses are multiples of 16 bytes. The data is read once: it leaves L2 before what other
// kernels left there.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(exists ? 16 : 0), "l"(policy)
      : "memory");
}

// The same; with is_read_again the data stays in L2 as other data does.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists,
                                           bool is_read_again) {
  uint64_t once, again;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(exists ? 16 : 0), "l"(is_read_again ? again : once)
      : "memory");
}

// Arrives at the barrier once when all copies that this thread has issued so far are complete. The
// barrier counts one arrival for each thread that copies. A thread that has waited for the phase
// calls fence_async_proxy() before its WGMMA reads the bytes: cp.async writes in the generic proxy.
__device__ __forceinline__ void arrive_when_copied(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address())
               : "memory");
}

// Waits until all copies that this thread has issued are complete.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace flashattn3
