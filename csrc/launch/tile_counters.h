// Counters in device memory that launches of a stream share: tile counters, from which persistent
// CTAs draw work tiles (ForwardParams::tile_counter), and those of cached calls
// (DecodeParams::counters), by which the CTAs of a decode launch find the last one to arrive.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3 {

// Returns two int32 that belong to this device and stream alone and are zero between its launches.
// A stream that reuses the handle of a destroyed one has counters of its own. The first call for
// the pair allocates them; they are kept until the process ends.
//
// A captured stream gets counters of the capture: its launches run one after the other in every
// replay, and no other graph has these counters. The first call of a capture waits for a stream of
// its own that sets them to zero.
//
// Returns null for cudaStreamPerThread, which names the streams of many threads.
//
// The stream's device must be the current one.
int32_t* tile_counter(int device, cudaStream_t stream);

// The same for launches of cached calls on num_ctas, which is at most the number of SMs:
// kPartialCountersPerSm uint32 for each SM, of which a launch uses the first
// LaunchSize::num_counters.
uint32_t* partial_counters(int device, cudaStream_t stream, int num_counters);

}  // namespace flashattn3
