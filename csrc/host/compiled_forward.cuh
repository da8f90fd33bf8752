// One entry of the registry. Included by the generated unit of each row, and by nothing else.
#pragma once

#include "host/kernel_registry.h"
#include "host/launch_forward.cuh"

namespace flashattn3 {

template <ForwardRow kRow>
ForwardKernel compiled_forward(const char* name) {
  return {.info = {.name = name,
                   .head_dim = kRow.head_dim,
                   .kernel = forward_entry<kRow>(),
                   .num_threads = forward_num_threads(kRow),
                   .shared_memory_bytes = forward_shared_bytes(kRow)},
          .launch = launch_forward<kRow>,
          .promoted_bytes = promoted_bytes<kRow>};
}

}  // namespace flashattn3
