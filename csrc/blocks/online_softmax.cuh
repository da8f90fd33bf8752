// Softmax over keys that come tile by tile, on the accumulator fragments of the scores.
//
// Each row keeps a reference (log2 units) and the sum of 2^(score - reference); out is kept on the
// same reference. The reference is the row's maximum when it is set and then stays: bf16 has fp32's
// range and fp16 is exact enough up to 2^10, so that scores may pass the reference by kGrowth
// without loss. Only when one passes it further are the row's maximum taken, the reference raised,
// and out and the sum rescaled. In a step without growth that saves the exact maximum, its shuffles
// and one multiplication for each element of out. (H100, main loop alone, d128 192x80: 760 TFLOP/s
// against 676 with a running maximum.)
//
// e4m3 ends at 448: there the reference is kOffset below the maximum, so that small probabilities
// have as much of the type's range as may be, and growth begins where 448 would be passed.
#pragma once

#include <climits>
#include <cstdint>

#include "blocks/element.h"

namespace flashattn3 {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 - 2 / (1 + e^(2 x)) with x given as 2 * log2(e) * x: absolute error about 1e-7.
__device__ __forceinline__ float tanh_of_scaled(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exp2_approx(x)));
  return fmaf(-2.f, reciprocal, 1.f);
}

// Of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A thread holds elements of two rows: i / 2 even is the first, odd the second (see wgmma.cuh).
__device__ __forceinline__ constexpr int row_of(int i) { return i / 2 % 2; }

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile.
template <ElementType kElement, int kN, bool kRowsMayBeEmpty>
struct OnlineSoftmax {
  static constexpr int kCount = kN / 2;
  // log2 units. Far below bf16's 2^127, so that sums of 2^kGrowth stay finite.
  static constexpr bool kNarrow = kElement == ElementType::kE4m3;
  static constexpr float kGrowth = kElement == ElementType::kBFloat16  ? 40.f
                                   : kElement == ElementType::kFloat16 ? 10.f
                                                                       : 8.75f;
  static constexpr float kLargestSum = kElement == ElementType::kBFloat16  ? 0x1p40f
                                       : kElement == ElementType::kFloat16 ? 0x1p10f
                                                                           : 430.f;
  static constexpr float kOffset = kNarrow ? 5.f : 0.f;

  float reference[2];  // log2 units; 0 until the row has seen a key
  float sum[2];        // of this thread's columns; the row's sum is that of its four lanes
  bool unseen[2];      // no key so far

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = 0.f;
      sum[r] = 0.f;
      unseen[r] = true;
    }
  }

  // s becomes the exponent over the reference. Returns whether a row of this thread grew too far,
  // or may see its first key.
  // Integer comparison orders floats as soon as one is positive, and takes two at a time.
  template <class Scale>
  __device__ __forceinline__ bool subtract_reference(float (&s)[kCount], const Scale& scale) const {
    int highest[2] = {INT_MIN, INT_MIN};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int r = row_of(i);
      s[i] = scale.exponent(s[i], i, reference[r]);
      s[i + 1] = scale.exponent(s[i + 1], i, reference[r]);
      highest[r] = __vimax3_s32(highest[r], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    const bool grew = max(highest[0], highest[1]) >= __float_as_int(kGrowth);
    return kRowsMayBeEmpty ? grew || unseen[0] || unseen[1] : grew;
  }

  // Raises the references to the rows' maxima, less the offset. s: score - old reference, on return
  // - new reference. factor: what out has to be multiplied with. All lanes of the warp must call
  // it.
  __device__ __forceinline__ void raise_reference(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest[r]);
      // A row without a key so far has sum and out 0: any factor but inf will do. It may start
      // below 0; later the reference only rises.
      const float rise = !unseen[r]         ? fmaxf(top - kOffset, 0.f)
                         : top == -INFINITY ? 0.f
                                            : top - kOffset;
      factor[r] = unseen[r] ? 1.f : exp2_approx(-rise);
      unseen[r] = unseen[r] && top == -INFINITY;
      reference[r] += rise;
      sum[r] *= factor[r];
      highest[r] = rise;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= highest[row_of(i)];
  }

  // s becomes 2^s and is added to the sums.
  template <class Scale>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], const Scale& scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = exp2_approx(s[i]);
    add(s, scale);
  }

  // Never true, which the compiler can't know: what is decided by it comes after exponentiate().
  __device__ __forceinline__ bool impossible() const { return sum[0] + sum[1] < 0.f; }

  // For a tile of which all rows see all keys: subtract_reference and exponentiate in one, with
  // growth seen from the sums. Returns whether a sum of the warp is too large (or NaN); then s is
  // of no use but to settle(), and the state is as before.
  template <class Scale>
  __device__ __forceinline__ bool exponentiate_at_once(float (&s)[kCount], const Scale& scale) {
    float part[Scale::kGroups][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(scale.exponent(s[i], i, reference[row_of(i)]));
      part[scale.group(i)][row_of(i)] += s[i];
    }
    float all[2] = {part[0][0], part[0][1]};
#pragma unroll
    for (int g = 1; g < Scale::kGroups; ++g) {
      all[0] += part[g][0];
      all[1] += part[g][1];
    }
    const bool fits = (kNarrow ? fmaxf(all[0], all[1]) : all[0] + all[1]) < kLargestSum;
    const bool all_fit = __all_sync(~0u, fits);
    if (all_fit) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int g = 0; g < Scale::kGroups; ++g) sum[r] += scale.weighted(part[g][r], g);
      }
    }
    return !all_fit;
  }

  // s: what exponentiate_at_once() left that was too large. Raises references until everything fits
  // into the narrow type: no exponential above 448, and sums with room before the next call, unless
  // that already is so. Returns false, with nothing changed, where fp32 overflowed: the scores are
  // then wanted again. All lanes of the warp must call it. factor: of out; grew: whether it is to
  // be used; the same in all lanes.
  template <class Scale>
  __device__ __forceinline__ bool settle(float (&s)[kCount], const Scale& scale, float (&factor)[2],
                                         bool& grew) {
    float highest[2] = {0.f, 0.f}, part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
      part[row_of(i)] += s[i];
    }
    const bool finite = part[0] < 0x1p100f && part[1] < 0x1p100f;  // false for NaN
    if (!__all_sync(~0u, finite)) return false;
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      constexpr float kTop = 32.f, kRoom = 128.f;
      const float excess = quad_max(fmaxf(highest[r] * (1.f / kTop), part[r] * (1.f / kRoom)));
      const bool rise = quad_max(fmaxf(highest[r], part[r])) >= kLargestSum;
      const float step = rise ? __log2f(excess) : 0.f;
      factor[r] = exp2_approx(-step);
      reference[r] += step;
      sum[r] *= factor[r];
      rises = rises || rise;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= factor[row_of(i)];
    add(s, scale);
    grew = __any_sync(~0u, rises);
    return true;
  }

  // Whether a row of the warp has seen no key so far.
  __device__ __forceinline__ bool warp_has_unseen() const {
    return kRowsMayBeEmpty && __any_sync(~0u, unseen[0] || unseen[1]);
  }

  // The row's sum over its four lanes; 0 if it saw no key.
  __device__ __forceinline__ float row_sum(int r) const { return quad_sum(sum[r]); }

 private:
  template <class Scale>
  __device__ __forceinline__ void add(const float (&s)[kCount], const Scale& scale) {
    float part[Scale::kGroups][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) part[scale.group(i)][row_of(i)] += s[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int g = 0; g < Scale::kGroups; ++g) sum[r] += scale.weighted(part[g][r], g);
    }
  }
};

}  // namespace flashattn3
