// The tokens of a work tile, and how many work tiles a sequence has.
#pragma once

#include <cstdint>

namespace flashattn3 {

// A work tile has `slices` slices of so many rows. The slices of `heads` heads of a sequence are
// numbered together.
struct TileShape {
  int rows;
  int slices = 1;
  int heads = 1;

  // Work tiles of a sequence, for these heads.
  __host__ __device__ __forceinline__ int64_t num_blocks(int64_t tokens) const {
    return ((tokens + rows - 1) / rows * heads + slices - 1) / slices;
  }
  // At most, for `batch` sequences that share the tokens.
  __host__ __device__ __forceinline__ int64_t most_blocks(int64_t tokens, int64_t batch) const {
    return ((tokens / rows + batch) * heads + (slices - 1) * batch) / slices;
  }
};

}  // namespace flashattn3
