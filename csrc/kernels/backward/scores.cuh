// From scores to probabilities and on to dS, on accumulator fragments of keys x queries, whose
// columns have a statistic each.
#pragma once

#include "blocks/online_softmax.cuh"

namespace flashattn3 {

// Where the statistic of row `row` of a block of 64 lies: those of a thread's columns are
// neighbours. Loads of shared memory are dear beside WGMMA, and so they are few.
__device__ __forceinline__ int statistic_place(int row) {
  return row % 8 / 2 * 16 + row / 8 * 2 + row % 2;
}

// The statistic of each accumulator's column. statistic: of the fragment's first column, in shared
// memory, in the order above.
template <int kCount>
__device__ __forceinline__ void load_statistic(float (&s)[kCount], const float* statistic) {
  const float4* mine = reinterpret_cast<const float4*>(statistic + threadIdx.x % 4 * 16);
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    const float4 four = mine[i / 8];  // two columns, and two that are 8 on
    s[i] = s[i + 2] = four.x, s[i + 1] = s[i + 3] = four.y;
    s[i + 4] = s[i + 6] = four.z, s[i + 5] = s[i + 7] = four.w;
  }
}

// Scores become 2^(score * score_scale - lse); tanh_scale: blocks/score_scale.cuh, 0: no cap.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&s)[kCount], const float* lse,
                                             float score_scale, float tanh_scale) {
  if (tanh_scale != 0.f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = tanh_of_scaled(s[i] * tanh_scale);
  }
  float of_column[kCount];
  load_statistic(of_column, lse);
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = exp2_approx(fmaf(s[i], score_scale, -of_column[i]));
}

// With a cap: probabilities times 1 - tanh^2, the tanh found again from them.
template <int kCount>
__device__ __forceinline__ void differentiate_cap(float (&p)[kCount], const float* lse,
                                                  float score_scale) {
  float of_column[kCount];
  load_statistic(of_column, lse);
  const float inverse = 1.f / score_scale;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float tanh = (__log2f(p[i]) + of_column[i]) * inverse;
    p[i] = p[i] == 0.f ? 0.f : p[i] * (1.f - tanh * tanh);
  }
}

}  // namespace flashattn3
