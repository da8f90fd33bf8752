// The backward kernel: one CTA on an SM, which takes tiles of keys until none is left. Of
// the last warpgroup one thread loads (producer.cuh) and one for each of the others sends dQ to
// memory (sender.cuh); the others multiply (consumer.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "blocks/grid_dependency.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/config.cuh"
#include "kernels/backward/consumer.cuh"
#include "kernels/backward/producer.cuh"
#include "kernels/backward/sender.cuh"

namespace flashattn3 {

// A type and not a row as argument, as for forward_attention.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_attention(const __grid_constant__ BackwardArguments args) {
  constexpr BackwardRow kRow = Config::kRow;
  extern __shared__ __align__(1024) uint8_t shared[];
  using Control = BackwardControlOf<kRow>;
  static_assert(sizeof(Control) <= kBackwardControlBytes);

  if (threadIdx.x == 0) reinterpret_cast<Control*>(shared)->init();
  // Sync: no thread touches a barrier before it is initialised.
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (warp > Config::kConsumers || !cute::elect_one_sync()) return;
    if (warp == 0) {
      cute::prefetch_tma_descriptor(&args.q);
      cute::prefetch_tma_descriptor(&args.k);
      cute::prefetch_tma_descriptor(&args.v);
      cute::prefetch_tma_descriptor(&args.dout);
      cute::prefetch_tma_descriptor(&args.statistics);
      // The others touch no memory of the device before this thread's loads have come.
      wait_for_earlier_kernels();
      allow_dependents();  // which find the states of the sums as the kernel before left them
      BackwardProducer<kRow>(args, shared).run();
    } else {
      wait_for_earlier_kernels();
      BackwardSender<kRow>(args, shared, warp - 1).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    BackwardConsumer<kRow>(args, shared, warpgroup).run();
  }
}

}  // namespace flashattn3
