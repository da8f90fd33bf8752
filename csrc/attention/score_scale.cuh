// What makes exponents of a tile's scores: one factor for all of them, or with quantized tensors a
// factor and a shift for every block of keys. Exponents are in log2 units, with quantized tensors
// in codes, of which e4m3 has eight to an octave (softmax_e4m3.cuh).
#pragma once

#include <cstdint>

#include "attention/softmax.cuh"
#include "tile/gemm.cuh"
#include "tile/score_accumulator.cuh"

namespace flashattn3 {

constexpr float kCodesPerOctave = 8.f;

struct UniformScale {
  float factor[1];
  __device__ __forceinline__ float exponent(float score, int, float row_max) const {
    return fmaf(score, factor[0], -row_max);
  }
  __device__ __forceinline__ void complete(float) {}
  static __device__ __forceinline__ constexpr int group(int) { return 0; }
  __device__ __forceinline__ void restart(float score_scale) { factor[0] = score_scale; }
};

// Of a tile of K and V, for each group of keys that share their descales: K's descale, and log2 of
// V's descale over the work tile's v_scale, which goes into the probabilities, in codes. The
// inverse of that factor is their weight in the row's sum (row_sum_columns.cuh). A group whose V is
// far smaller than V was before has too small probabilities for that: it has weight 0 and a bit in
// `special`. So has, kGroups bits higher, a group whose descale has another sign than the work
// tile's v_scale: its probabilities and its weight are negative.
template <int kGroups>
struct alignas(16) KvDescales {
  static_assert(kGroups <= 4);
  float k[kGroups];
  float shift[kGroups];  // of int8: over kInt8Bias
  uint32_t special;
};

// Of accumulator i, whose column is 8 * (i / 4) and a little (wgmma.cuh).
template <int kGroupKeys>
__device__ __forceinline__ constexpr int key_group(int i) {
  return i / 4 * 8 / kGroupKeys;
}

// What a thread holds of them while it works on the scores. kZero: where integer scores start
// (gemm_int8.cuh); 0: scores are floats.
template <int kGroups, int kGroupKeys, int kBias>
struct BlockScale {
  static constexpr int kNumGroups = kGroups;
  static constexpr bool kInteger = kBias != 0;
  float factor[kGroups];
  float shift[kGroups];  // of integers, once complete, what takes the start away
  uint32_t special;

  __device__ __forceinline__ explicit BlockScale(const KvDescales<kGroups>& keys)
      : special(keys.special) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      factor[g] = keys.k[g];
      shift[g] = keys.shift[g];
    }
  }

  // To be called once, before any other: long after the scales were read, which takes its time
  // where products want shared memory too. q_factor: of integers times kZero.
  __device__ __forceinline__ void complete(float q_factor) {
    warpgroup_fence_operand(factor);
    warpgroup_fence_operand(shift);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if constexpr (kInteger) {
        remove_bias(g, factor[g] * q_factor, shift[g]);
      } else {
        factor[g] *= q_factor;
      }
    }
  }

  // Of a group, in codes, once complete.
  __device__ __forceinline__ float codes_of_shift(int g) const {
    return kInteger ? fmaf(factor[g], kBias, from_denormal(shift[g])) : shift[g];
  }

  // Of the group of a key of the tile, in codes, once complete.
  __device__ __forceinline__ float factor_of(int key) const {
    float found = factor[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) found = key >= g * kGroupKeys ? factor[g] : found;
    return found;
  }
  __device__ __forceinline__ float shift_of(int key) const {
    float found = codes_of_shift(0);
#pragma unroll
    for (int g = 1; g < kGroups; ++g) found = key >= g * kGroupKeys ? codes_of_shift(g) : found;
    return found;
  }

  // Whether a group is to be summed apart, or is of the other sign.
  __device__ __forceinline__ bool is_special() const { return special != 0; }
  __device__ __forceinline__ bool sums_apart(int g) const { return special >> g & 1; }
  __device__ __forceinline__ bool is_negative(int g) const { return special >> (g + kGroups) & 1; }
  __device__ __forceinline__ float exponent(float score, int i, float row_max) const {
    return fmaf(score, factor[group(i)], shift[group(i)] - row_max);
  }
  static __device__ __forceinline__ constexpr int group(int i) { return key_group<kGroupKeys>(i); }

  // What a score stands for, and the way back.
  static __device__ __forceinline__ float number(float score) {
    return kInteger ? from_denormal(score) - kBias : score;
  }
  static __device__ __forceinline__ float score(float number) {
    return kInteger ? fmaf(number, kDenormalUnit, kBias * kDenormalUnit) : number;
  }

 private:
  // Codes that are integers can be moved by integers alone. So the factors are changed by so little
  // that the start's share and the shift make one together, at most a code: the largest score is
  // off by as much, and others in proportion.
  __device__ __forceinline__ void remove_bias(int g, float share, float shift_over_bias) {
    constexpr float kRound = 1.5f * 0x1p23f;  // sums with it are integers
    const float codes = __fsub_rn(share + fmaf(shift_over_bias, -kBias, kRound), kRound);
    factor[g] = fmaf(codes, 1.f / kBias, shift_over_bias);
    shift[g] = codes * -kDenormalUnit;
  }
};

// softcap: the scores become tanh(score * tanh_scale), and the scale's factor is to be the cap.
template <class S, int kCount>
__device__ __forceinline__ void cap_scores(S (&s)[kCount], float tanh_scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i % 8 == 0) __syncwarp();  // ptxas would begin with all at once, and spill
    s[i] = tanh_of_scaled(s[i] * tanh_scale);
  }
}

// A quantized score under softcap, cap * tanh(score / cap), in the units that it has. ratio: score
// over cap of a number of 1. tanh to a relative 2^-11, by one instruction: far finer than P.
__device__ __forceinline__ float capped_number(float number, float ratio, float inverse) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(number * ratio));
  return tanh * inverse;
}

__device__ __forceinline__ float inverse_or_0(float x) { return x == 0.f ? 0.f : __frcp_rn(x); }

// softcap of quantized tensors, so that the scale stays. one_over_cap: in the units of exponents.
template <class S, int kCount, class Scale>
__device__ __forceinline__ void cap_scores(S (&s)[kCount], const Scale& scale, float one_over_cap) {
  float ratio[Scale::kNumGroups], inverse[Scale::kNumGroups];
#pragma unroll
  for (int g = 0; g < Scale::kNumGroups; ++g) {
    ratio[g] = scale.factor[g] * one_over_cap;
    inverse[g] = inverse_or_0(ratio[g]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i % 8 == 0) __syncwarp();
    const int g = Scale::group(i);
    set(s[i], Scale::score(capped_number(Scale::number(get(s[i])), ratio[g], inverse[g])));
  }
}

}  // namespace flashattn3
