// Online softmax (Milakov and Gimelshein 2018) of 16-bit kernels, on the accumulator fragments of
// the scores, with lazy rescaling (FlashAttention-4).
//
// Probabilities are 2^(score - row_max). row_max is set kLift above the row's maximum and stays
// until a score passes it by kRescaleThreshold, which costs no precision: bf16 has fp32's range,
// and fp16 is exact enough up to 2^10. Only then does the softmax reduce the row's maximum, raise
// row_max, and rescale O and the sum. Every other step saves the exact maximum, its shuffles and
// one multiplication per element of O. (H100, main loop alone, d128 192x80: 760 TFLOP/s, against
// 676 with a running maximum.)
#pragma once

#include <cstdint>

#include "attention/softmax_state.cuh"
#include "ptx/element.h"
#include "tile/gemm.cuh"

namespace flashattn3 {

// Returns tanh(x) for the argument 2 * log2(e) * x, with a relative error of 2e-6, which matters
// since a cap may be far above the scores. 1 - 2 / (1 + e^(2 x)) has an absolute error of about
// 1e-7; small x use the series.
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

// Returns the maximum over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile.
template <ElementType kElement, int kN, bool kRowsMayBeEmpty>
struct OnlineSoftmax : SoftmaxState<kN, kRowsMayBeEmpty> {
  using Base = SoftmaxState<kN, kRowsMayBeEmpty>;
  using Base::kCount, Base::row_max, Base::sum, Base::unseen;
  // In log2 units. V in bf16 may reach fp32's largest number, so probabilities must not exceed 1:
  // O is then finite wherever a running maximum leaves it finite. V in fp16 is far below that, and
  // a lift would cost its probabilities bits.
  static constexpr float kLift = kElement == ElementType::kBFloat16 ? 10.f : 0.f;
  static constexpr float kRescaleThreshold = 10.f - kLift;
  static constexpr float kLargestSum =
      kElement == ElementType::kBFloat16 ? 1.f : 0x1p10f;  // 2^kRescaleThreshold

  // Raises row_max to kLift above the rows' maxima. s: score - row_max, on return relative to the
  // new row_max. factor: the caller multiplies O with it; the sums are rescaled here. All lanes of
  // the warp must call it.
  __device__ __forceinline__ void rescale(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest[r]) + kLift;
      // The sum and O of a row without a key so far are 0, so every finite factor is right. Its
      // first row_max may be below 0; afterwards row_max only rises.
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

  // Replaces s by 2^s and adds it to the sums.
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = exp2_approx(s[i]);
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) part[row_of(i)] += s[i];
    sum[0] += part[0];
    sum[1] += part[1];
  }

  // For tiles of which all rows see all keys: subtract_row_max and exponentiate in one pass; the
  // sums show whether row_max must rise. Returns true if a sum of the warp is too large or NaN: s
  // then holds no usable values, and the state is unchanged.
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

  // Packs probabilities as the A operand of the PV GEMM.
  static __device__ __forceinline__ void pack(Probabilities<kElement, kN>& p,
                                              const float (&s)[kCount]) {
    pack_probabilities<kElement, kN>(p, s);
  }

  // O and the sums hold 2^(score - row_max_log2).
  __device__ __forceinline__ float row_max_log2(int r) const { return row_max[r]; }
};

}  // namespace flashattn3
