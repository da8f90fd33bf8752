// The work tile of kernel configs whose mask is lists of blocks, and the storage of each config.
#pragma once

#include <type_traits>

#include "attention/joined_lists.cuh"
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

// The work tile of configs that join the lists of two row blocks; n_blocks are stages.
struct JoinedWorkTile : WorkTile {
  JoinedStages stages;
  static constexpr int kProducerReaders = 0;

  // A warpgroup's share: the positions of its walk, and the stages before and after them.
  template <class Work>
  __device__ __forceinline__ Work share(int warpgroup) const {
    const int count = uniform(n_blocks.end);
    const JoinedWalk at = walk(warpgroup);
    if (!at.has_this()) return {{0, 0}, count, 0};
    return {{at.position, at.last + 1}, at.position, count - 1 - at.last};
  }
  // Over the stages of the list that the 64 rows of a warpgroup belong to.
  __device__ __forceinline__ JoinedWalk walk(int warpgroup) const {
    const int list = (first_row + 64 * warpgroup) / kListRows - first_row / kListRows;
    return JoinedWalk({uniform(stages.excess), uniform(stages.pairs), uniform(stages.both),
                       uniform(stages.longer)},
                      uniform(list));
  }
};

// Between the producer, which asks for the list of a work tile that it has drawn, and the warp that
// joins it. Arrivals per phase:
//   wanted_full   1: the producer, which has written `wanted`
//   joined_full  32: the lanes of the warp, which has written how many stages the list has
//   chunk_full   32: these lanes, which have written stages
//   chunk_empty   1: the producer
// No barrier says that `wanted` and `stages` are free: the producer asks for a list after it has
// published the work tile of the one before, so two buffers suffice.
template <Config kConfig>
struct JoinedStorage : SharedStorage<kConfig.num_stages, kConfig.num_q_buffers, JoinedWorkTile> {
  using Base = SharedStorage<kConfig.num_stages, kConfig.num_q_buffers, JoinedWorkTile>;
  static constexpr int kChunk = 32;  // stages
  struct Wanted {
    int batch_idx, head;
    int first_row;  // of the work tile; -1: no tile is left
  };
  Barrier wanted_full[2], joined_full[2], chunk_full[2], chunk_empty[2];
  Wanted wanted[2];
  JoinedStages stages[2];
  uint32_t kinds[kConfig.num_stages];  // of the blocks of a K stage
  JoinedStage<kConfig.block_n / kListColumns> chunk[2][kChunk];
  JoinedLists<kJoinedWords> lists;  // of the warp that joins them

  __device__ __forceinline__ void init(int consumer_warps, bool quantized) {
    for (int i = 0; i < 2; ++i) {
      wanted_full[i].init(1), joined_full[i].init(32);
      chunk_full[i].init(32), chunk_empty[i].init(1);
    }
    Base::init(consumer_warps, quantized);
  }
};

template <Config kConfig>
using SharedStorageOf = std::conditional_t<
    OptionTraits<kConfig>::kJoined, JoinedStorage<kConfig>,
    SharedStorage<kConfig.num_stages, kConfig.num_q_buffers,
                  std::conditional_t<kConfig.listed, ListedWorkTile<kConfig>, WorkTile>>>;

}  // namespace flashattn3::forward
