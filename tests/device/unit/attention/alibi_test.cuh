// attention/alibi.cuh and backward/transposed_alibi.cuh: the term of forward and transposed
// fragments, on both sides of the diagonal, against -slope * |distance|.
#pragma once

#include "../unit.cuh"
#include "attention/alibi.cuh"
#include "backward/transposed_alibi.cuh"

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

// The same for 16 keys from key 0 on and kN queries, the first of them at `position`: of(), and the
// sum of its parts unless the block is crossed.
__global__ void store_transposed(float slope, int position, bool right, float* found) {
  const backward::TransposedAlibi<kN> term(slope, position, 0, thread_column(threadIdx.x), right);
  for (int i = 0; i < kCount; ++i) {
    const int at = fragment_index<kN>(i);
    found[at] = term.of(i);
    const float sum = term.of_row(row_of(i)) + term.of_column(i);
    found[16 * kN + at] = term.is_crossed() ? found[at] : sum;
  }
  if (threadIdx.x == 0) found[32 * kN] = term.is_crossed();
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

// With right = false the distances of keys behind their query are of another sign: they are masked.
inline void check_keys(Result& result) {
  for (const bool right : {false, true}) {
    for (const int position : {-200, -64, -62, 0, 14, 15, 300}) {
      const auto at =
          results_of<float>(32 * kN + 1, store_transposed, 1, 32, 0, 0.25f, position, right);
      result.equal(right && position < 15 && position > -63, at[32 * kN], "crossed", position);
      for (int i = 0; i < 16 * kN; ++i) {
        const int distance = position + i % kN - i / kN;
        const double wanted = -0.25 * (right ? std::abs(distance) : distance);
        for (const int to : {0, 16 * kN}) {
          result.compare(wanted, at[to + i], 1e-4, "term", position, i);
        }
      }
    }
  }
}

static const Tests kTests = {{"attention/alibi: rows", Where::kGpu, check_rows},
                             {"attention/alibi: keys", Where::kGpu, check_keys}};

}  // namespace unit::alibi
