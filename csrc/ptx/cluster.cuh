// The CTAs of a cluster: their barrier, access to each other's shared memory, and the maximum over
// all of their threads. A CTA that is launched without a cluster is a cluster of one.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "ptx/mbarrier.cuh"

namespace flashattn3 {

constexpr int kMaxClusterSize = 4;  // the kernels use no larger one

__device__ __forceinline__ uint32_t cluster_index() {
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
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

// The cluster's barrier: all threads of all CTAs call both functions, as whole warps. After the
// wait every CTA has started, and its barriers are initialised if it called fence_barrier_init()
// before it arrived. The arrival orders no other access: a release would make the thread wait for
// all of its accesses to memory.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// Replaces cluster_arrive() where all threads are to see, after the wait, what this thread wrote.
__device__ __forceinline__ void cluster_arrive_release() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Returns the word at the address of `place` in the shared memory of a CTA of the cluster, which
// must not have exited. The addresses of all CTAs have the same layout.
__device__ __forceinline__ int32_t load_from_cta(const int32_t& place, uint32_t cta) {
  int32_t value;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.s32 %0, [there];\n}"
      : "=r"(value)
      : "r"(cute::cast_smem_ptr_to_uint(&place)), "r"(cta)
      : "memory");
  return value;
}

// Copies `bytes` bytes, a multiple of 16, to the shared memory of another CTA of the cluster,
// where that CTA's barrier at the address of `full` counts them. One thread calls it. All
// addresses are those of this CTA's own shared memory, which has the same layout.
__device__ __forceinline__ void copy_to_peer(uint32_t to, uint32_t from, const Barrier& full,
                                             uint32_t bytes, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 barrier, %2, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %3, "
      "[barrier];\n}" ::"r"(to),
      "r"(from), "r"(full.address()), "r"(bytes), "r"(cta)
      : "memory");
}

// The calling warp arrives once, as in Barrier::arrive_warp, at the barrier that has the address
// of `barrier` in another CTA of the cluster.
__device__ __forceinline__ void arrive_warp_at(const Barrier& barrier, uint32_t cta) {
  if (threadIdx.x % 32 != 0) return;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier.address()),
      "r"(cta)
      : "memory");
}

// Finds the largest value over all threads of the cluster; lies in shared memory and serves once.
// Every warp sends its maximum to every CTA, whose barrier counts the bytes. A CTA waits for the
// maxima of all warps before it continues, so it still exists while other CTAs send.
template <int kWarps>
struct ClusterMax {
  static_assert(kMaxClusterSize * kWarps <= 32, "each lane reads one word");
  Barrier arrived;
  uint32_t of_warp[kMaxClusterSize * kWarps];

  // One thread calls it, before fence_barrier_init() and the cluster's barrier.
  __device__ __forceinline__ void init() {
    arrived.init(1);
    arrived.arrive_and_expect(cluster_size() * kWarps * sizeof(uint32_t));
  }

  // All threads call it. No value may be negative; NaN counts as the largest.
  __device__ __forceinline__ float find(float value) {
    // The bits of floats that are not negative have the same order as the floats.
    const uint32_t mine = __reduce_max_sync(0xffffffff, __float_as_uint(value));
    const uint32_t lane = threadIdx.x % 32, size = cluster_size();
    uint32_t& place = of_warp[cluster_rank() * kWarps + threadIdx.x / 32];
    if (size == 1) {  // a CTA without a cluster must not send to itself
      if (lane == 0) place = mine;
      __syncthreads();
    } else {
      if (lane < size) send(mine, place, lane);
      arrived.wait(0);  // kWarps words of each CTA
    }
    const uint32_t found = lane < size * kWarps ? of_warp[lane] : 0;
    return __uint_as_float(__reduce_max_sync(0xffffffff, found));
  }

 private:
  __device__ __forceinline__ void send(uint32_t value, const uint32_t& place, uint32_t cta) {
    asm volatile(
        "{\n.reg .b32 there, barrier;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 barrier, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %3, [barrier];\n"
        "}" ::"r"(cute::cast_smem_ptr_to_uint(&place)),
        "r"(arrived.address()), "r"(cta), "r"(value)
        : "memory");
  }
};

}  // namespace flashattn3
