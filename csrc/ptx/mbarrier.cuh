// Barriers in shared memory (mbarrier) and named barriers. CUTLASS's wrappers lack the "memory"
// clobber, so the compiler could move plain reads of shared memory across them; these wrappers have
// it.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "ptx/pipeline_state.h"

namespace flashattn3 {

#ifdef FLASHATTN3_WAIT_LIMIT_NS
// Finds a hang: a wait that takes longer than this is recorded and given up, so that the kernel
// ends, with wrong results, and the host can read the records. It serves debugging alone.
struct GivenUpWait {
  uint32_t barrier;  // address in shared memory
  uint32_t phase;
  uint32_t block, thread;
};
struct GivenUpWaits {
  uint32_t count;
  GivenUpWait first[64];
};
static __device__ GivenUpWaits given_up_waits;
#endif

// compute-sanitizer's racecheck follows the arrival of each thread, but not a __syncwarp before
// one lane's arrival for all. It serves that tool alone.
#ifdef FLASHATTN3_EVERY_LANE_ARRIVES
constexpr int kArrivalsPerWarp = 32;
#else
constexpr int kArrivalsPerWarp = 1;
#endif

// An mbarrier. A full barrier counts one arrival, of the thread that loads, and the bytes that
// this thread expects; an empty barrier counts one arrival for each warp that has read the buffer.
struct Barrier {
  uint64_t word;

  __device__ __forceinline__ uint32_t address() const { return cute::cast_smem_ptr_to_uint(&word); }

  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }

  // Returns once the phase with this parity is complete: on a new barrier, 1 returns at once and 0
  // waits for the first completion. Writes that came before the arrivals are then visible.
  __device__ __forceinline__ void wait(uint32_t phase) const {
    uint32_t done;
#ifdef FLASHATTN3_WAIT_LIMIT_NS
    uint64_t now, start;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start)::"memory");
#endif
    do {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address()), "r"(phase)
          : "memory");
#ifdef FLASHATTN3_WAIT_LIMIT_NS
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
      if (done || now - start < FLASHATTN3_WAIT_LIMIT_NS) continue;
      const uint32_t at = atomicAdd(&given_up_waits.count, 1);
      if (at < 64) given_up_waits.first[at] = {address(), phase, blockIdx.x, threadIdx.x};
      return;
#endif
    } while (!done);
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives once; the phase also waits until bulk copies have written this many bytes.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  // The calling warp arrives once. All of its lanes have finished with the buffer and are
  // converged, since a WGMMA wait or a __syncwarp precedes. is_lane0: or the caller's cheaper test.
  __device__ __forceinline__ void arrive_warp(bool is_lane0 = threadIdx.x % 32 == 0) {
    if (is_lane0) arrive();
  }

  // The same for lanes that read or wrote with plain instructions; counts kArrivalsPerWarp
  // arrivals.
  __device__ __forceinline__ void arrive_lanes() {
    if constexpr (kArrivalsPerWarp == 32) {
      arrive();
    } else {
      arrive_warp();
    }
  }
};

// Makes initialised barriers visible to bulk copies. The thread that initialised them calls it
// before the CTA's first __syncthreads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders the calling thread's plain accesses to shared memory before later accesses of the async
// proxy (WGMMA operands, TMA).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Returns lane 0's value in all lanes. The compiler then knows that branches on it do not split
// the warp, and keeps pipeline state and matrix descriptors in uniform registers: a step of d128
// 192x80 has 254 instructions instead of 290 (nvcc 13.0).
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace flashattn3
