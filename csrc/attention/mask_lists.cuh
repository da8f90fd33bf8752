// A mask as lists of blocks (flashattn3/masks/block_lists.py): for each block of 128 rows the
// blocks of 64 columns that one of them sees, first the full ones, then the partial ones, which
// have a tile of bits each. Rows are queries in the forward. In the backward they are keys, and the
// columns are queries.
#pragma once

#include <cstdint>

#include "attention/list_sizes.h"
#include "attention/tile_scheduler.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

enum BlockKind : uint32_t { kHiddenBlock, kPartialBlock, kFullBlock };

// The blocks of a work tile's rows.
struct ListedBlocks {
  const int32_t* entries;    // of its list
  int num_full, num_blocks;  // the first entries are full, those after them partial
  int first_tile;            // the bit tile of the first partial one; the others follow
};

struct MaskLists {
  const int32_t* entries;       // (lists, row_blocks, column_blocks)
  const int4* work;             // (lists, row_blocks): num_full, num_blocks and first_tile of each
                                // row block; the last numbers are the row blocks, longest first
  const uint8_t* tiles;         // (num_tiles, kBitTileBytes)
  int batch_lists, head_lists;  // from one batch_idx or head to the next; 0: they share a list
  int row_blocks, column_blocks;
  int num_tiles;

  __device__ __forceinline__ int64_t row_blocks_before(int batch_idx, int head) const {
    return (int64_t{batch_idx} * batch_lists + int64_t{head} * head_lists) * row_blocks;
  }
  // The rank-th longest row block. Values are clamped, here and below, so that no mask causes an
  // access outside of these tensors.
  __device__ __forceinline__ int row_block_of(int64_t before, int rank) const {
    return min(max(__ldg(&work[before + rank].w), 0), row_blocks - 1);
  }
  __device__ __forceinline__ ListedBlocks blocks_of(int64_t before, int row_block) const {
    const int4 found = __ldg(work + before + row_block);
    const int num_blocks = min(max(found.y, 0), column_blocks);
    return {entries + (before + row_block) * column_blocks, min(found.x, num_blocks), num_blocks,
            max(found.z, 0)};
  }
  // The blocks of the rank-th longest row block.
  __device__ __forceinline__ ListedBlocks blocks_of(int batch_idx, int head, int rank,
                                                    int& row_block) const {
    const int64_t before = row_blocks_before(batch_idx, head);
    row_block = row_block_of(before, rank);
    return blocks_of(before, row_block);
  }
  __device__ __forceinline__ const uint8_t* tile(int index) const {
    return tiles + int64_t{min(index, num_tiles - 1)} * kBitTileBytes;
  }
};

// The work tile of a scheduler index: the longest lists of all heads, then the others of each head
// as tile_coord orders them. A list of all columns, as that of global tokens, would otherwise be
// computed alone at the end, when its head is the last. `block` of the result is a rank.
__host__ __device__ __forceinline__ TileCoord listed_tile(const HeadGroups& heads, int index) {
  constexpr int kListsOfLong = 32;  // of which one comes first
  const int num_long = (heads.num_blocks + kListsOfLong - 1) / kListsOfLong;
  const int rank = index / heads.num_heads;
  if (rank < num_long) return {rank, index - rank * heads.num_heads};
  HeadGroups others = heads;
  others.num_blocks -= num_long;
  TileCoord coord = tile_coord(others, false, index - num_long * heads.num_heads);
  coord.block += num_long;
  return coord;
}

// The i-th kN columns of a list: blocks that a stage of the pipeline holds together.
template <int kN>
struct ListedGroup {
  static constexpr int kBlocks = kN / kListColumns;
  int first_key[kBlocks];  // past the end of the list: that of the first block without columns

  __device__ __forceinline__ ListedGroup(const ListedBlocks& blocks, int i, int num_columns)
      : blocks_(blocks), first_(i * kBlocks) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      first_key[j] = first_ + j < blocks.num_blocks
                         ? __ldg(blocks.entries + first_ + j) * kListColumns
                         : (num_columns + kListColumns - 1) / kListColumns * kListColumns;
    }
  }
  // Whether a block has columns past the last one.
  __device__ __forceinline__ bool ends_inside(int j, int num_columns) const {
    return first_key[j] < num_columns && num_columns - first_key[j] < kListColumns;
  }
  __device__ __forceinline__ bool ends_inside(int num_columns) const {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) any = any || ends_inside(j, num_columns);
    return any;
  }
  __device__ __forceinline__ bool is_partial(int j) const {
    return first_ + j >= blocks_.num_full && first_ + j < blocks_.num_blocks;
  }
  __device__ __forceinline__ int num_partial() const {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) count += is_partial(j);
    return count;
  }
  // The bit tile of a partial block.
  __device__ __forceinline__ int tile(int j) const {
    return blocks_.first_tile + first_ + j - blocks_.num_full;
  }

 private:
  const ListedBlocks& blocks_;
  int first_;
};

// The bits of this thread's two rows in the blocks of a group.
template <int kBlocks>
struct ThreadBits {
  static constexpr int kRegisters = kListColumns / 2;  // of a block
  uint32_t word[kBlocks][2][2];                        // of each block, row and half of 64 columns

  // Bits of a list's blocks from the first-th on. No row sees what is past the end of the list.
  // tiles: in shared memory, that of a full block is not read.
  static __device__ __forceinline__ ThreadBits of_group(const ListedBlocks& blocks, int first,
                                                        const uint8_t* tiles) {
    const int num_full = uniform(blocks.num_full), num_blocks = uniform(blocks.num_blocks);
    ThreadBits bits;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (first + i < num_full || first + i >= num_blocks) {
        bits.fill(i, first + i < num_full ? ~0u : 0u);
      } else {
        bits.load(i, tiles + i * kBitTileBytes);
      }
    }
    return bits;
  }

  // kinds: two bits for each block, a BlockKind. tiles: as above, tile_bytes apart.
  static __device__ __forceinline__ ThreadBits of_kinds(uint32_t kinds, const uint8_t* tiles,
                                                        int tile_bytes) {
    ThreadBits bits;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if ((kinds >> 2 * i & 3) == kPartialBlock) {
        bits.load(i, tiles + i * tile_bytes);
      } else {
        bits.fill(i, kinds >> 2 * i & kFullBlock ? ~0u : 0u);
      }
    }
    return bits;
  }

  // tile: of a block, in shared or global memory.
  __device__ __forceinline__ void load(int block, const uint8_t* tile) {
    const uint2* rows = reinterpret_cast<const uint2*>(tile) + thread_row(threadIdx.x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2 bits = rows[kRowStride * r];
      word[block][r][0] = bits.x, word[block][r][1] = bits.y;
    }
  }
  // All columns of a block are visible (~0) or hidden (0).
  __device__ __forceinline__ void fill(int block, uint32_t bits) {
    word[block][0][0] = word[block][0][1] = word[block][1][0] = word[block][1][1] = bits;
  }

  // The first num_rows rows, counted from the thread's first one, see all columns of a block.
  __device__ __forceinline__ void fill_rows(int block, int num_rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      word[block][r][0] = word[block][r][1] = kRowStride * r < num_rows ? ~0u : 0u;
    }
  }

  // Whether the row of a register sees its column. i: a constant, so that ptxas shifts a word once
  // and then tests constant bits.
  __device__ __forceinline__ bool sees(int i) const {
    const int column = register_column(i % kRegisters);
    const uint32_t mine =
        word[i / kRegisters][row_of(i)][column / 32] >> thread_column(threadIdx.x);
    return mine >> column % 32 & 1;
  }
  template <class S>
  __device__ __forceinline__ void hide(S (&s)[kBlocks * kRegisters], float hidden) const {
#pragma unroll
    for (int i = 0; i < kBlocks * kRegisters; ++i) {
      if (!sees(i)) set(s[i], hidden);
    }
  }
};

// The bits of a thread's two rows in half of a block's columns.
struct HalfBlockBits {
  static constexpr int kRegisters = kListColumns / 4;
  uint32_t word[2];

  // row: the first of the thread in the tile.
  __device__ __forceinline__ void load(const uint8_t* tile, int row, int half) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile) + row * 2 + half;
    word[0] = __ldg(words), word[1] = __ldg(words + kRowStride * 2);
  }
  // As ThreadBits::fill_rows.
  __device__ __forceinline__ void fill_rows(int num_rows) {
    word[0] = num_rows > 0 ? ~0u : 0u, word[1] = num_rows > kRowStride ? ~0u : 0u;
  }
  __device__ __forceinline__ void hide(float (&s)[kRegisters], float hidden) const {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const uint32_t mine = word[row_of(i)] >> thread_column(threadIdx.x);
      if (!(mine >> register_column(i) & 1)) s[i] = hidden;
    }
  }
};

// A mask without lists.
struct NoBits {};

}  // namespace flashattn3
