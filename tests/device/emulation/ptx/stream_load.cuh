// Emulation of csrc/ptx/stream_load.cuh.
#pragma once

#include <cuda_runtime.h>

#include "ptx/vector_access.cuh"

namespace flashattn3 {

struct StreamPolicy {
  uint4 load(const void* at) const { return load_vector<uint4>(at); }
  uint2 load_half(const void* at) const { return load_vector<uint2>(at); }
};

}  // namespace flashattn3
