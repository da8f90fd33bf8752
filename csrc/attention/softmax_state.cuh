// The state of an online softmax on accumulator fragments of the scores: for each row row_max,
// which the probabilities and O are relative to, and the sum of the probabilities. softmax.cuh and
// softmax_e4m3.cuh decide when row_max changes.
#pragma once

#include <climits>
#include <cstdint>

#include "ptx/convert_fp8.cuh"
#include "tile/fragment.h"
#include "tile/score_accumulator.cuh"

namespace flashattn3 {

// Returns an approximation of 2^x; denormal results become 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns the sum over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Returns a bit for each of the row's four lanes. All lanes of the warp must call it.
__device__ __forceinline__ uint32_t quad_bits(bool condition) {
  return __ballot_sync(~0u, condition) >> (threadIdx.x % 32 & ~3) & 15u;
}

// Returns the tile column of a score of row r that equals `value`; -1 if this thread holds none.
template <class S, int kCount>
__device__ __forceinline__ int column_of(const S (&s)[kCount], int r, float value) {
  int column = -1;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (row_of(i) == r && get(s[i]) == value) column = register_column(i);
  }
  return column < 0 ? -1 : column + thread_column(threadIdx.x);
}

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile.
template <int kN, bool kRowsMayBeEmpty>
struct SoftmaxState {
  static constexpr int kCount = kN / 2;

  float row_max[2];  // in the units of the exponents; 0 until the row has seen a key
  float sum[2];      // over this thread's columns; four lanes share a row
  uint32_t unseen;   // bit r is set if row r has seen no key so far

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = 0.f;
      sum[r] = 0.f;
    }
    unseen = 3;
  }

  // Replaces scores by exponents relative to row_max. highest: the largest exponent of each row of
  // this thread, as the bits of a float. Integer comparison orders floats if at least one is
  // positive, with NaN above all others, and one instruction compares two of them to the maximum.
  template <class S, class Scale>
  __device__ __forceinline__ void subtract_row_max(S (&s)[kCount], const Scale& scale,
                                                   int (&highest)[2]) const {
    highest[0] = highest[1] = INT_MIN;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int r = row_of(i);
      const float a = scale.exponent(get(s[i]), i, row_max[r]);
      const float b = scale.exponent(get(s[i + 1]), i, row_max[r]);
      highest[r] = __vimax3_s32(highest[r], __float_as_int(a), __float_as_int(b));
      set(s[i], a);
      set(s[i + 1], b);
    }
  }

  // Finds the largest exponent of each row of this thread; exponents may have any sign.
  template <class S>
  static __device__ __forceinline__ void find_highest(float (&highest)[2], const S (&s)[kCount]) {
    highest[0] = highest[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = max_or_nan(highest[row_of(i)], get(s[i]));
  }

  // Returns whether an exponent of this thread reaches the threshold or is NaN, or a row may see
  // its first key.
  __device__ __forceinline__ bool needs_rescale(const int (&highest)[2], float threshold) const {
    const bool exceeds = max(highest[0], highest[1]) >= __float_as_int(threshold);
    return kRowsMayBeEmpty ? exceeds || unseen != 0 : exceeds;
  }

  // Returns false, which the compiler cannot know: a branch on it comes after the sums.
  __device__ __forceinline__ bool impossible() const { return sum[0] + sum[1] < 0.f; }

  // Returns whether a row of the warp has seen no key so far.
  __device__ __forceinline__ bool warp_has_unseen() const {
    return kRowsMayBeEmpty && __any_sync(~0u, unseen != 0);
  }

  // Returns the row's sum over its four lanes; 0 if it saw no key.
  __device__ __forceinline__ float row_sum(int r) const { return quad_sum(sum[r]); }
};

}  // namespace flashattn3
