// The largest score that the rows of a head see. The maximum of a row that a softmax keeps is not
// it: it is above some scores and below others (softmax.cuh). Scores are read from probabilities:
// the sum of a row's exceeds each of them, so where it is small no score is larger than one that is
// known, and a block costs one comparison for each row. Other blocks find their maximum.
#pragma once

#include <climits>
#include <cstdint>

#include "ptx/approximations.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// Raises a float in memory, which is -inf at first, to a value that is not below it. It must not be
// NaN of negative sign.
__device__ __forceinline__ void raise(float* to, float value) {
  if (__float_as_int(value) >= 0) {
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
  }
}

// Integers in the order of floats; NaN of positive sign is above all numbers. Its own inverse.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & INT_MAX); }

// A warp's state: the largest known score, and upper bounds for the sums of each thread's two rows.
class LargestScore {
 public:
  static constexpr bool kTracks = true;

  // known: a score of the head that is known, in natural units; +inf: none is looked for.
  __device__ __forceinline__ void begin_tile(float known) { set_known(known); }

  // Called when row_max has changed. most: a bound in any case.
  __device__ __forceinline__ void set_limits(const float (&row_max)[2], float most) {
#pragma unroll
    for (int r = 0; r < 2; ++r) limit_[r] = fminf(most, exp2_approx(known_ - row_max[r]));
  }

  // Returns whether no probability may be of a larger score than the known one. sums: of those of
  // each row.
  __device__ __forceinline__ bool is_above(const float (&sums)[2]) const {
    return sums[0] < limit_[0] && sums[1] < limit_[1];
  }

  // Takes the probabilities of a block, 2^(score - row_max). of_head: the largest score of the head
  // so far, in natural units. num_rows: from the warp's first row on. All lanes of the warp call
  // it.
  template <int kCount>
  __device__ __forceinline__ void take(const float (&p)[kCount], const float (&row_max)[2],
                                       float* of_head, int num_rows, float most) {
    constexpr float kLn2 = 0.693147180559945f;
    const float known = __ldcg(of_head);
    int top[2] = {0, 0};  // probabilities are not negative: their bits are ordered as they are
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      top[row_of(i)] = __vimax3_s32(top[row_of(i)], __float_as_int(p[i]), __float_as_int(p[i + 1]));
    }
    const int row = thread_row(static_cast<int>(threadIdx.x % 32));
    int highest = ordered(__float_as_int(-INFINITY));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float score = __log2f(__int_as_float(top[r])) + row_max[r];  // -inf without a key
      if (row + kRowStride * r < num_rows) highest = max(highest, ordered(__float_as_int(score)));
    }
    highest = __reduce_max_sync(~0u, highest);
    const float found = __int_as_float(ordered(highest)) * kLn2;
    if (threadIdx.x % 32 == 0 && !(found <= known)) raise(of_head, found);
    set_known(fmaxf(known, found));
    set_limits(row_max, most);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + kRowStride * r >= num_rows) limit_[r] = most;
    }
  }

 private:
  // Rounding may not hide a larger score, or the result would depend on the order of the tiles.
  __device__ __forceinline__ void set_known(float natural) {
    const float known = natural * 1.44269504088896f;  // log2(e)
    known_ = known - fabsf(known) * 0x1p-20f - 0x1p-12f;
  }

  float known_;  // in log2 units, a little less; NaN for +inf, which bounds nothing
  float limit_[2];
};

// In kernels that look for none.
struct NoScore {
  static constexpr bool kTracks = false;
};

}  // namespace flashattn3
