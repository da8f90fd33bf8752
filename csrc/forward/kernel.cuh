// The forward kernel: persistent, one CTA per SM. The last warpgroup is the producer (load.cuh,
// load_descales.cuh, zero_fill.cuh), the others are consumers (consumer.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "forward/arguments.h"
#include "forward/consumer.cuh"
#include "forward/load.cuh"
#include "forward/load_descales.cuh"
#include "forward/traits.cuh"
#include "forward/zero_fill.cuh"
#include "ptx/pdl.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

// The template argument is a type, not a Config: the host stub that nvcc 13.0 generates for a
// kernel with a struct as a template value argument does not compile.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ Arguments args) {
  constexpr Config kConfig = Traits::kConfig;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(SharedStorageOf<kConfig>) <= shared_storage_bytes(kConfig));

  auto& storage = *reinterpret_cast<SharedStorageOf<kConfig>*>(shared);
  if (threadIdx.x == 0) storage.init(Traits::kConsumerWarps, Traits::kQuantized);
  if constexpr (Traits::kQuantized) {
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      zero_row_sum_columns<Traits::kBlockN>(shared + Traits::kVOffset + stage * Traits::kVBytes +
                                            Traits::kRowSumOffset);
    }
    if constexpr (Traits::kInteger) write_bias_tile(storage.bias_tile);
  }
  // Sync: no thread uses a barrier before it is initialised.
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (warp == 0) {
      if (!cute::elect_one_sync()) return;
      cute::prefetch_tma_descriptor(&args.q);
      cute::prefetch_tma_descriptor(&args.k);
      cute::prefetch_tma_descriptor(&args.v);
      cute::prefetch_tma_descriptor(&args.out_map);
      // The consumers access no device memory before this thread has published a work tile.
      launch_dependents();
      griddepcontrol_wait();
      Producer<kConfig>(args, shared).run();
    } else if (warp == 1) {
      if constexpr (Traits::kQuantized) {
        griddepcontrol_wait();
        DescaleLoader<kConfig>(args, shared).run();
      } else {
        ZeroFill<kConfig>(args, shared).run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<kConfig>(args, shared, warpgroup).run();
  }
}

}  // namespace flashattn3::forward
