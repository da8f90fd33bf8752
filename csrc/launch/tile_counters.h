// Counters from which persistent CTAs draw work tiles (ForwardParams::tile_counter).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3 {

// Returns two int32 that belong to this device and stream alone and are zero between its launches.
// A stream that reuses the handle of a destroyed one has counters of its own. The first call for
// the pair allocates them; they are kept until the process ends.
//
// Returns null if launches on this stream may overlap: a graph that is being captured may later run
// beside another one captured here, and cudaStreamPerThread names the streams of many threads.
//
// The stream's device must be the current one.
int32_t* tile_counter(int device, cudaStream_t stream);

}  // namespace flashattn3
