// The kernel that goes before one over sequences of unequal lengths.
#pragma once

#include <cuda_runtime.h>

#include "host/params.h"

namespace flashattn3 {

// Fills params.ragged_order for row tiles of block_m and clears the rows of out and lse that belong
// to no sequence. Enqueues; waits for nothing. Throws std::runtime_error.
void prepare_ragged_forward(const ForwardParams& params, int block_m, cudaStream_t stream);

// Fills params.ragged_order for tiles of block_n keys. As above.
void order_ragged_keys(const ForwardParams& params, int block_n, cudaStream_t stream);

}  // namespace flashattn3
