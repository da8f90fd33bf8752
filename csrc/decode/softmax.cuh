// Online softmax (Milakov and Gimelshein 2018) of decode, with the exact running maximum of each
// row. The forward's lazy rescaling saves instructions, but a row's bits then depend on the other
// rows of its warp; decode waits for memory, and here a row depends on its own scores alone.
#pragma once

#include <cstdint>

#include "attention/row_stats.cuh"
#include "attention/softmax.cuh"
#include "ptx/approximations.cuh"
#include "tile/fragment.h"

namespace flashattn3::decode {

// Adds values relative to their rows' maxima to a sum of four columns of a row, whose statistics
// are `all`. stats: (max, sum) of each.
template <int kCount>
__device__ __forceinline__ void add_results(const float4 (&value)[kCount],
                                            const float2 (&stats)[kCount], float4& sum,
                                            RowStats& all) {
  float max = all.max;
#pragma unroll
  for (int k = 0; k < kCount; ++k) max = fmaxf(max, stats[k].x);
  const float before = rescale_factor(all.max, max);
  all = {max, all.sum * before};
  sum = make_float4(sum.x * before, sum.y * before, sum.z * before, sum.w * before);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float factor = rescale_factor(stats[k].x, max);
    all.sum += stats[k].y * factor;
    sum.x += value[k].x * factor;
    sum.y += value[k].y * factor;
    sum.z += value[k].z * factor;
    sum.w += value[k].w * factor;
  }
}

// A thread's two rows; four lanes share a row.
template <int kBlockN>
struct RowSoftmax {
  static constexpr int kCount = kBlockN / 2;
  RowStats row[2];  // sum: over this thread's columns

  __device__ __forceinline__ void reset() { row[0] = row[1] = {-INFINITY, 0.f}; }

  // Replaces scores in log2 units by probabilities. factor: the caller multiplies O with it.
  __device__ __forceinline__ void update(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {row[0].max, row[1].max};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
    float reference[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = quad_max(highest[r]);
      reference[r] = reference_of(highest[r]);
      factor[r] = rescale_factor(row[r].max, highest[r]);
      row[r].max = highest[r];
      row[r].sum *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(s[i] - reference[row_of(i)]);
      row[row_of(i)].sum += s[i];
    }
  }

  // Adds up the sums of the four lanes of each row.
  __device__ __forceinline__ void complete() {
    row[0].sum = quad_sum(row[0].sum);
    row[1].sum = quad_sum(row[1].sum);
  }
};

}  // namespace flashattn3::decode
