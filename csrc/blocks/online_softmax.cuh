// Softmax over keys that come tile by tile, on the accumulator fragments of the scores.
//
// Probabilities are 2^(score - reference). The reference is the row's maximum when it is set and
// then stays: bf16 has fp32's range and fp16 is exact enough up to 2^10, so that scores may pass
// the reference by kLimit without loss. Only when one passes it further are the row's maximum
// taken, the reference raised, and out and the sum rescaled. In a step without growth that saves
// the exact maximum, its shuffles and one multiplication for each element of out. (H100, main loop
// alone, d128 192x80: 760 TFLOP/s against 676 with a running maximum.)
#pragma once

#include <cstdint>

#include "blocks/element.h"
#include "blocks/row_references.cuh"
#include "blocks/tile_product.cuh"

namespace flashattn3 {

// 1 - 2 / (1 + e^(2 x)) with x given as 2 * log2(e) * x: absolute error about 1e-7.
__device__ __forceinline__ float tanh_of_scaled(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exp2_approx(x)));
  return fmaf(-2.f, reciprocal, 1.f);
}

// Of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile.
template <ElementType kElement, int kN, bool kRowsMayBeEmpty>
struct OnlineSoftmax : RowReferences<kN, kRowsMayBeEmpty> {
  using Base = RowReferences<kN, kRowsMayBeEmpty>;
  using Base::kCount, Base::reference, Base::sum, Base::unseen;
  // Of exponents, log2 units. Far below bf16's 2^127, so that sums of 2^kLimit stay finite.
  static constexpr float kLimit = kElement == ElementType::kBFloat16 ? 40.f : 10.f;
  static constexpr float kLargestSum = kElement == ElementType::kBFloat16 ? 0x1p40f : 0x1p10f;

  // Raises the references to the rows' maxima. s: score - old reference, on return - new reference.
  // factor: what out has to be multiplied with. All lanes of the warp must call it.
  __device__ __forceinline__ void raise_reference(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest[r]);
      // A row without a key so far has sum and out 0: any factor but inf will do. It may start
      // below 0; later the reference only rises.
      const bool first = unseen >> r & 1;
      const float rise = !first ? fmaxf(top, 0.f) : top == -INFINITY ? 0.f : top;
      factor[r] = first ? 1.f : exp2_approx(-rise);
      if (top != -INFINITY) unseen &= ~(1u << r);
      reference[r] += rise;
      sum[r] *= factor[r];
      highest[r] = rise;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= highest[row_of(i)];
  }

  // s becomes 2^s and is added to the sums.
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = exp2_approx(s[i]);
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) part[row_of(i)] += s[i];
    sum[0] += part[0];
    sum[1] += part[1];
  }

  // For a tile of which all rows see all keys: subtract_reference and exponentiate in one, with
  // growth seen from the sums. Returns whether a sum of the warp is too large (or NaN); then s is
  // of no use, and the state is as before.
  template <class Scale>
  __device__ __forceinline__ bool exponentiate_at_once(float (&s)[kCount], const Scale& scale) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(scale.exponent(s[i], i, reference[row_of(i)]));
      part[row_of(i)] += s[i];
    }
    const bool all_fit = __all_sync(~0u, part[0] + part[1] < kLargestSum);
    if (all_fit) {
      sum[0] += part[0];
      sum[1] += part[1];
    }
    return !all_fit;
  }

  // Probabilities as operands.
  static __device__ __forceinline__ void pack(Probabilities<kElement, kN>& p,
                                              const float (&s)[kCount]) {
    pack_probabilities<kElement, kN>(p, s);
  }

  // Out and the sums are of 2^(score - this).
  __device__ __forceinline__ float exponent_reference(int r) const { return reference[r]; }
};

}  // namespace flashattn3
