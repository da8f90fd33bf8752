// The work tile of kernel configs whose mask is lists of blocks, and the storage of each config.
#pragma once

#include <type_traits>

#include "attention/mask_lists.cuh"
#include "forward/option_arguments.h"
#include "forward/traits.cuh"

namespace flashattn3::forward {

// With lists n_blocks are positions: groups of the list's blocks that fill a stage, the first group
// at the last position.
template <Config kConfig>
struct ListedWorkTile : WorkTile {
  static constexpr int kGroup = kConfig.block_n / kListColumns;  // blocks of a stage
  ListedBlocks blocks;

  // rank: of the row block, among those of its head.
  __device__ __forceinline__ void set_lists(const Arguments& args, int rank) {
    const MaskLists& lists = static_cast<const ListedArguments&>(args).lists;
    int row_block;
    blocks = lists.blocks_of(batch_idx, head, rank, row_block);
    first_row = row_block * kListRows;
    n_blocks = {0, (blocks.num_blocks + kGroup - 1) / kGroup};
  }

  __device__ __forceinline__ BlockWalk walk(BlockRange visited) const {
    const int full = uniform(blocks.num_full) / kGroup;
    return {visited, {visited.end - full, visited.end}, visited.end - 1};
  }

  // The bits of a group. tiles: those of its stage.
  __device__ __forceinline__ ThreadBits<kGroup> bits(const BlockWalk& at,
                                                     const uint8_t* tiles) const {
    const int first = (at.visited.end - 1 - at.position) * kGroup;
    return ThreadBits<kGroup>::of_group(blocks, first, tiles);
  }
};

template <Config kConfig>
using SharedStorageOf =
    SharedStorage<kConfig.num_stages, kConfig.num_q_buffers,
                  std::conditional_t<kConfig.listed, ListedWorkTile<kConfig>, WorkTile>>;

}  // namespace flashattn3::forward
