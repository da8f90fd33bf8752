// The decode kernel: attention of few query rows to a cache. Each CTA takes an equal share of the
// KV blocks of the batch (work_share.cuh). Its consumer warpgroups (consumer.cuh) multiply each
// part with the same 64 packed rows, two of them in turn; the last warpgroup copies (load.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "decode/arguments.h"
#include "decode/consumer.cuh"
#include "decode/find_share.cuh"
#include "decode/load.cuh"
#include "decode/load_bytes.cuh"
#include "decode/traits.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::decode {

template <class Traits>
__device__ __forceinline__ void decode(const Arguments& args) {
  constexpr Config kConfig = Traits::kConfig;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(SharedStorageOf<kConfig>) <= kSharedStorageBytes);

  auto& storage = *reinterpret_cast<SharedStorageOf<kConfig>*>(shared);
  if (threadIdx.x == 0) storage.init();
  launch_dependents();
  griddepcontrol_wait();  // every thread reads lengths that a kernel before may write
  // Sync: find_share has CTA barriers, so no thread uses an mbarrier before it is initialised.
  find_share<Traits::kBlockN, span_step(kConfig), kConfig.prefix>(args, storage);

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if constexpr (Traits::kHasBytes) {
      WideningProducer<kConfig>(args, shared).run();
    } else {
      Producer<kConfig>(args, shared).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<kConfig>(args, shared, warpgroup).run();
  }
}

// The template argument is a type, not a Config: see forward/kernel.cuh.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    decode_kernel(const __grid_constant__ typename Traits::Arguments args) {
  if constexpr (Traits::kPlain) {
    decode<Traits>(plain<Traits::kHeadDim>(args));
  } else {
    decode<Traits>(args);
  }
}

}  // namespace flashattn3::decode
