// Cosines and sines of rotary position embedding (Su et al., RoFormer, arXiv 2104.09864), loaded
// from tables. A kernel says what pairs of columns they turn.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/convert_16bit.cuh"
#include "ptx/element.h"
#include "ptx/vector_access.cuh"

namespace flashattn3 {

// cos and sin, (positions, half), fp32 or the type of q, k and v.
struct RotaryTables {
  const void *cos, *sin;
  int64_t stride;  // between positions, of both
  int num_positions;
  bool is_fp32;
  bool interleaved;  // pairs are columns (2i, 2i + 1); else (i, i + half)
};

constexpr int kNoPosition = -1;  // the tables lack it: angles are NaN

// Element `at` of a table.
template <ElementType kElement>
__device__ __forceinline__ float load_angle(const void* table, bool is_fp32, int64_t at) {
  if (is_fp32) return static_cast<const float*>(table)[at];
  return unpack<kElement>(static_cast<const uint16_t*>(table)[at]).x;
}

// Four elements of a table, from `at` on, a multiple of four.
template <ElementType kElement>
__device__ __forceinline__ void load_four(const void* table, bool is_fp32, int64_t at, float* x) {
  if (is_fp32) {
    const float4 all = load_vector<float4>(static_cast<const float*>(table) + at);
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  } else {
    const uint2 all = load_vector<uint2>(static_cast<const uint16_t*>(table) + at);
    const float2 low = unpack<kElement>(all.x), high = unpack<kElement>(all.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
}

// cos and sin of neighbouring pairs of columns.
template <ElementType kElement, int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];

  // pair: the first one. position: kNoPosition: NaN.
  __device__ __forceinline__ void load(const RotaryTables& tables, int position, int pair) {
    if (position == kNoPosition) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) cos[i] = sin[i] = NAN;
      return;
    }
    const int64_t at = position * tables.stride + pair;
    if constexpr (kPairs == 1) {
      cos[0] = load_angle<kElement>(tables.cos, tables.is_fp32, at);
      sin[0] = load_angle<kElement>(tables.sin, tables.is_fp32, at);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i += 4) {
        load_four<kElement>(tables.cos, tables.is_fp32, at + i, cos + i);
        load_four<kElement>(tables.sin, tables.is_fp32, at + i, sin + i);
      }
    }
  }
};

}  // namespace flashattn3
