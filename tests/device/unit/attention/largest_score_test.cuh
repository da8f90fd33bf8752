// attention/largest_score.cuh: the largest score of a warp's rows, from probabilities relative to
// several maxima.
#pragma once

#include <algorithm>

#include "../unit.cuh"
#include "attention/largest_score.cuh"

namespace unit::largest_score {

using namespace flashattn3;

constexpr int kN = 64, kCount = kN / 2;

// scores: 16 x kN in log2 units. of_head: in natural units. above: whether sums that are far below,
// and sums of a score above all others, may hide a larger one.
__global__ void take(const float* scores, int num_rows, float* of_head, float* above) {
  float p[kCount];
  const float row_max[2] = {3.f, -2.f};
  for (int i = 0; i < kCount; ++i) {
    p[i] = exp2f(scores[fragment_index<kN>(i)] - row_max[row_of(i)]);
  }
  LargestScore largest;
  largest.begin_tile(*of_head);
  largest.take(p, row_max, of_head, num_rows, 1e30f);
  if (threadIdx.x > 0) return;
  const float known = *of_head * 1.44269504f;
  const float low[2] = {exp2f(known - 1.f - row_max[0]), exp2f(known - 1.f - row_max[1])};
  const float high[2] = {low[0], exp2f(known + 0.01f - row_max[1])};
  above[0] = largest.is_above(low), above[1] = largest.is_above(high);
}

inline void check_take(Result& result) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const float shift : {0.f, -30.f, 20.f}) {
    for (const float known : {-INFINITY, -1.f, 40.f}) {
      std::vector<float> scores(16 * kN);
      for (float& x : scores) x = shift + normal(random);
      scores[3] = scores[70] = -INFINITY;  // masked
      scores[15 * kN] = 1000.f;            // of a row that does not exist
      Array<float> given(scores), of_head(std::vector<float>{known}), above(2);
      launch(take, 1, 32, 0, given.device(), 15, of_head.device(), above.device());
      const float largest = *std::max_element(scores.begin(), scores.end() - kN);
      const double wanted = std::max<double>(known, largest * 0.6931471805599453);
      const float found = of_head.download()[0];
      result.compare(wanted, found, 1e-5 * std::abs(wanted) + 1e-6, "largest", shift, known > 0);
      result.equal(1., above.download()[0], "sums below it are above none", shift);
      result.equal(0., above.download()[1], "a larger sum may be", shift);
    }
  }
}

static const Tests kTests = {{"attention/largest_score: take", Where::kGpu, check_take}};

}  // namespace unit::largest_score
