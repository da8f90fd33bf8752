// The variant of attention: what happens to a score after S = Q K^T. A forward kernel takes a
// Variant, and its main loop calls the hooks: an option that changes scores is a member and a line
// in a hook. (The idea of FlashInfer's attention variants, structs that transform and mask logits,
// and of the functions score_mod and mask_mod of FlashAttention-4.)
#pragma once

#include <cstdint>

#include "attention/block_list.cuh"
#include "attention/tanh.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// Converts the scores of a call to log2 units, with its softcap (launch/score_scale.h).
struct ScoreScale {
  float factor;      // of scores, after the softcap if there is one
  float tanh_scale;  // argument of tanh_of_scaled is score * tanh_scale; 0: no softcap
  // 8 bits: 1 / softcap in log2 units; `factor` is then of scores before the softcap. Else 0.
  float one_over_cap;
  __device__ __forceinline__ bool caps() const { return tanh_scale != 0.f; }
};

// Scores to exponents with one factor; block_scale.cuh has those of quantized tensors.
struct UniformScale {
  float factor;
  __device__ __forceinline__ float exponent(float score, int, float row_max) const {
    return fmaf(score, factor, -row_max);
  }
};

// Sets the scores of keys that a row does not see to -inf. row: of the thread's register 0
// (fragment.h). first_key: of the tile. kMasked: false hides only keys past the end of the
// sequence.
template <int kN, bool kMasked, class S>
__device__ __forceinline__ void mask_scores(S (&s)[kN / 2], const Mask& mask, int row,
                                            int first_key) {
  // The key of register 0; those of other registers are compile-time distances from it.
  const int key = first_key + thread_column(threadIdx.x);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = (kMasked ? mask.end(row + kRowStride * r) : mask.num_keys) - key;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if (row_of(i) == r && register_column(i) >= end) set(s[i], -INFINITY);
    }
  }
  if constexpr (kMasked) {
    if (mask.begin(row + kRowStride) <= first_key) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = mask.begin(row + kRowStride * r) - key;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        if (row_of(i) == r && register_column(i) < begin) set(s[i], -INFINITY);
      }
    }
  }
}

struct Variant {
  Window window;
  ScoreScale scale;

  __device__ __forceinline__ bool transforms() const { return scale.caps(); }
  template <int kCount>
  __device__ __forceinline__ void transform(float (&s)[kCount]) const {
    if (transforms()) cap_scores(s, scale.tanh_scale);
  }
  // The scale that converts transformed scores to exponents.
  __device__ __forceinline__ UniformScale exponents() const { return {scale.factor}; }
};

}  // namespace flashattn3
