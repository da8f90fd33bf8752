// CTAs of a cluster: their barrier, and a maximum over all of their threads. One CTA without a
// cluster is a cluster of one.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace flashattn3 {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// All threads of all CTAs. What was written before the arrival, to the shared memory of any of
// them, is seen after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The largest of a value of every thread of the cluster, no value negative or NaN. result: in
// shared memory, +0 in every CTA since a barrier of the cluster; used once. No CTA may leave before
// this returns, and none has to stay after.
__device__ __forceinline__ float cluster_max(float value, uint32_t& result) {
  // Floats that are not negative are ordered like their bits.
  const uint32_t of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(value));
  const uint32_t lane = threadIdx.x % 32;
  if (lane < cluster_size()) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "red.relaxed.cluster.shared::cluster.max.u32 [there], %2;\n}" ::"r"(
            cute::cast_smem_ptr_to_uint(&result)),
        "r"(lane), "r"(of_warp)
        : "memory");
  }
  __syncwarp();  // the barrier wants whole warps
  cluster_arrive();
  cluster_wait();
  return __uint_as_float(result);
}

}  // namespace flashattn3
