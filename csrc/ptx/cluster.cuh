// CTAs of a cluster: their barrier, and a maximum over all of their threads. One CTA without a
// cluster is a cluster of one.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "ptx/mbarrier.cuh"

namespace flashattn3 {

constexpr int kMaxClusterSize = 4;  // of what is used here

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

// All threads of all CTAs. After the wait each CTA has begun, and its barriers are initialised if
// fence_barrier_init() came before the arrival. Orders nothing else: a release would wait for every
// access of the thread to memory. Both want whole warps.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// In the place of cluster_arrive(): what this thread wrote is there for all threads after the wait.
__device__ __forceinline__ void cluster_arrive_release() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// What a CTA of the cluster, which has not left, has at this place of its shared memory.
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

// Copies bytes, a multiple of 16, to shared memory of another CTA of the cluster, where they count
// at the barrier that `full` is here. One thread calls it. The addresses are of this CTA's own
// shared memory, which has the same map.
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

// One arrival of the calling warp, as Barrier::arrive_warp, at the barrier that this one is in
// another CTA of the cluster.
__device__ __forceinline__ void arrive_warp_at(const Barrier& barrier, uint32_t cta) {
  if (threadIdx.x % 32 != 0) return;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier.address()),
      "r"(cta)
      : "memory");
}

// The largest of a value of every thread of the cluster, in shared memory; for one use. Every warp
// sends its own to every CTA, whose barrier counts the bytes. A CTA gets all before it goes on, so
// it is there as long as others send.
template <int kWarps>
struct ClusterMax {
  static_assert(kMaxClusterSize * kWarps <= 32, "a lane looks at one word");
  Barrier arrived;
  uint32_t of_warp[kMaxClusterSize * kWarps];

  // One thread, before fence_barrier_init() and the barrier of the cluster.
  __device__ __forceinline__ void init() {
    arrived.init(1);
    arrived.arrive_and_expect(cluster_size() * kWarps * sizeof(uint32_t));
  }

  // All threads; no value negative. NaN is the largest.
  __device__ __forceinline__ float find(float value) {
    // Floats that are not negative are ordered like their bits.
    const uint32_t mine = __reduce_max_sync(0xffffffff, __float_as_uint(value));
    const uint32_t lane = threadIdx.x % 32, size = cluster_size();
    uint32_t& place = of_warp[cluster_rank() * kWarps + threadIdx.x / 32];
    if (size == 1) {  // nothing may be sent within a CTA that has no cluster
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
