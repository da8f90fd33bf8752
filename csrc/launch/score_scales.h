// The factors of the scores that the kernels receive.
#pragma once

namespace flashattn3 {

// Factors that convert scores to log2 units. Softcap's tanh is 2 sigmoid(tanh * score) - 1.
struct ScoreScales {
  float score, tanh;  // tanh 0: no cap
};
constexpr float kLog2e = 1.44269504088896f;
inline ScoreScales score_scales(float softmax_scale, float softcap) {
  // tanh is 0 if the scores are all 0 or too small for the cap to matter.
  const float tanh = softcap > 0.f ? 2.f * kLog2e * softmax_scale / softcap : 0.f;
  return {(tanh != 0.f ? softcap : softmax_scale) * kLog2e, tanh};
}

}  // namespace flashattn3
