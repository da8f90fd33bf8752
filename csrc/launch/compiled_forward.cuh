// One entry of the registry. Only the generated unit of each kernel config includes this file.
#pragma once

#include "launch/forward.cuh"
#include "launch/registry.h"

namespace flashattn3 {

template <forward::Config kConfig>
ForwardKernel compiled_forward(const char* name) {
  return {.info = {.name = name,
                   .head_dim = kConfig.head_dim,
                   .kernel = forward_entry<kConfig>(),
                   .num_threads = forward::num_threads(kConfig),
                   .shared_memory_bytes = forward::smem_bytes(kConfig)},
          .launch = launch_forward<kConfig>,
          .promoted_bytes = promoted_bytes<kConfig>};
}

}  // namespace flashattn3
