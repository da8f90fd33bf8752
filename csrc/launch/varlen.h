// The kernel that goes before one over sequences of unequal lengths.
#pragma once

#include <cuda_runtime.h>

#include "launch/params.h"

namespace flashattn3 {

// Fills params.varlen_schedule for work tiles of block_m and clears the rows of out and lse that
// belong to no sequence. Enqueues; waits for nothing. Throws std::runtime_error.
void launch_varlen_forward(const ForwardParams& params, int block_m, cudaStream_t stream);

// Fills params.varlen_schedule for tiles of block_n keys. As above.
void launch_varlen_backward(const ForwardParams& params, int block_n, cudaStream_t stream);

}  // namespace flashattn3
