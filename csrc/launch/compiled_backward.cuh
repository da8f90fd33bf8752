// One entry of the registry. Only the generated unit of each kernel config includes this file.
#pragma once

#include "launch/backward.cuh"
#include "launch/registry.h"

namespace flashattn3 {

template <backward::Config kConfig>
BackwardKernel compiled_backward(const char* name) {
  return {.info = {.name = name,
                   .dtype = kConfig.dtype,
                   .head_dim = kConfig.head_dim,
                   .kernel = reinterpret_cast<const void*>(backward_kernel<kConfig>()),
                   .num_threads = backward::num_threads(kConfig),
                   .shared_memory_bytes = backward::smem_bytes(kConfig)},
          .size = backward_size<kConfig>,
          .launch = launch_backward<kConfig>};
}

}  // namespace flashattn3
