// The forward kernel: one CTA on an SM, which takes tiles until none is left. The last warpgroup
// loads (producer.cuh; descales.cuh, tails.cuh), the others multiply (consumer.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "blocks/grid_dependency.cuh"
#include "blocks/row_sums.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"
#include "kernels/forward/consumer.cuh"
#include "kernels/forward/descales.cuh"
#include "kernels/forward/producer.cuh"
#include "kernels/forward/tails.cuh"

namespace flashattn3 {

// A type and not a row as argument: the host stub that nvcc 13.0 writes for a kernel with a struct
// as a value argument does not compile.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_attention(const __grid_constant__ ForwardArguments args) {
  constexpr ForwardRow kRow = Config::kRow;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(ForwardControlOf<kRow>) <= forward_control_bytes(kRow));

  auto& control = *reinterpret_cast<ForwardControlOf<kRow>*>(shared);
  if (threadIdx.x == 0) control.init(Config::kConsumerWarps, Config::kQuantized);
  if constexpr (Config::kQuantized) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      clear_weights<Config::kBlockN>(shared + Config::kVOffset + stage * Config::kVBytes +
                                     Config::kWeightsInV);
    }
    if constexpr (Config::kInteger) write_start(control.start);
  }
  // Sync: no thread touches a barrier before it is initialised.
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (warp == 0) {
      if (!cute::elect_one_sync()) return;
      cute::prefetch_tma_descriptor(&args.q);
      cute::prefetch_tma_descriptor(&args.k);
      cute::prefetch_tma_descriptor(&args.v);
      cute::prefetch_tma_descriptor(&args.out_map);
      // The consumers touch no memory of the device before this thread's loads have come.
      allow_dependents();
      wait_for_earlier_kernels();
      ForwardProducer<kRow>(args, shared).run();
    } else if (warp == 1) {
      if constexpr (Config::kQuantized) {
        wait_for_earlier_kernels();
        ForwardDescales<kRow>(args, shared).run();
      } else {
        ForwardTails<kRow>(args, shared).run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    ForwardConsumer<kRow>(args, shared, warpgroup).run();
  }
}

}  // namespace flashattn3
