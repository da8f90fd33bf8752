// Online softmax (Milakov and Gimelshein 2018) of 16-bit kernels, on the accumulator fragments of
// the scores, with lazy rescaling (FlashAttention-4).
//
// Probabilities are 2^(score - row_max). row_max is set kLift above the row's maximum and stays
// until a score passes it by kRescaleThreshold, which costs no precision: bf16 has fp32's range,
// and fp16 is exact enough up to 2^10. Only then does the softmax reduce the row's maximum, raise
// row_max, and rescale O and the sum. Every other step saves the exact maximum, its shuffles and
// one multiplication per element of O. (H100, main loop alone, d128 192x80: 760 TFLOP/s, against
// 676 with a running maximum.)
#pragma once

#include <climits>
#include <cstdint>

#include "attention/largest_score.cuh"
#include "ptx/approximations.cuh"
#include "ptx/element.h"
#include "tile/fragment.h"
#include "tile/gemm.cuh"

namespace flashattn3 {

// Returns the sum over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Returns the maximum over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The state of an online softmax on accumulator fragments of the scores: for each row row_max,
// which the probabilities and O are relative to, and the sum of the probabilities. OnlineSoftmax
// and SoftmaxE4m3 decide when row_max changes. kN: keys of a tile. kRowsMayBeEmpty: a row may see
// no key of the first tile.
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
      const float b = scale.exponent(get(s[i + 1]), i + 1, row_max[r]);
      highest[r] = __vimax3_s32(highest[r], __float_as_int(a), __float_as_int(b));
      set(s[i], a);
      set(s[i + 1], b);
    }
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

// A tile of which all rows see all keys.
struct AllVisible {
  __device__ __forceinline__ bool sees(int) const { return true; }
};

// Largest: LargestScore, or NoScore.
template <ElementType kElement, int kN, bool kRowsMayBeEmpty, class Largest = NoScore>
struct OnlineSoftmax : SoftmaxState<kN, kRowsMayBeEmpty> {
  using Base = SoftmaxState<kN, kRowsMayBeEmpty>;
  using Base::kCount, Base::row_max, Base::sum, Base::unseen;
  // In log2 units. V in bf16 may reach fp32's largest number, so probabilities must not exceed 1:
  // O is then finite wherever a running maximum leaves it finite. V in fp16 is far below that, and
  // a lift would cost its probabilities bits.
  static constexpr float kLift = kElement == ElementType::kBFloat16 ? 10.f : 0.f;
  static constexpr float kRescaleThreshold = 10.f - kLift;
  static constexpr float kLargestSum =
      kElement == ElementType::kBFloat16 ? 1.f : 0x1p10f;  // 2^kRescaleThreshold

  static constexpr bool kTracks = Largest::kTracks;

  Largest largest;

  // Raises row_max to kLift above the rows' maxima. s: score - row_max, on return relative to the
  // new row_max. factor: the caller multiplies O with it; the sums are rescaled here. All lanes of
  // the warp must call it.
  __device__ __forceinline__ void rescale(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest[r]) + kLift;
      // The sum and O of a row without a key so far are 0, so every finite factor is right. Its
      // first row_max may be below 0; afterwards row_max only rises.
      const bool first = unseen >> r & 1;
      const float rise = !first ? fmaxf(top, 0.f) : top == -INFINITY ? 0.f : top;
      factor[r] = first ? 1.f : exp2_approx(-rise);
      if (top != -INFINITY) unseen &= ~(1u << r);
      row_max[r] += rise;
      sum[r] *= factor[r];
      highest[r] = rise;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= highest[row_of(i)];
  }

  // Replaces s by 2^s and adds it to the sums. Returns whether a score may be above the largest
  // one. All lanes of the warp call it.
  __device__ __forceinline__ bool exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = exp2_approx(s[i]);
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) part[row_of(i)] += s[i];
    sum[0] += part[0];
    sum[1] += part[1];
    if constexpr (kTracks) {
      largest.set_limits(row_max, kLargestSum / 2);
      return !__all_sync(~0u, largest.is_above(part));
    }
    return false;
  }

  // The result of exponentiate_at_once. overflow: a sum of the warp is too large or NaN: s then
  // holds no usable values, and the state is unchanged. above: a score may be above the largest
  // one.
  struct Outcome {
    bool overflow, above;
  };

  // Where every row has seen a key: subtract_row_max, a mask and exponentiate in one pass; the sums
  // show whether row_max must rise. bits: ThreadBits or AllVisible.
  template <class Scale, class Bits = AllVisible>
  __device__ __forceinline__ Outcome exponentiate_at_once(float (&s)[kCount], const Scale& scale,
                                                          const Bits& bits = {}) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float exponent = scale.exponent(s[i], i, row_max[row_of(i)]);
      s[i] = exp2_approx(bits.sees(i) ? exponent : -INFINITY);
      part[row_of(i)] += s[i];
    }
    // No limit of Largest is above half of the largest sum, so its vote is both where it holds.
    bool above = false;
    if constexpr (kTracks) above = !__all_sync(~0u, largest.is_above(part));
    const bool all_fit = (kTracks && !above) || __all_sync(~0u, part[0] + part[1] < kLargestSum);
    if (all_fit) {
      sum[0] += part[0];
      sum[1] += part[1];
    }
    return {!all_fit, above};
  }

  // O and the sums hold 2^(score - row_max_log2).
  __device__ __forceinline__ float row_max_log2(int r) const { return row_max[r]; }
};

}  // namespace flashattn3
