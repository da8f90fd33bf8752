// Backward kernel: persistent, one CTA per SM. The last warpgroup has one producer thread
// (load.cuh) and one dQ writer thread per consumer warpgroup (dq_writer.cuh); the others are
// consumers (mainloop.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "backward/arguments.h"
#include "backward/dq_writer.cuh"
#include "backward/load.cuh"
#include "backward/mainloop.cuh"
#include "backward/traits.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::backward {

// The template argument is a type and not a Config, as for forward::attention_kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ typename Traits::Arguments args) {
  constexpr Config kConfig = Traits::kConfig;
  extern __shared__ __align__(1024) uint8_t shared[];
  using Storage = SharedStorageOf<kConfig>;
  static_assert(sizeof(Storage) <= kSharedStorageBytes);

  if (threadIdx.x == 0) reinterpret_cast<Storage*>(shared)->init();
  // Sync: no thread touches a barrier before it is initialised.
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (warp > Traits::kDqWriters || !cute::elect_one_sync()) return;
    if (warp == 0) {
      cute::prefetch_tma_descriptor(&args.q);
      cute::prefetch_tma_descriptor(&args.k);
      cute::prefetch_tma_descriptor(&args.v);
      cute::prefetch_tma_descriptor(&args.dout);
      cute::prefetch_tma_descriptor(&args.lse_delta);
      // Consumers access no global memory before this thread's loads have arrived.
      griddepcontrol_wait();
      launch_dependents();  // after the wait: dependents see preprocess's semaphore values
      Producer<kConfig>(args, shared).run();
    } else {
      griddepcontrol_wait();
      DqWriter<kConfig>(args, shared, warp - 1).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<kConfig>(args, shared, warpgroup).run();
  }
}

}  // namespace flashattn3::backward
