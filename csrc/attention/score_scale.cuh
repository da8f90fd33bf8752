// Scores to softmax exponents in log2 units, with one factor for all of them; block_scale.cuh has
// those of quantized tensors.
#pragma once

#include <cstdint>

#include "ptx/approximations.cuh"

namespace flashattn3 {

// Converts the scores of a call to log2 units, with its softcap. The launch computes it once.
struct ScoreScale {
  float factor;      // of scores, after the softcap if there is one
  float tanh_scale;  // argument of tanh_of_scaled is score * tanh_scale; 0: no softcap
  // 8 bits: 1 / softcap in log2 units; `factor` is then of scores before the softcap. Else 0.
  float one_over_cap;

  static ScoreScale of(float softmax_scale, float softcap, bool quantized) {
    constexpr float kLog2e = 1.44269504088896f;
    // 2 sigmoid(tanh_scale * score) - 1 is the tanh. tanh_scale is 0 if the scores are all 0 or too
    // small for the softcap to matter.
    const float tanh_scale = softcap > 0.f ? 2.f * kLog2e * softmax_scale / softcap : 0.f;
    const float uncapped = softmax_scale * kLog2e, capped = softcap * kLog2e;
    if (tanh_scale == 0.f) return {uncapped, 0.f, 0.f};
    if (quantized) return {uncapped, tanh_scale, 1.f / capped};
    return {capped, tanh_scale, 0.f};
  }
  __device__ __forceinline__ bool caps() const { return tanh_scale != 0.f; }
};

struct UniformScale {
  float factor;
  __device__ __forceinline__ float exponent(float score, int, float row_max) const {
    return fmaf(score, factor, -row_max);
  }
};

// Returns tanh(x) for the argument 2 * log2(e) * x, with a relative error of 2e-6, which matters
// since a cap may be far above the scores. 1 - 2 / (1 + e^(2 x)) has an absolute error of about
// 1e-7; small x use the series.
__device__ __forceinline__ float tanh_of_scaled(float x) {
  constexpr float kUnit = 0.346573590f;  // ln(2) / 2
  constexpr float kThird = -kUnit * kUnit * kUnit / 3.f;
  constexpr float kFifth = -kThird * kUnit * kUnit * 0.4f;
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, kFifth, kThird), kUnit);
  const float reciprocal = reciprocal_approx(1.f + exp2_approx(x));
  return fabsf(x) < 0.5f ? series : fmaf(-2.f, reciprocal, 1.f);
}

// Scores become tanh(score / softcap), to which scale.factor applies.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], ScoreScale scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i % 8 == 0) __syncwarp();  // ptxas would start all at once and spill
    s[i] = tanh_of_scaled(s[i] * scale.tanh_scale);
  }
}

}  // namespace flashattn3
