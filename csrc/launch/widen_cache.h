// Cached calls whose cache has 8 bits on a kernel that reads 16: the keys that the kernel reads are
// widened first, to a dense cache. All pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch/byte_decode_params.h"
#include "launch/registry.h"

namespace flashattn3 {

// Bytes that K and V of 16 bits may take. With more, the KV heads take turns, at least one at a
// time.
constexpr int64_t kWidenedBytes = int64_t{1} << 30;

// The number of KV heads that are widened at a time.
int widened_heads(const DecodeParams& params);
// Bytes of the 16-bit K and V of so many heads, at any lengths.
int64_t widened_bytes(const DecodeParams& params);

// Enqueues both kernels, for some heads after others, as DecodeKernel::launch. widened:
// widened_bytes, a multiple of 16, not initialised.
void launch_widened(const DecodeKernel& kernel, const ByteDecodeParams& params, void* widened,
                    cudaStream_t stream);

}  // namespace flashattn3
