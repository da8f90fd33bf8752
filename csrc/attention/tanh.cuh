// Capped scores and their tanh.
#pragma once

#include "ptx/approximations.cuh"

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
  const float reciprocal = reciprocal_approx(1.f + exp2_approx(x));
  return fabsf(x) < 0.5f ? series : fmaf(-2.f, reciprocal, 1.f);
}

// Scores become tanh(score / cap). tanh_scale: of ScoreScale (variant.cuh).
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], float tanh_scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i % 8 == 0) __syncwarp();  // ptxas would start all at once and spill
    s[i] = tanh_of_scaled(s[i] * tanh_scale);
  }
}

}  // namespace flashattn3
