// The largest score that the rows of a head see. The maximum of a row that a softmax keeps is not
// it: it is above some scores and below others (softmax.cuh). Scores are read from probabilities:
// the sum of a row's exceeds each of them, so where it is small no score is larger than one that is
// known, and a block costs one comparison for each row. Other blocks find their maximum.
#pragma once

#include <cstdint>

#include "ptx/approximations.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// Raises a float in memory, which is -inf at first, to a value that is not below it. Not for NaN of
// negative sign.
__device__ __forceinline__ void raise(float* to, float value) {
  if (__float_as_int(value) >= 0) {
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
  }
}

// A warp's state: an upper bound for the sums of each thread's two rows.
class LargestScore {
 public:
  static constexpr bool kTracks = true;

  // Returns whether no probability may be of a larger score than the known one. sums: of those of
  // each row.
  __device__ __forceinline__ bool is_above(const float (&sums)[2]) const {
    return sums[0] < limit_[0] && sums[1] < limit_[1];
  }

  // Takes the probabilities of a block, 2^(score - row_max), after which row_max must not change
  // before the next call. of_head: the largest score of the head so far, in natural units; null:
  // none is looked for. num_rows: from the warp's first row on. most: a bound in any case. All
  // lanes of the warp call it.
  template <int kCount>
  __device__ __forceinline__ void take(const float (&p)[kCount], const float (&row_max)[2],
                                       float* of_head, int num_rows, float most) {
    constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
    limit_[0] = limit_[1] = most;
    if (of_head == nullptr) return;
    const float known = __ldcg(of_head);
    int top[2] = {0, 0};  // probabilities are not negative: their bits are ordered as they are
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      top[row_of(i)] = __vimax3_s32(top[row_of(i)], __float_as_int(p[i]), __float_as_int(p[i + 1]));
    }
    const int row = thread_row(static_cast<int>(threadIdx.x % 32));
    float found = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float score = __log2f(__int_as_float(top[r])) + row_max[r];  // -inf without a key
      if (row + kRowStride * r < num_rows) found = larger(found, score);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      found = larger(found, __shfl_xor_sync(~0u, found, lanes));
    }
    found *= kLn2;
    if (threadIdx.x % 32 == 0 && !(found <= known)) raise(of_head, found);
    // Rounding may not hide a larger score, or the result would depend on the order of the tiles.
    const float largest = fmaxf(known, found) * kLog2e;
    const float bound = largest - fabsf(largest) * 0x1p-20f - 0x1p-12f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + kRowStride * r < num_rows) limit_[r] = fminf(most, exp2_approx(bound - row_max[r]));
    }
  }

 private:
  // NaN if one of them is.
  static __device__ __forceinline__ float larger(float a, float b) {
    return isnan(a) || a > b ? a : b;
  }

  float limit_[2];
};

// In kernels that look for none.
struct NoScore {
  static constexpr bool kTracks = false;
};

}  // namespace flashattn3
