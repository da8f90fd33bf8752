// Bulk copies from shared memory, such as TMA stores: a thread commits those that it has started to
// a group, and waits for them.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

namespace flashattn3 {

__device__ __forceinline__ void commit_stores() { cute::tma_store_arrive(); }
// The same thread calls it: waits until the copies have read shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace flashattn3
