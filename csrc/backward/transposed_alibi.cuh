// ALiBi (attention/alibi.cuh) on accumulator fragments of keys x queries.
#pragma once

#include "attention/alibi.cuh"
#include "tile/fragment.h"

namespace flashattn3::backward {

// The term of a warp's 16 keys and a block of kM queries, transposed: rows are keys.
template <int kM>
class TransposedAlibi {
 public:
  static constexpr bool kAny = true;

  // slope: in log2 units. position: of the first query among the keys. first_key: of the warp.
  // column: of register 0. sees_right: whether a query may see keys behind its own position.
  __device__ __forceinline__ TransposedAlibi(float slope, int position, int first_key, int column,
                                             bool sees_right) {
    const bool left = !sees_right || position >= first_key + kRowsOfWarp - 1;
    crossed_ = !left && position + kM - 1 > first_key;
    slope_ = left || crossed_ ? slope : -slope;
    const int row = thread_row(static_cast<int>(threadIdx.x % 32));
    distance_ = static_cast<float>(position + column - first_key - row);
  }

  // Returns whether the block has keys on both sides of a query.
  __device__ __forceinline__ bool is_crossed() const { return crossed_; }
  __device__ __forceinline__ float of(int i) const {
    const float distance = distance_ + (register_column(i) - register_row(i));
    return -slope_ * (crossed_ ? fabsf(distance) : distance);
  }
  // In a block that is not crossed, of(i) = of_row(row_of(i)) + of_column(i).
  __device__ __forceinline__ float of_row(int r) const {
    return -slope_ * (distance_ - kRowStride * r);
  }
  __device__ __forceinline__ float of_column(int i) const { return -slope_ * register_column(i); }

 private:
  bool crossed_;
  float slope_;     // negative on the right of the queries
  float distance_;  // of register 0
};

// In kernels without a term.
struct NoTerm {
  static constexpr bool kAny = false;
};

}  // namespace flashattn3::backward
