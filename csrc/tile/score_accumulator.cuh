// The registers of scores, from WGMMA to the conversion of the probabilities.
//
// Products of floats are added up as floats. Those of int8 are added up as integers, from kInt8Bias
// (gemm_int8.cuh) on, so that none is negative: then the bits of a score are those of a denormal
// float, score * 2^-149, and one multiply-add makes of it a code (softmax_e4m3.cuh), a denormal
// too, whose bits are the code. No instruction converts. They stay integers for the compiler all
// the way: beside floats of the same bits ptxas (13.0) spills hundreds of bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/element.h"

namespace flashattn3 {

template <ElementType kElement>
using ScoreAccumulator = std::conditional_t<kElement == ElementType::kInt8, uint32_t, float>;

__device__ __forceinline__ float get(float score) { return score; }
__device__ __forceinline__ float get(uint32_t score) { return __uint_as_float(score); }
__device__ __forceinline__ void set(float& score, float value) { score = value; }
__device__ __forceinline__ void set(uint32_t& score, float value) {
  score = __float_as_uint(value);
}

// What an integer is as a float of the same bits, and the way back; 2^149 is no float.
constexpr float kDenormalUnit = 0x1p-149f;
__device__ __forceinline__ float from_denormal(float integer) {
  return integer * 0x1p100f * 0x1p49f;
}

}  // namespace flashattn3
