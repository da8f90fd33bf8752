// Sinks: a logit without a value for each query head, one more term of the sum of each row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/row_stats.cuh"
#include "attention/score_term.h"

namespace flashattn3 {

// Elements as their user has them: a conversion would be a kernel of its own.
struct Sinks {
  const void* data;  // (num_heads_q); null: none
  SinkType type;

  __device__ __forceinline__ bool any() const { return data != nullptr; }
  // In natural units.
  __device__ __forceinline__ float at(int head) const {
    if (type == SinkType::kFloat32) return static_cast<const float*>(data)[head];
    const uint16_t bits = static_cast<const uint16_t*>(data)[head];
    if (type == SinkType::kBFloat16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    return __half2float(__ushort_as_half(bits));
  }
};

// Stores a gradient in the sinks' type.
__device__ __forceinline__ void store_sink(void* sinks, SinkType type, int head, float value) {
  if (type == SinkType::kFloat32) {
    static_cast<float*>(sinks)[head] = value;
  } else if (type == SinkType::kBFloat16) {
    static_cast<__nv_bfloat16*>(sinks)[head] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(sinks)[head] = __float2half_rn(value);
  }
}

}  // namespace flashattn3
