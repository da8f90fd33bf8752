// attention/rotary_angles.cuh: the angles of a position, one by one and in vectors, from tables of
// 16 and of 32 bits, and those of no position.
#pragma once

#include "../unit.cuh"
#include "attention/rotary_angles.cuh"

namespace unit::rotary_angles {

using namespace flashattn3;

constexpr int kPositions = 5, kHalf = 12;

template <int kPairs>
__device__ void store(const RotaryTables& tables, int position, float* found) {
  Angles<ElementType::kBFloat16, kPairs> angles;
  for (int pair = 0; pair + kPairs <= kHalf; pair += kPairs) {
    angles.load(tables, position, pair);
    for (int i = 0; i < kPairs; ++i) {
      found[pair + i] = angles.cos[i];
      found[kHalf + pair + i] = angles.sin[i];
    }
  }
}

__global__ void store_angles(RotaryTables tables, int position, float* found) {
  store<1>(tables, position, found);
  store<4>(tables, position, found + 2 * kHalf);
}

inline void check_angles(Result& result) {
  std::vector<float> cos(kPositions * kHalf), sin(cos.size());
  for (int i = 0; i < kPositions * kHalf; ++i) cos[i] = i * 0.5f - 7.f, sin[i] = 64.f - i;
  for (const bool wide : {true, false}) {
    std::vector<float> given[] = {cos, sin};
    for (std::vector<float>& table : given) {
      auto* const narrow = reinterpret_cast<uint16_t*>(table.data());
      for (size_t i = 0; i < table.size() && !wide; ++i) narrow[i] = to_bits(table[i], false);
    }
    Array<float> of_cos(given[0]), of_sin(given[1]);
    const RotaryTables tables{of_cos.device(), of_sin.device(), kHalf, kPositions, wide, false};
    for (const int position : {0, 3, kNoPosition}) {
      const auto at = results_of<float>(4 * kHalf, store_angles, 1, 1, 0, tables, position);
      for (int i = 0; i < 2 * kHalf; ++i) {
        const int pair = i % kHalf, row = position * kHalf + pair;
        const float of_cos = position == kNoPosition ? NAN : cos[row];
        const float of_sin = position == kNoPosition ? NAN : sin[row];
        result.equal(of_cos, at[i / kHalf * 2 * kHalf + pair], "cos", position, pair);
        result.equal(of_sin, at[i / kHalf * 2 * kHalf + kHalf + pair], "sin", position, pair);
      }
    }
  }
}

static const Tests kTests = {{"attention/rotary_angles: tables", Where::kGpu, check_angles}};

}  // namespace unit::rotary_angles
