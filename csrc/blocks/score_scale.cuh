// What makes exponents (log2 units) of a tile's scores: one factor for all of them, or with
// quantized tensors a factor and a shift for every block of keys.
#pragma once

#include "blocks/online_softmax.cuh"

namespace flashattn3 {

struct UniformScale {
  static constexpr int kGroups = 1;
  float factor;
  __device__ __forceinline__ float exponent(float score, int, float reference) const {
    return fmaf(score, factor, -reference);
  }
  // What a sum of exponentials of a group counts in the row's sum.
  __device__ __forceinline__ float weighted(float sum, int) const { return sum; }
  static __device__ __forceinline__ constexpr int group(int) { return 0; }
};

// Of a tile of K and V, for each group of keys that share their descales: descale of K; log2 of V's
// descale over the row tile's v_scale, which goes into the probabilities, and its inverse, which
// takes it out of their sum again.
template <int kTheGroups>
struct KeyScales {
  float k[kTheGroups];
  float shift[kTheGroups];
  float weight[kTheGroups];
};

template <int kTheGroups, int kGroupKeys>
struct BlockScale {
  static constexpr int kGroups = kTheGroups;
  float factor[kGroups];
  float shift[kGroups];
  float weight[kGroups];
  __device__ __forceinline__ BlockScale(const KeyScales<kGroups>& keys, float q_factor) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      factor[g] = q_factor * keys.k[g];
      shift[g] = keys.shift[g];
      weight[g] = keys.weight[g];
    }
  }
  __device__ __forceinline__ float exponent(float score, int i, float reference) const {
    return fmaf(score, factor[group(i)], shift[group(i)] - reference);
  }
  __device__ __forceinline__ float weighted(float sum, int g) const { return sum * weight[g]; }
  // Of accumulator i, whose column is 8 * (i / 4) and a little (wgmma.cuh).
  static __device__ __forceinline__ constexpr int group(int i) { return i / 4 * 8 / kGroupKeys; }
};

// softcap: the scores become tanh(score * scale / cap), scale in the exponent's units (tanh_scale =
// 2 * log2(e) * scale / cap); the factor cap, in the exponent's units, is left to the scale, whose
// factor without descales is score_scale, tanh_scale / cap_ratio.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], UniformScale&, float tanh_scale,
                                           float, float) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = tanh_of_scaled(s[i] * tanh_scale);
}
template <int kCount, int kGroups, int kGroupKeys>
__device__ __forceinline__ void cap_scores(float (&s)[kCount],
                                           BlockScale<kGroups, kGroupKeys>& scale, float,
                                           float score_scale, float cap_ratio) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = tanh_of_scaled(s[i] * (scale.factor[scale.group(i)] * cap_ratio));
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) scale.factor[g] = score_scale;
}

}  // namespace flashattn3
