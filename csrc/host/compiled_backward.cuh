// One entry of the registry. Included by the generated unit of each row, and by nothing else.
#pragma once

#include "host/kernel_registry.h"
#include "host/launch_backward.cuh"

namespace flashattn3 {

template <BackwardRow kRow>
BackwardKernel compiled_backward(const char* name) {
  return {.info = {.name = name,
                   .head_dim = kRow.head_dim,
                   .kernel = reinterpret_cast<const void*>(backward_kernel<kRow>()),
                   .num_threads = backward_num_threads(kRow),
                   .shared_memory_bytes = backward_shared_bytes(kRow)},
          .launch = launch_backward<kRow>,
          .workspace_bytes = backward_workspace_bytes<kRow>};
}

}  // namespace flashattn3
