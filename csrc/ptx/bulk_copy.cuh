// Bulk copies from shared memory, such as TMA stores: a thread commits those that it has started to
// a group, and waits for them.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

namespace flashattn3 {

// Starts to copy floats from shared memory, at address `from`, to global memory, or to add them
// there. bytes: a multiple of 16.
__device__ __forceinline__ void store_floats(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_floats(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void commit_stores() { cute::tma_store_arrive(); }
// The same thread calls it: waits until the copies have read shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// The same thread calls it: waits until the copies are in memory.
__device__ __forceinline__ void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace flashattn3
