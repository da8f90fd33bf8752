// After Q and a cache of 8 bits are widened, factors multiply rows of S, and descales of keys
// multiply columns of S and of P.
#pragma once

#include <cstdint>

#include "attention/softmax.cuh"
#include "decode/arguments.h"
#include "decode/descale_unit.cuh"
#include "decode/traits.cuh"
#include "tile/fragment.h"

namespace flashattn3::decode {

template <class Traits>
class ScaledColumns {
  static constexpr int kCount = Traits::kBlockN / 2;
  static constexpr int kStageFloats = Traits::kBlockN;

 public:
  __device__ __forceinline__ ScaledColumns(const Arguments& args, const uint8_t* shared,
                                           int warpgroup)
      : args_(args), shared_(shared), warpgroup_(warpgroup) {}

  // Called after widen_queries.
  __device__ __forceinline__ void begin_part() {
    const auto* factors = reinterpret_cast<const float*>(shared_ + Traits::kRowFactorOffset);
    const int row = thread_row(static_cast<int>(threadIdx.x % 128));
    row_factor_[0] = factors[row], row_factor_[1] = factors[row + kRowStride];
    unit_.reset();
  }

  // Called before the stage of K is released.
  __device__ __forceinline__ void scale_scores(float (&s)[kCount], int stage) const {
    if constexpr (Traits::kElement == ElementType::kBFloat16) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] *= row_factor_[row_of(i)];
    }
    if (!args_.has_key_descales) return;
    const float* descales = descales_of(stage, 0);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float2 x = *reinterpret_cast<const float2*>(descales + register_column(i));
      s[i] *= x.x, s[i + 1] *= x.y, s[i + 2] *= x.x, s[i + 3] *= x.y;
    }
  }

  // factor: of O, which the new unit changes. All lanes of a warp call it before the stage of V is
  // released.
  __device__ __forceinline__ void scale_probabilities(float (&s)[kCount], float (&factor)[2],
                                                      int stage) {
    const float* descales = descales_of(stage, 1);
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float2 x = *reinterpret_cast<const float2*>(descales + register_column(i));
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    const float change = unit_.raise(quad_max(largest));
    factor[0] *= change, factor[1] *= change;
    const float inverse = unit_.inverse();
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float2 x = *reinterpret_cast<const float2*>(descales + register_column(i));
      const float first = x.x * inverse, second = x.y * inverse;
      s[i] *= first, s[i + 1] *= second, s[i + 2] *= first, s[i + 3] *= second;
    }
  }

  __device__ __forceinline__ void end_part(float (&o)[Traits::kOutRegisters]) const {
    if (!args_.has_key_descales) return;
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] *= unit_.value();
  }

 private:
  // Those of this thread's columns, from its register 0 on. tensor: 0: K, 1: V.
  __device__ __forceinline__ const float* descales_of(int stage, int tensor) const {
    const int at = (warpgroup_ * Traits::kStages + stage) * 2 + tensor;
    return reinterpret_cast<const float*>(shared_ + Traits::kDescaleOffset) + at * kStageFloats +
           thread_column(static_cast<int>(threadIdx.x % 32));
  }

  const Arguments& args_;
  const uint8_t* shared_;
  const int warpgroup_;
  float row_factor_[2];
  DescaleUnit unit_;
};

}  // namespace flashattn3::decode
