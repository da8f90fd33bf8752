// One entry of the registry. Only the generated units of forward configs include this file.
#pragma once

#include "launch/forward.cuh"
#include "launch/registry.h"

namespace flashattn3 {

template <forward::Config kConfig>
ForwardKernel compiled_forward(const char* name) {
  return {.info = {.name = name,
                   .dtype = kConfig.dtype,
                   .head_dim = kConfig.head_dim,
                   .kernel = reinterpret_cast<const void*>(forward_kernel<kConfig>()),
                   .num_threads = forward::num_threads(kConfig),
                   .shared_memory_bytes = forward::KernelTraits<kConfig>::kSmemBytes},
          .size = forward_size<kConfig>,
          .launch = launch_forward<kConfig>};
}

}  // namespace flashattn3
