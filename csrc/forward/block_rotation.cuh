// The order in which a work tile with slopes visits its blocks.
#pragma once

#include "attention/block_list.cuh"
#include "forward/arguments.h"
#include "forward/config.h"

namespace flashattn3::forward {

// How far the list of a work tile's blocks is rotated, so that the block with the last row's own
// position is visited first, then those before it, then those behind it from the last on. With
// slopes scores are largest near that position: row_max of the first block is then near the
// largest, where a walk from the last block would raise it in each. It is 0 unless all rows of the
// CTA see all blocks and none needs zero fill.
template <Config kConfig, class Tile>
__device__ __forceinline__ int rotation_of(const Arguments& args, const Tile& tile) {
  if constexpr (!has_slopes(kConfig.term)) return 0;
  const int count = tile.n_blocks.end, widest = max(tile.num_rows, tile.num_keys);
  const bool all = min(args.variant.window.left, args.variant.window.right) >= widest;
  const bool may_end_inside =
      args.seqlens_k.cu_seqlens != nullptr || args.seqlens_k.seqused != nullptr;
  if (!all || may_end_inside || !args.slopes.any()) return 0;
  const int position = tile.first_row + kConfig.block_m - 1 + tile.num_keys - tile.num_rows;
  return count - 1 - min(max(position, 0) / kConfig.block_n, count - 1);
}

// Returns the block at a position of a rotated list of `count` blocks from 0 on, or of any list
// that is not rotated.
__device__ __forceinline__ int rotated(int position, int rotation, int count) {
  if (rotation == 0) return position;
  return position < rotation ? position - rotation + count : position - rotation;
}

struct RotatedWalk : BlockWalk {
  int rotation = 0;

  __device__ __forceinline__ int block() const {
    return rotated(BlockWalk::block(), rotation, visited.end);
  }
  __device__ __forceinline__ bool is_full() const { return full.has(block()); }
};

}  // namespace flashattn3::forward
