// Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864) of the items of an append, in
// fp32, and division by a descale.
#pragma once

#include <cstdint>

#include "append/arguments.h"
#include "attention/rotary_angles.cuh"
#include "ptx/approximations.cuh"
#include "ptx/convert_16bit.cuh"

namespace flashattn3::append {

template <ElementType kElement>
__device__ __forceinline__ float to_float(uint16_t bits) {
  return unpack<kElement>(bits).x;
}
template <ElementType kElement>
__device__ __forceinline__ uint16_t from_float(float x) {
  return static_cast<uint16_t>(pack<kElement>(x, 0.f));
}

__device__ __forceinline__ float2 rotate(float x, float y, float cos, float sin) {
  return make_float2(x * cos - y * sin, x * sin + y * cos);
}

// A pair of neighbouring elements, divided by a descale.
template <ElementType kElement>
__device__ __forceinline__ uint32_t pack_divided(float low, float high, float descale) {
  if (descale != 1.f) low = divide(low, descale), high = divide(high, descale);
  return pack<kElement>(low, high);
}

template <ElementType kElement>
__device__ __forceinline__ void divide_vector(uint32_t (&words)[4], float descale) {
  if (descale == 1.f) return;
#pragma unroll
  for (uint32_t& word : words) {
    const float2 x = unpack<kElement>(word);
    word = pack_divided<kElement>(x.x, x.y, descale);
  }
}

// A vector of four pairs of columns.
template <ElementType kElement>
__device__ __forceinline__ void rotate_interleaved(const Angles<kElement, 4>& angles, float descale,
                                                   uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack<kElement>(words[i]);
    const float2 turned = rotate(x.x, x.y, angles.cos[i], angles.sin[i]);
    words[i] = pack_divided<kElement>(turned.x, turned.y, descale);
  }
}

// Eight pairs of columns, whose first columns are in one vector and the second in another.
template <ElementType kElement>
__device__ __forceinline__ void rotate_halves(const Angles<kElement, 8>& angles, float descale,
                                              uint32_t (&first)[4], uint32_t (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack<kElement>(first[i]), y = unpack<kElement>(second[i]);
    const float2 low = rotate(x.x, y.x, angles.cos[2 * i], angles.sin[2 * i]);
    const float2 high = rotate(x.y, y.y, angles.cos[2 * i + 1], angles.sin[2 * i + 1]);
    first[i] = pack_divided<kElement>(low.x, high.x, descale);
    second[i] = pack_divided<kElement>(low.y, high.y, descale);
  }
}

}  // namespace flashattn3::append
