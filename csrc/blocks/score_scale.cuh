// What makes exponents of a tile's scores: one factor for all of them, or with quantized tensors a
// factor and a shift for every block of keys. Exponents are in log2 units, with quantized tensors
// in codes, of which e4m3 has eight to an octave (code_softmax.cuh).
#pragma once

#include <cstdint>

#include "blocks/online_softmax.cuh"
#include "blocks/tile_product.cuh"

namespace flashattn3 {

constexpr float kCodesOfOctave = 8.f;

struct UniformScale {
  float factor[1];
  __device__ __forceinline__ float exponent(float score, int, float reference) const {
    return fmaf(score, factor[0], -reference);
  }
  __device__ __forceinline__ void complete(float) {}
  __device__ __forceinline__ bool sums_apart() const { return false; }
  static __device__ __forceinline__ constexpr int group(int) { return 0; }
};

// Of a tile of K and V, for each group of keys that share their descales: K's descale; log2 of V's
// descale over the row tile's v_scale, which goes into the probabilities, in codes, and its
// inverse, which takes it out of their sum again. A group whose V is far smaller than V was before
// has too small probabilities for that: it has weight 0 and a bit in `exact`.
template <int kGroups>
struct alignas(16) KeyScales {
  float k[kGroups];
  float shift[kGroups];
  uint32_t exact;
  alignas(16) float2 weight[4];  // of two groups each; those of no group are 0
};

// What a thread holds of them while it works on the scores.
template <int kGroups, int kGroupKeys>
struct BlockScale {
  float factor[kGroups];
  float shift[kGroups];
  uint32_t exact;
  __device__ __forceinline__ explicit BlockScale(const KeyScales<kGroups>& keys)
      : exact(keys.exact) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      factor[g] = keys.k[g];
      shift[g] = keys.shift[g];
    }
  }
  // To be called once, before any other: long after the scales were read, which takes its time
  // where products want shared memory too.
  __device__ __forceinline__ void complete(float q_factor) {
    pin_registers(factor);
    pin_registers(shift);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) factor[g] *= q_factor;
  }
  // Whether a group is to be summed exactly.
  __device__ __forceinline__ bool sums_apart() const { return exact != 0; }
  __device__ __forceinline__ float exponent(float score, int i, float reference) const {
    return fmaf(score, factor[group(i)], shift[group(i)] - reference);
  }
  // Of accumulator i, whose column is 8 * (i / 4) and a little (wgmma.cuh).
  static __device__ __forceinline__ constexpr int group(int i) { return i / 4 * 8 / kGroupKeys; }
};

// softcap: the scores become tanh(score * scale / cap), cap_ratio = 2 / cap over the exponent's
// units; the factor cap, in these units, is left to the scale: score_scale.
template <int kCount, class Scale>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], Scale& scale, float score_scale,
                                           float cap_ratio) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = tanh_of_scaled(s[i] * (scale.factor[Scale::group(i)] * cap_ratio));
  }
#pragma unroll
  for (float& factor : scale.factor) factor = score_scale;
}

}  // namespace flashattn3
