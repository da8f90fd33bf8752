// Counters from which persistent CTAs draw work tiles (ForwardParams::tile_counter).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3 {

// Returns two int32 that belong to this device and stream alone and are zero between its launches.
// A stream that reuses the handle of a destroyed one has counters of its own. The first call for
// the pair allocates them; they are kept until the process ends.
//
// Returns null for cudaStreamPerThread, which names the streams of many threads. The stream must
// not be captured: its graph may later run beside another one that was captured on it.
//
// The stream's device must be the current one.
int32_t* tile_counter(int device, cudaStream_t stream);

}  // namespace flashattn3
