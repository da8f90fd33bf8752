// Device memory that the launches of a stream share: tile counters, from which persistent CTAs draw
// work tiles (ForwardParams::tile_counter), counters of cached calls (DecodeParams::counters), and
// the parts that the CTAs of a warp kernel give each other (DecodeParams::part_memory).
//
// Each function returns memory that belongs to this device and stream alone. A stream that reuses
// the handle of a destroyed one has memory of its own. The first call for the pair allocates and
// sets it; it is kept until the process ends, since each launch leaves it as it found it.
//
// A captured stream gets memory of the capture: its launches run one after the other in every
// replay, and no other graph has this memory. The first call of a capture waits for a stream of its
// own that sets the memory. Captures keep up to 128 MB of each kind until the process ends. The
// memory of further ones serves later captures when the graph, and all that were instantiated from
// it, are destroyed; a replay of such a graph takes 1.6 us longer (H100).
//
// The result is null for cudaStreamPerThread, which names the streams of many threads. The stream's
// device must be the current one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3 {

// Two int32 that are zero between launches.
int32_t* tile_counter(int device, cudaStream_t stream);

// kPartialCountersPerSm uint32 for each SM, zero between launches, of which a launch uses the first
// num_counters, LaunchSize::num_counters.
uint32_t* partial_counters(int device, cudaStream_t stream, int num_counters);

// decode::PartMemory of so many bytes, 0.1 to 1.5 MB. Each size has memory of its own.
void* part_memory(int device, cudaStream_t stream, int64_t bytes);

// Makes new memory decode::PartMemory, in the order of the stream.
void set_part_memory(void* memory, size_t bytes, cudaStream_t stream);

}  // namespace flashattn3
