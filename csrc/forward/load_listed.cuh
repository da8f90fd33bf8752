// Loads of kernel configs whose mask is lists of blocks: stages of any blocks, and bits.
#pragma once

#include "attention/mask_lists.cuh"
#include "forward/listed_work_tile.cuh"
#include "tile/permuted_v_tile.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::forward {

struct NoGroup {};

// The blocks of the i-th stage of a work tile. Called before the wait for the stage, so that the
// list is read meanwhile.
template <class Traits, class Tile>
__device__ __forceinline__ auto group_of(const Tile& tile, int i) {
  if constexpr (Traits::kListed) {
    return ListedGroup<Traits::kBlockN>(tile.blocks, i, tile.num_keys);
  } else {
    return NoGroup{};
  }
}

// A box for each block. In place of those past the end of the list, boxes past the end of K and V
// arrive as zeros.
template <class Traits, int kAtoms, class Load, class Group>
__device__ __forceinline__ void load_boxes(uint8_t* stage, const CUtensorMap* map, Barrier& full,
                                           const Load& load, const Group& group) {
#pragma unroll
  for (int j = 0; j < Group::kBlocks; ++j) {
    copy_tile<kListColumns, kAtoms, Traits::kAtomColumns, Traits::kBlockN>(
        stage + j * kListColumns * 128, map, full, kReadAgain, group.first_key[j], load.kv_head,
        load.kv_batch_coord);
  }
}

// K of a stage, and the bits of its partial blocks.
template <class Traits, class Load, class Group>
__device__ __forceinline__ void load_listed_k(const Arguments& args, uint8_t* stage, uint8_t* bits,
                                              Barrier& full, const Load& load, const Group& group) {
  full.arrive_and_expect(Traits::kKBytes + group.num_partial() * kBitTileBytes);
  load_boxes<Traits, Traits::kAtoms>(stage, &args.k, full, load, group);
  const MaskLists& lists = static_cast<const ListedArguments&>(args).lists;
#pragma unroll
  for (int j = 0; j < Group::kBlocks; ++j) {
    if (!group.is_partial(j)) continue;
    copy_bytes(bits + j * kBitTileBytes, lists.tile(group.tile(j)), full, kBitTileBytes);
  }
}

template <class Traits, class Load, class Group>
__device__ __forceinline__ void load_listed_v(const Arguments& args, uint8_t* stage, Barrier& full,
                                              const Load& load, const Group& group) {
  if constexpr (Traits::kQuantized) {
    const int head = load.kv_batch_coord * args.num_heads_kv + load.kv_head;
    full.arrive_and_expect(Traits::kBlockN * Traits::kHeadDim);
#pragma unroll
    for (int j = 0; j < Group::kBlocks; ++j) {
      copy_permuted_v(stage + j * (Traits::kVBytes / Group::kBlocks), &args.v, full, kReadAgain,
                      group.first_key[j], head);
    }
  } else {
    full.arrive_and_expect(Traits::kVBytes);
    load_boxes<Traits, Traits::kAtomsV>(stage, &args.v, full, load, group);
  }
}

}  // namespace flashattn3::forward
