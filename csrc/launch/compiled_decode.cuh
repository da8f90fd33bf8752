// One entry of the registry. Only the generated unit of each kernel config includes this file.
#pragma once

#include "launch/decode.cuh"
#include "launch/registry.h"

namespace flashattn3 {

template <decode::Config kConfig>
DecodeKernel compiled_decode(const char* name) {
  return {.info = {.name = name,
                   .dtype = kConfig.dtype,
                   .head_dim = kConfig.head_dim,
                   .kernel = reinterpret_cast<const void*>(decode_kernel<kConfig>()),
                   .num_threads = decode::num_threads(kConfig),
                   .shared_memory_bytes = decode::smem_bytes(kConfig)},
          .size = decode_size<kConfig>,
          .launch = launch_decode<kConfig>,
          .clears_rows = false};
}

}  // namespace flashattn3
