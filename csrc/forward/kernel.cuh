// The forward kernel: persistent, one CTA per SM. The last warpgroup is the producer (load.cuh),
// the others are consumers (consumer.cuh). kernel_fp8.cuh has the roles of 8-bit kernel configs,
// kernel_cached.cuh those of cached ones.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "forward/arguments.h"
#include "forward/consumer.cuh"
#include "forward/load.cuh"
#include "forward/mainloop.cuh"
#include "forward/traits.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::forward {

__device__ __forceinline__ void prefetch_descriptors(const Arguments& args) {
  cute::prefetch_tma_descriptor(&args.q);
  cute::prefetch_tma_descriptor(&args.k);
  cute::prefetch_tma_descriptor(&args.v);
  cute::prefetch_tma_descriptor(&args.out_map);
}

// The warps of the producer warpgroup, whose first warp has one thread.
template <Config kConfig, class SecondWarp>
__device__ __forceinline__ void run_producer_warp(const Arguments& args, uint8_t* shared,
                                                  int warp) {
  if (warp == 0) {
    if (!cute::elect_one_sync()) return;
    prefetch_descriptors(args);
    // The consumers access no device memory before this thread has published a work tile.
    launch_dependents();
    griddepcontrol_wait();
    Producer<kConfig>(args, shared).run();
  } else if (warp == 1) {
    SecondWarp(args, shared).run();
  }
}

// The roles of the warps of a CTA for 16-bit inputs.
template <Config kConfig>
struct Roles {
  using Traits = KernelTraits<kConfig>;
  using Storage = SharedStorageOf<kConfig>;
  using Mainloop = forward::Mainloop<kConfig>;
  using Arguments = forward::Arguments;

  // All threads call it before the CTA's first __syncthreads.
  static __device__ __forceinline__ void init(uint8_t*) {}

  // warp: of the producer warpgroup.
  static __device__ __forceinline__ void run_producer(const Arguments& args, uint8_t* shared,
                                                      int warp) {
    run_producer_warp<kConfig, ZeroFill<kConfig>>(args, shared, warp);
  }
};

// The template argument is a type, not a Config: the host stub that nvcc 13.0 generates for a
// kernel with a struct as a template value argument does not compile.
template <class Roles>
__global__ void __launch_bounds__(Roles::Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ typename Roles::Arguments args) {
  constexpr Config kConfig = Roles::Traits::kConfig;
  using Traits = typename Roles::Traits;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(typename Roles::Storage) <= shared_storage_bytes(kConfig));

  auto& storage = *reinterpret_cast<SharedStorageOf<kConfig>*>(shared);
  if (threadIdx.x == 0) storage.init(Traits::kConsumerWarps, Traits::kQuantized);
  Roles::init(shared);
  // Sync: no thread uses a barrier before it is initialised.
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    Roles::run_producer(args, shared, uniform(threadIdx.x % 128 / 32));
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<typename Roles::Mainloop>(args, shared, warpgroup).run();
  }
}

}  // namespace flashattn3::forward
