// ALiBi (Press, Smith and Lewis 2021): a score loses slope * |distance of query and key|, where the
// last query is at the last key. On one side of the query the term is linear in the key, so a score
// costs one more FMA; only blocks with keys on both sides take the distance of each score.
#pragma once

#include <cstdint>

#include "attention/variant.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// Slopes of the query heads, float32.
struct Slopes {
  const float* data;  // null: none
  int64_t batch;      // stride in elements; 0: all sequences have the same

  __device__ __forceinline__ bool any() const { return data != nullptr; }
  // In log2 units.
  __device__ __forceinline__ float at(int batch_idx, int head) const {
    constexpr float kLog2e = 1.44269504088896f;
    return data[batch_idx * batch + head] * kLog2e;
  }
};

// Scores to exponents in a block whose keys are all on one side of the rows.
struct LinearScale {
  float factor;
  float slope;      // of a key: negative on the right of the rows
  float offset[2];  // slope * distance of the thread's rows from the key of register 0

  __device__ __forceinline__ float exponent(float score, int i, float row_max) const {
    return fmaf(score, factor, fmaf(slope, register_column(i), -(row_max + offset[row_of(i)])));
  }
};

// The same in any block.
struct DistanceScale {
  float factor, slope;
  float distance;  // of register 0

  __device__ __forceinline__ float exponent(float score, int i, float row_max) const {
    const float between = fabsf(distance + (register_row(i) - register_column(i)));
    return fmaf(-slope, between, fmaf(score, factor, -row_max));
  }
};

// The term of a warp's 16 rows and blocks of kN keys.
template <int kN>
class Alibi {
 public:
  // Called before the first block of a work tile. slope: in log2 units.
  __device__ __forceinline__ void set_slope(float slope) { slope_ = slope; }
  // position: of the warp's first row among the keys.
  __device__ __forceinline__ void set_rows(int position) {
    const int lane = threadIdx.x % 32;
    position_ = position;
    distance_ = position + thread_row(lane) - thread_column(lane);
  }

  __device__ __forceinline__ bool any() const { return slope_ != 0.f; }
  // Returns whether the block has keys on both sides of a row of the warp.
  __device__ __forceinline__ bool is_crossed(int first_key) const {
    return any() && first_key + kN - 1 > position_ && first_key < position_ + kRowsOfWarp - 1;
  }
  // In a block that is not crossed.
  __device__ __forceinline__ LinearScale linear(UniformScale scale, int first_key) const {
    const float slope = first_key < position_ ? slope_ : -slope_;
    const float distance = static_cast<float>(distance_ - first_key);
    return {scale.factor, slope, {slope * distance, slope * (distance + kRowStride)}};
  }
  __device__ __forceinline__ DistanceScale exact(UniformScale scale, int first_key) const {
    return {scale.factor, slope_, static_cast<float>(distance_ - first_key)};
  }

 private:
  float slope_;
  int position_;  // of the warp's first row among the keys
  int distance_;  // of register 0 in a block that begins at key 0
};

// In kernels without a term.
struct NoTerm {
  __device__ __forceinline__ bool is_crossed(int) const { return false; }
  __device__ __forceinline__ UniformScale exact(UniformScale scale, int) const { return scale; }
};

}  // namespace flashattn3
