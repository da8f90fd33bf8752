// Scales of quantized tensors, from a tile's scores to softmax exponents: a factor and a shift for
// each group of keys. Exponents are in e4m3 codes, 8 per octave (softmax_e4m3.cuh).
#pragma once

#include <cstdint>

#include "ptx/approximations.cuh"
#include "ptx/convert_fp8.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/gemm_int8.cuh"

namespace flashattn3 {

constexpr float kCodesPerOctave = 8.f;

// Descales of a K and V tile, for each group of keys that share them. k: K's descale. shift: log2
// of V's descale over the work tile's v_scale, in codes; the exponent adds it, so it scales the
// probabilities. The inverse of that factor is the keys' weight in the row sum
// (row_sum_columns.cuh). If a group's V is far smaller than V before it, its probabilities are too
// small for that: its weight is 0 and bit g of `special` is set. If its descale has another sign
// than v_scale, its probabilities and weight are negative and bit g + kGroups is set.
template <int kGroups>
struct alignas(16) KvDescales {
  static_assert(kGroups <= 4);
  float k[kGroups];
  float shift[kGroups];  // int8: divided by kInt8Bias
  uint32_t special;
};

// The register at row `row` of its thread's two rows and this distance of columns from register 0:
// the inverse of row_of and register_column.
constexpr int register_at(int row, int column) { return column / 8 * 4 + row * 2 + column % 2; }

// Returns a bit for each of the row's four lanes. All lanes of the warp must call it.
__device__ __forceinline__ uint32_t quad_bits(bool condition) {
  return __ballot_sync(~0u, condition) >> (threadIdx.x % 32 & ~3) & 15u;
}

// Finds the largest exponent of each row of this thread; exponents may have any sign.
template <class S, int kCount>
__device__ __forceinline__ void find_highest(float (&highest)[2], const S (&s)[kCount]) {
  highest[0] = highest[1] = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) highest[row_of(i)] = max_or_nan(highest[row_of(i)], get(s[i]));
}

// Group of accumulator register i: the columns of all lanes of a register are 8 neighbouring ones.
template <int kGroupKeys>
__device__ __forceinline__ constexpr int key_group(int i) {
  return register_column(i) / kGroupKeys;
}

// A thread's copy of the descales for one tile of scores. kBias: accumulator bias of integer
// scores (gemm_int8.cuh); 0: scores are floats.
template <int kGroups, int kGroupKeys, int kBias>
struct BlockScale {
  static constexpr int kNumGroups = kGroups;
  static constexpr bool kInteger = kBias != 0;
  float factor[kGroups];
  float shift[kGroups];  // integer scores, after complete(): also subtracts the bias
  uint32_t special;

  __device__ __forceinline__ explicit BlockScale(const KvDescales<kGroups>& keys)
      : special(keys.special) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      factor[g] = keys.k[g];
      shift[g] = keys.shift[g];
    }
  }

  // Call it once, before any other method, and long after the constructor: its shared memory reads
  // are slow while WGMMA reads shared memory too. q_factor: for integers multiplied by kBias.
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

  // Shift of group g, in codes; after complete().
  __device__ __forceinline__ float codes_of_shift(int g) const {
    return kInteger ? fmaf(factor[g], kBias, from_denormal(shift[g])) : shift[g];
  }

  // Factor and shift of the group of a key of the tile, in codes; after complete().
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

  // Whether a group of the tile is summed without the extra columns or has the other sign.
  __device__ __forceinline__ bool is_special() const { return special != 0; }
  __device__ __forceinline__ bool sums_apart(int g) const { return special >> g & 1; }
  __device__ __forceinline__ bool is_negative(int g) const { return special >> (g + kGroups) & 1; }
  __device__ __forceinline__ float exponent(float score, int i, float row_max) const {
    return fmaf(score, factor[group(i)], shift[group(i)] - row_max);
  }
  static __device__ __forceinline__ constexpr int group(int i) { return key_group<kGroupKeys>(i); }

  // Converts an accumulator value to the score it stands for, and back.
  static __device__ __forceinline__ float number(float score) {
    return kInteger ? from_denormal(score) - kBias : score;
  }
  static __device__ __forceinline__ float score(float number) {
    return kInteger ? fmaf(number, kDenormalUnit, kBias * kDenormalUnit) : number;
  }

 private:
  // Integer codes can only be shifted by integers. So the factor is changed slightly, such that
  // the bias's share and the shift together are an integer, at most one code away: the largest
  // score is off by as much, others in proportion.
  __device__ __forceinline__ void remove_bias(int g, float share, float shift_over_bias) {
    constexpr float kRound = 1.5f * 0x1p23f;  // adding it rounds to an integer
    const float codes = __fsub_rn(share + fmaf(shift_over_bias, -kBias, kRound), kRound);
    factor[g] = fmaf(codes, 1.f / kBias, shift_over_bias);
    shift[g] = codes * -kDenormalUnit;
  }
};

// Returns cap * tanh(score / cap) in the units of `number`. ratio: score / cap at number = 1;
// inverse: 1 / ratio. The error of the one instruction is far below that of P.
__device__ __forceinline__ float capped_number(float number, float ratio, float inverse) {
  return tanh_approx(number * ratio) * inverse;
}

__device__ __forceinline__ float inverse_or_0(float x) { return x == 0.f ? 0.f : __frcp_rn(x); }

// Caps scores; the scale is unchanged. one_over_cap: of ScoreScale, in the units of exponents.
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
