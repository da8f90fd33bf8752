// The sum of a row and the maximum that it is relative to, and the term that a sink adds to it.
#pragma once

#include <cmath>

#include "ptx/approximations.cuh"

namespace flashattn3 {

// Statistics of a row. O and sum hold sums of 2^(score - max). max: in log2 units, -inf
// without a key.
struct RowStats {
  float max, sum;
};

// Exponent's reference for a row: finite, so that a row without keys gives 2^-inf = 0, not NaN.
__device__ __forceinline__ float reference_of(float max) { return max == -INFINITY ? 0.f : max; }

// Factor of sums relative to `from` that makes them relative to `to`, the larger maximum.
__device__ __forceinline__ float rescale_factor(float from, float to) {
  return exp2_approx(from - reference_of(to));
}

// Adds a sink, a logit in log2 units without a value, to the row's sum: an epilogue's hook, as
// those of variant.cuh are a main loop's. Returns the factor that makes O relative to the new
// maximum. A sink of +inf leaves O and the other terms no weight.
__device__ __forceinline__ float add_sink(RowStats& stats, float sink) {
  const float max = fmaxf(stats.max, sink);
  const float rescale = rescale_factor(stats.max, max);
  // inf - inf is NaN, and fminf of NaN and 0 returns 0.
  stats = {max, stats.sum * rescale + exp2_approx(fminf(sink - reference_of(max), 0.f))};
  return rescale;
}

}  // namespace flashattn3
