// Softmax over keys that come tile by tile, on the accumulator fragments of the scores.
//
// Probabilities are 2^(score - reference). The reference is kLift above the row's maximum when it
// is set and then stays until a score passes it by kRescaleThreshold, which costs no precision:
// bf16 has fp32's range and fp16 is exact enough up to 2^10. Only then are the row's maximum taken,
// the reference raised, and out and the sum rescaled. In a step without growth that saves the exact
// maximum, its shuffles and one multiplication for each element of out. (H100, main loop alone,
// d128 192x80: 760 TFLOP/s against 676 with a running maximum.)
#pragma once

#include <cstdint>

#include "attention/softmax_state.cuh"
#include "ptx/element.h"
#include "tile/gemm.cuh"

namespace flashattn3 {

// tanh(x) with x given as 2 * log2(e) * x, to a relative 2e-6, since a cap may be far above the
// scores. 1 - 2 / (1 + e^(2 x)) has an absolute error about 1e-7; small x take the series.
__device__ __forceinline__ float tanh_of_scaled(float x) {
  constexpr float kUnit = 0.346573590f;  // ln(2) / 2
  constexpr float kThird = -kUnit * kUnit * kUnit / 3.f;
  constexpr float kFifth = -kThird * kUnit * kUnit * 0.4f;
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, kFifth, kThird), kUnit);
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exp2_approx(x)));
  return fabsf(x) < 0.5f ? series : fmaf(-2.f, reciprocal, 1.f);
}

// Of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile.
template <ElementType kElement, int kN, bool kRowsMayBeEmpty>
struct OnlineSoftmax : SoftmaxState<kN, kRowsMayBeEmpty> {
  using Base = SoftmaxState<kN, kRowsMayBeEmpty>;
  using Base::kCount, Base::row_max, Base::sum, Base::unseen;
  // Log2 units. Values of bf16 go up to fp32's largest number, so its probabilities may not pass 1:
  // out is then finite wherever a running maximum leaves it finite. Those of fp16 are far below,
  // and its probabilities would lose bits to a lift.
  static constexpr float kLift = kElement == ElementType::kBFloat16 ? 10.f : 0.f;
  static constexpr float kRescaleThreshold = 10.f - kLift;
  static constexpr float kLargestSum =
      kElement == ElementType::kBFloat16 ? 1.f : 0x1p10f;  // of 2^kRescaleThreshold

  // Raises the references to kLift above the rows' maxima. s: score - old reference, on return -
  // new reference. factor: what out has to be multiplied with. All lanes of the warp must call it.
  __device__ __forceinline__ void rescale(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest[r]) + kLift;
      // A row without a key so far has sum and out 0: any factor but inf will do. It may start
      // below 0; later the reference only rises.
      const bool first = unseen >> r & 1;
      const float rise = !first ? fmaxf(top, 0.f) : top == -INFINITY ? 0.f : top;
      factor[r] = first ? 1.f : exp2_approx(-rise);
      if (top != -INFINITY) unseen &= ~(1u << r);
      row_max[r] += rise;
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

  // For a tile of which all rows see all keys: subtract_row_max and exponentiate in one, with
  // growth seen from the sums. Returns whether a sum of the warp is too large (or NaN); then s is
  // of no use, and the state is as before.
  template <class Scale>
  __device__ __forceinline__ bool exponentiate_at_once(float (&s)[kCount], const Scale& scale) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(scale.exponent(s[i], i, row_max[row_of(i)]));
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
  __device__ __forceinline__ float row_max_log2(int r) const { return row_max[r]; }
};

}  // namespace flashattn3
