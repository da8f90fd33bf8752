// The mask of causal and sliding window attention: each query row sees an interval of keys, which
// moves with the row and is clipped to the sequence.
#pragma once

#include <cstdint>

#include "tile/fragment.h"

namespace flashattn3 {

// Range of blocks of keys (n_blocks) or of query rows (m_blocks).
struct BlockRange {
  int begin;  // first block
  int end;    // one past the last block; begin == end: no block
  __host__ __device__ __forceinline__ bool has(int block) const {
    return static_cast<uint32_t>(block - begin) < static_cast<uint32_t>(end - begin);
  }
};

// Number of keys that a query sees before and after its own position. Clipped to the length of the
// longest sequence of queries or keys, which is as good as open.
struct Window {
  int left, right;
};

// Row i sees the keys from max(first_key, i + first) to min(num_keys, i + last + 1) - 1.
struct Mask {
  int num_keys;
  int first;
  int last;
  int first_key;  // of a cached sequence, whose earlier keys are hidden; else 0

  static __host__ __device__ __forceinline__ Mask of(int num_rows, int num_keys,
                                                     const Window& window, int first_key = 0) {
    const int shift = num_keys - num_rows;  // bottom-right aligned
    return {num_keys, shift - window.left, shift + window.right, first_key};
  }

  // First key that a row sees, and one past the last.
  __host__ __device__ __forceinline__ int begin(int row) const {
    return max(first_key, row + first);
  }
  __host__ __device__ __forceinline__ int end(int row) const {
    return min(num_keys, row + last + 1);
  }

  // Blocks of kN keys of which a row from first_row to last_row sees at least one key.
  template <int kN>
  __host__ __device__ __forceinline__ BlockRange n_block_range(int first_row, int last_row) const {
    if (last_row < first_row) return {0, 0};
    const int low = begin(first_row) / kN;
    const int high = (max(0, end(last_row)) + kN - 1) / kN;
    return low < high ? BlockRange{low, high} : BlockRange{0, 0};
  }

  // Blocks of kN keys of which every row from first_row to last_row sees every key.
  template <int kN>
  __host__ __device__ __forceinline__ BlockRange full_n_blocks(int first_row, int last_row) const {
    const int low = (begin(last_row) + kN - 1) / kN;
    const int high = max(0, end(first_row)) / kN;
    return {low, max(low, high)};
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

}  // namespace flashattn3
