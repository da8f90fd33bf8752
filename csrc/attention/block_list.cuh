// Lists of blocks: KV blocks of a query block, query blocks of a KV block (backward/work_tile.cuh).
// A work tile visits a range of a list's positions. The full ones are a range too: every row sees
// every key, so no score is masked. block() maps a position to its block. The only list is an
// interval, whose positions are the blocks themselves. It follows from a mask, causal or a window:
// each query row sees an interval of keys, which moves with the row, clipped to the sequence.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Positions of a list, and its map to blocks.
struct BlockRange {
  int begin, end;  // the first position and one past the last
  __host__ __device__ __forceinline__ int count() const { return end - begin; }
  __host__ __device__ __forceinline__ bool empty() const { return begin == end; }
  __host__ __device__ __forceinline__ bool has(int position) const {
    return static_cast<uint32_t>(position - begin) < static_cast<uint32_t>(end - begin);
  }
  static __host__ __device__ __forceinline__ int block(int position) { return position; }
};

// The positions that a warpgroup of the forward visits, from the last to the first.
struct BlockWalk {
  BlockRange visited, full;
  int position;

  __device__ __forceinline__ int block() const { return visited.block(position); }
  __device__ __forceinline__ bool has_this() const { return position >= visited.begin; }
  __device__ __forceinline__ bool has_next() const { return position > visited.begin; }
  __device__ __forceinline__ bool is_full() const { return full.has(block()); }
  __device__ __forceinline__ void advance() { --position; }
};

// Number of keys that a query sees before and after its own position. Clipped to the length of the
// longest sequence of queries or keys, which is as good as open.
struct Window {
  int left, right;
};

// Row i sees the keys from max(first_key, i + first) to min(num_keys, i + last + 1) - 1.
struct Mask {
  int num_keys, first, last;
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
  __host__ __device__ __forceinline__ BlockRange n_blocks(int first_row, int last_row) const {
    if (last_row < first_row) return {0, 0};
    const int low = begin(first_row) / kN;
    const int high = (max(0, end(last_row)) + kN - 1) / kN;
    return low < high ? BlockRange{low, high} : BlockRange{0, 0};
  }

  // Those of which every row from first_row to last_row sees every key.
  template <int kN>
  __host__ __device__ __forceinline__ BlockRange full_n_blocks(int first_row, int last_row) const {
    const int low = (begin(last_row) + kN - 1) / kN;
    const int high = max(0, end(first_row)) / kN;
    return {low, max(low, high)};
  }
};

}  // namespace flashattn3
