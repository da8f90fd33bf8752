// The kernel that runs before a varlen kernel.
#pragma once

#include <cuda_runtime.h>

#include "attention/tile_shape.h"
#include "launch/params.h"

namespace flashattn3 {

// Fills params.varlen_schedule for work tiles of queries and clears the rows of out and lse that
// belong to no sequence. Enqueues a kernel without waiting. Throws std::runtime_error.
// min_queries: sequences with fewer queries get no work tile. semaphore: set to 0, or null.
void launch_varlen_forward(const ForwardParams& params, const TileShape& shape, cudaStream_t stream,
                           int min_queries = 0, int32_t* semaphore = nullptr);

// Fills params.forward.varlen_schedule for tiles of block_n keys and clears the rows of dq, dk and
// dv that belong to no sequence. As above.
void launch_varlen_backward(const BackwardParams& params, int block_n, cudaStream_t stream);

}  // namespace flashattn3
