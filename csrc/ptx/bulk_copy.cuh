// Bulk copies from shared memory, such as TMA stores: a thread commits those that it has started to
// a group, and waits for them.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/util.hpp>

#include "ptx/element.h"

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

// Starts the TMA store of a box from shared memory; elements outside the tensor are not written.
// One thread calls it. L2 need not keep the lines: that hint saves 1 % of the time of memory-bound
// calls.
__device__ __forceinline__ void start_store(const void* tensor_map, const uint8_t* tile, int column,
                                            int row, int head, int batch_coord) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, "
      "%5}], "
      "[%1], %6;" ::"l"(tensor_map),
      "r"(cute::cast_smem_ptr_to_uint(tile)), "r"(column), "r"(row), "r"(head), "r"(batch_coord),
      "l"(static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST))
      : "memory");
}

// Starts to add the box to 16-bit elements of global memory. Each sum is rounded.
template <ElementType>  // of the tensor map
__device__ __forceinline__ void start_add(const void* tensor_map, const uint8_t* tile, int column,
                                          int row, int head, int batch_coord) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, "
      "%5}], [%1];" ::"l"(tensor_map),
      "r"(cute::cast_smem_ptr_to_uint(tile)), "r"(column), "r"(row), "r"(head), "r"(batch_coord)
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
