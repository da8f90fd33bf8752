// The counters by which persistent CTAs take their tiles (ForwardParams::tile_counter).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3 {

// Two int32 that are zero between the launches of this device and stream, and of no other; a stream
// that is given the handle of a destroyed one is another. Allocated at the first call for the pair
// and kept until the process ends.
//
// Null where launches may overlap although they name the same stream: a graph that is being
// captured may later run beside another one captured here, and cudaStreamPerThread is one name for
// the streams of many threads.
//
// The stream's device must be the current one.
int32_t* tile_counter(int device, cudaStream_t stream);

}  // namespace flashattn3
