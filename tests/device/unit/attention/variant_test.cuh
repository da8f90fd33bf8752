// attention/variant.cuh: the factors of scores with and without a softcap.
#pragma once

#include "../unit.cuh"
#include "attention/variant.cuh"
#include "launch/score_scale.h"

namespace unit::variant {

using namespace flashattn3;

constexpr float kLog2E = 1.44269504f;

// The factors give softcap * tanh(score * softmax_scale / softcap), in log2 units; without a
// softcap, and where it is too far above the scores to matter, score * softmax_scale.
inline void check_record(Result& result) {
  for (const float softmax_scale : {0.125f, -0.3f, 0.f}) {
    for (const float softcap : {0.f, 0.5f, 30.f, 1e30f}) {
      const ScoreScale plain = score_scale_of(softmax_scale, softcap, false);
      const ScoreScale quantized = score_scale_of(softmax_scale, softcap, true);
      const double uncapped = static_cast<double>(softmax_scale) * kLog2E;
      const double tanh_scale = softcap == 0.f ? 0. : 2. * uncapped / softcap;
      const bool caps = static_cast<float>(tanh_scale) != 0.f;
      const double cap = static_cast<double>(softcap) * kLog2E;
      const auto compare = [&](double wanted, float found, const char* name) {
        result.compare(wanted, found, std::abs(wanted) * 1e-6, name, softmax_scale < 0,
                       softcap > 1);
      };
      compare(caps ? cap : uncapped, plain.factor, "factor");
      compare(uncapped, quantized.factor, "factor, 8 bits");
      compare(tanh_scale, plain.tanh_scale, "tanh_scale");
      compare(tanh_scale, quantized.tanh_scale, "tanh_scale, 8 bits");
      compare(0., plain.one_over_cap, "one_over_cap");
      compare(caps ? 1. / cap : 0., quantized.one_over_cap, "one_over_cap, 8 bits");
    }
  }
}

static const Tests kTests = {{"attention/variant: record", Where::kHost, check_record}};

}  // namespace unit::variant
