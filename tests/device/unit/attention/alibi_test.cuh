// attention/alibi.cuh: the term of fragments, on both sides of the diagonal, against -slope *
// |distance|.
#pragma once

#include "../unit.cuh"
#include "attention/alibi.cuh"

namespace unit::alibi {

using namespace flashattn3;

constexpr int kN = 64, kCount = kN / 2;
constexpr float kFactor = 0.75f, kRowMax = 2.f;

// found: exponents of a warp's scores of 1 in a block that begins at first_key, by exact(), and by
// linear() unless the block is crossed, of which the last value tells.
__global__ void store_exponents(float slope, int position, int first_key, float* found) {
  Alibi<kN> term;
  term.set_slope(slope);
  term.set_rows(position);
  const UniformScale scale{kFactor};
  const DistanceScale exact = term.exact(scale, first_key);
  const LinearScale linear = term.linear(scale, first_key);
  for (int i = 0; i < kCount; ++i) {
    const int at = fragment_index<kN>(i);
    found[at] = exact.exponent(1.f, i, kRowMax);
    found[16 * kN + at] = term.is_crossed(first_key) ? found[at] : linear.exponent(1.f, i, kRowMax);
  }
  if (threadIdx.x == 0) found[32 * kN] = term.is_crossed(first_key);
}

inline void check_rows(Result& result) {
  for (const float slope : {0.25f, -0.5f, 0.f}) {
    for (const int position : {-100, 0, 15, 40, 63, 64, 500}) {
      const auto at = results_of<float>(32 * kN + 1, store_exponents, 1, 32, 0, slope, position, 0);
      result.equal(slope != 0.f && position < 63 && position > -15, at[32 * kN], "crossed");
      for (int i = 0; i < 16 * kN; ++i) {
        const int distance = std::abs(position + i / kN - i % kN);
        const double wanted = kFactor - kRowMax - static_cast<double>(slope) * distance;
        for (const int to : {0, 16 * kN}) {
          result.compare(wanted, at[to + i], 1e-4, "exponent", position, i);
        }
      }
    }
  }
}

static const Tests kTests = {{"attention/alibi: rows", Where::kGpu, check_rows}};

}  // namespace unit::alibi
