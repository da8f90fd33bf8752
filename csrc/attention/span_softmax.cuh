// Online softmax of a span of keys (split_tokens): with lazy rescaling, as softmax.cuh, but a row's
// row_max rises by the row's own scores alone. Nothing then depends on the other rows of a warp,
// and a key that a row does not see changes nothing.
#pragma once

#include <cstdint>

#include "attention/row_stats.cuh"
#include "attention/softmax.cuh"
#include "attention/variant.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// The factors that join a row's sums of one more span to those before it.
struct SpanJoin {
  float before, added;

  // all: of the spans before, which become those of all.
  static __device__ __forceinline__ SpanJoin of(RowStats& all, const RowStats& span) {
    const float max = fmaxf(all.max, span.max);
    const SpanJoin join{rescale_factor(all.max, max), rescale_factor(span.max, max)};
    all = {max, join(all.sum, span.sum)};
    return join;
  }
  __device__ __forceinline__ float operator()(float sum, float value) const {
    return fmaf(value, added, __fmul_rn(sum, before));
  }
};

template <ElementType kElement, int kN>
struct SpanSoftmax : OnlineSoftmax<kElement, kN, true> {
  using Base = OnlineSoftmax<kElement, kN, true>;
  using Base::kCount, Base::kLift, Base::row_max, Base::sum, Base::unseen;

  RowStats row[2];  // after complete(), of all columns

  // Replaces scores by probabilities and adds these to the sums. hides: whether hide(s) sets scores
  // to -inf. Returns whether a row of the warp has another row_max: O is then multiplied with
  // factor.
  template <class Hide>
  __device__ __forceinline__ bool update(float (&s)[kCount], const UniformScale& scale,
                                         float (&factor)[2], bool hides, Hide&& hide) {
    int highest[2];
    this->subtract_row_max(s, scale, highest);
    if (hides) {
      hide(s);
      highest[0] = highest[1] = INT_MIN;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        highest[row_of(i)] = max(highest[row_of(i)], __float_as_int(s[i]));
      }
    }
    const bool rises = __any_sync(~0u, this->needs_rescale(highest, Base::kRescaleThreshold)) != 0;
    if (rises) raise(s, highest, factor);
    this->exponentiate(s);
    return rises;
  }

  // Sets row.
  __device__ __forceinline__ void complete() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r].sum = quad_sum(sum[r]);
      row[r].max = unseen >> r & 1 ? -INFINITY : row_max[r];
    }
  }

  // For the epilogue, after complete().
  __device__ __forceinline__ float row_sum(int r) const { return row[r].sum; }
  __device__ __forceinline__ float row_max_log2(int r) const { return row[r].max; }

 private:
  // Raises row_max of rows that see their first key or whose exponents reach the threshold to kLift
  // above their maximum. Other rows keep their exponents, and their factor is 1.
  __device__ __forceinline__ void raise(float (&s)[kCount], const int (&highest)[2],
                                        float (&factor)[2]) {
    float top[2] = {-INFINITY, -INFINITY}, rise[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) top[row_of(i)] = fmaxf(top[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = quad_max(top[r]) + kLift;
      int most = max(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
      most = max(most, __shfl_xor_sync(~0u, most, 2));
      const bool first = unseen >> r & 1;
      const bool rises = first ? top[r] != -INFINITY : most >= __float_as_int(kThreshold);
      rise[r] = !rises ? 0.f : first ? top[r] : fmaxf(top[r], 0.f);
      factor[r] = first ? 1.f : exp2_approx(-rise[r]);
      if (rises) unseen &= ~(1u << r);
      row_max[r] += rise[r];
      sum[r] = __fmul_rn(sum[r], factor[r]);  // no part of an fma in one kernel alone
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= rise[row_of(i)];
  }

  static constexpr float kThreshold = Base::kRescaleThreshold;
};

}  // namespace flashattn3
