// Softmax over keys that come tile by tile, on the accumulator fragments of the scores.
//
// Each row keeps a reference (log2 units) and the sum of 2^(score - reference); out is kept on the
// same reference. The reference is the row's maximum when it is set and then stays: bf16 has fp32's
// range and fp16 is exact enough up to 2^10, so that scores may pass the reference by kGrowth
// without loss. Only when one passes it further are the row's maximum taken, the reference raised,
// and out and the sum rescaled. In a step without growth that saves the exact maximum, its shuffles
// and one multiplication for each element of out. (H100, main loop alone, d128 192x80: 760 TFLOP/s
// against 676 with a running maximum.)
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
  static constexpr float kGrowth = kElement == ElementType::kBFloat16 ? 40.f : 10.f;
  static constexpr float kLargestSum = kElement == ElementType::kBFloat16 ? 0x1p40f : 0x1p10f;

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

  // s becomes score * scale - reference. Returns whether a row of this thread grew too far, or
  // may see its first key.
  // Integer comparison orders floats as soon as one is positive, and takes two at a time.
  __device__ __forceinline__ bool subtract_reference(float (&s)[kCount], float scale) const {
    int highest[2] = {INT_MIN, INT_MIN};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int r = row_of(i);
      s[i] = fmaf(s[i], scale, -reference[r]);
      s[i + 1] = fmaf(s[i + 1], scale, -reference[r]);
      highest[r] = __vimax3_s32(highest[r], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    const bool grew = max(highest[0], highest[1]) >= __float_as_int(kGrowth);
    return kRowsMayBeEmpty ? grew || unseen[0] || unseen[1] : grew;
  }

  // Raises the references to the rows' maxima. s: score - old reference, on return - new reference.
  // factor: what out has to be multiplied with. All lanes of the warp must call it.
  __device__ __forceinline__ void raise_reference(float (&s)[kCount], float (&factor)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = fmaxf(highest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest[r]);
      // A row without a key so far has sum and out 0: any factor but inf will do. It may start
      // below 0; later the reference only rises.
      const float rise = !unseen[r] ? fmaxf(top, 0.f) : top == -INFINITY ? 0.f : top;
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
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(s[i]);
      sum[row_of(i)] += s[i];
    }
  }

  // Never true, which the compiler can't know: what is decided by it comes after exponentiate().
  __device__ __forceinline__ bool impossible() const { return sum[0] + sum[1] < 0.f; }

  // For a tile of which all rows see all keys: subtract_reference and exponentiate in one, with
  // growth seen from the sums. Returns whether a sum of the warp is too large (or NaN); then s is
  // of no use and the state is as before.
  __device__ __forceinline__ bool exponentiate_at_once(float (&s)[kCount], float scale) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale, -reference[row_of(i)]));
      part[row_of(i)] += s[i];
    }
    const bool fits = part[0] + part[1] < kLargestSum;
    const bool all_fit = __all_sync(~0u, fits);
    if (all_fit) {
      sum[0] += part[0];
      sum[1] += part[1];
    }
    return !all_fit;
  }

  // Whether a row of the warp has seen no key so far.
  __device__ __forceinline__ bool warp_has_unseen() const {
    return kRowsMayBeEmpty && __any_sync(~0u, unseen[0] || unseen[1]);
  }

  // The row's sum over its four lanes; 0 if it saw no key.
  __device__ __forceinline__ float row_sum(int r) const { return quad_sum(sum[r]); }
};

// softcap: the scores become tanh(score * scale / cap), scale in the exponent's units (tanh_scale =
// 2 * log2(e) * scale / cap); the factor cap is in the scale of subtract_reference.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], float tanh_scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = tanh_of_scaled(s[i] * tanh_scale);
}

}  // namespace flashattn3
