// Emulation of the functions of csrc/attention/score_scale.cuh that decode uses.
#pragma once

#include <cmath>

namespace flashattn3 {

template <class S, int kCount>
void cap_scores(S (&s)[kCount], float tanh_scale) {
  constexpr float kUnit = 0.346573590f;  // ln(2) / 2
  for (S& x : s) x = std::tanh(x * tanh_scale * kUnit);
}

}  // namespace flashattn3
