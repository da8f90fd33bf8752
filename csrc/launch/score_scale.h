// The ScoreScale of a call.
#pragma once

#include "attention/variant.cuh"

namespace flashattn3 {

inline ScoreScale score_scale_of(float softmax_scale, float softcap, bool quantized) {
  constexpr float kLog2e = 1.44269504088896f;
  // 2 sigmoid(tanh_scale * score) - 1 is the tanh. tanh_scale is 0 if the scores are all 0 or too
  // small for the softcap to matter.
  const float tanh_scale = softcap > 0.f ? 2.f * kLog2e * softmax_scale / softcap : 0.f;
  const float uncapped = softmax_scale * kLog2e, capped = softcap * kLog2e;
  if (tanh_scale == 0.f) return {uncapped, 0.f, 0.f};
  if (quantized) return {uncapped, tanh_scale, 1.f / capped};
  return {capped, tanh_scale, 0.f};
}

// problem: AttentionProblem or CachedProblem.
template <class Problem>
ScoreScale score_scale_of(const Problem& problem, bool quantized) {
  return score_scale_of(problem.softmax_scale, problem.softcap, quantized);
}

}  // namespace flashattn3
