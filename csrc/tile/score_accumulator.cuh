// The registers of the scores, from WGMMA to the conversion of the probabilities.
//
// WGMMA accumulates floats as floats and int8 as integers. Integer scores start from kInt8Bias
// (gemm_int8.cuh), so that none is negative. The bits of a score n are then those of the denormal
// float n * 2^-149, and one FMA turns it into a code (softmax_e4m3.cuh) that is a denormal too and
// whose bits are the code: no instruction converts. For the compiler these registers stay integers
// throughout: with floats of the same bits beside them ptxas (13.0) spills hundreds of bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/element.h"

namespace flashattn3 {

template <ElementType kElement>
using ScoreAccumulator = std::conditional_t<kElement == ElementType::kInt8, uint32_t, float>;

// A register's value as a float, which for integers is the denormal of the same bits.
__device__ __forceinline__ float get(float score) { return score; }
__device__ __forceinline__ float get(uint32_t score) { return __uint_as_float(score); }
__device__ __forceinline__ void set(float& score, float value) { score = value; }
__device__ __forceinline__ void set(uint32_t& score, float value) {
  score = __float_as_uint(value);
}

// The integer n has the bits of the denormal n * kDenormalUnit. from_denormal converts that back
// to n, in two products since 2^149 is not a float.
constexpr float kDenormalUnit = 0x1p-149f;
__device__ __forceinline__ float from_denormal(float integer) {
  return integer * 0x1p100f * 0x1p49f;
}

}  // namespace flashattn3
