// attention/mask_lists.cuh: the order of work tiles and their blocks, whatever the lists hold,
// groups of them, and bits of half a block. The emulations of masks as lists compare those of a
// block.
#pragma once

#include "../unit.cuh"
#include "attention/mask_lists.cuh"

namespace unit::mask_lists {

using namespace flashattn3;

constexpr int kRowBlocks = 2, kColumnBlocks = 5, kTiles = 7;

// found: of each rank of each head of each batch_idx row block, place of the list, num_full,
// num_blocks, first_tile.
__global__ void store_blocks(MaskLists lists, int heads, int* found) {
  const int rank = threadIdx.x, head = blockIdx.x % heads, batch_idx = blockIdx.x / heads;
  int row_block;
  const ListedBlocks blocks = lists.blocks_of(batch_idx, head, rank, row_block);
  int* at = found + (blockIdx.x * blockDim.x + rank) * 5;
  at[0] = row_block, at[1] = static_cast<int>(blocks.entries - lists.entries);
  at[2] = blocks.num_full, at[3] = blocks.num_blocks, at[4] = blocks.first_tile;
}

// Lists of one or all batch_idx and heads. Numbers past their bounds are clamped.
inline void check_blocks(Result& result) {
  for (const auto [batch, heads] : {std::pair{1, 1}, {3, 1}, {1, 4}, {3, 4}}) {
    const int lists = batch * heads;
    std::vector<int> work(lists * kRowBlocks * 4);
    for (int i = 0; i < lists * kRowBlocks; ++i) {
      const int line[] = {i % 4, i % 4 + i % 3, i * 10, kRowBlocks - 1 - i % kRowBlocks};
      std::copy(line, line + 4, work.begin() + 4 * i);
    }
    const int last = 4 * (lists * kRowBlocks - 1);
    work[last] = 90, work[last + 1] = 80, work[last + 2] = -3, work[last + 3] = -1;
    Array<int> given(work), entries(lists * kRowBlocks * kColumnBlocks);
    const MaskLists mask{.entries = entries.device(),
                         .work = reinterpret_cast<const int4*>(given.device()),
                         .tiles = nullptr,
                         .batch_lists = batch == 1 ? 0 : heads,
                         .head_lists = heads == 1 ? 0 : 1,
                         .row_blocks = kRowBlocks,
                         .column_blocks = kColumnBlocks,
                         .num_tiles = kTiles};
    const auto at = results_of<int>(12 * kRowBlocks * 5, store_blocks, 12, kRowBlocks, 0, mask, 4);
    for (int i = 0; i < 12 * kRowBlocks; ++i) {
      const int list = i / kRowBlocks / 4 % batch * heads + i / kRowBlocks % 4 % heads;
      const int* line = &work[(list * kRowBlocks + i % kRowBlocks) * 4];
      const int row_block = std::clamp(line[3], 0, kRowBlocks - 1);
      line = &work[(list * kRowBlocks + row_block) * 4];
      const int num_blocks = std::clamp(line[1], 0, kColumnBlocks);
      const int wanted[] = {row_block, (list * kRowBlocks + row_block) * kColumnBlocks,
                            std::min(line[0], num_blocks), num_blocks, std::max(line[2], 0)};
      for (int j = 0; j < 5; ++j) result.equal(wanted[j], at[5 * i + j], "blocks of", i, j);
    }
  }
}

constexpr int kColumns = 1000;

// found: of each block of the group its first key, whether it is partial, its bit tile, and whether
// it ends inside.
__global__ void store_groups(ListedBlocks blocks, int* found) {
  const ListedGroup<128> group(blocks, threadIdx.x, kColumns);
  int* at = found + threadIdx.x * 10;
  for (int j = 0; j < 2; ++j) {
    at[3 * j] = group.first_key[j], at[3 * j + 1] = group.is_partial(j);
    at[3 * j + 2] = group.is_partial(j) ? group.tile(j) : -1;
  }
  at[6] = group.num_partial(), at[7] = group.ends_inside(kColumns);
  for (int j = 0; j < 2; ++j) at[8 + j] = group.ends_inside(j, kColumns);
}

inline void check_groups(Result& result) {
  const std::vector<int> entries = {9, 4, 7, 15, 0, 99};  // 15 ends inside, at 1024
  Array<int> given(entries);
  for (int num_full = 0; num_full <= 5; ++num_full) {
    const auto at = results_of<int>(3 * 10, store_groups, 1, 3, 0,
                                    ListedBlocks{given.device(), num_full, 5, 20});
    for (int i = 0; i < 6; ++i) {
      const bool partial = i >= num_full && i < 5;
      const int* block = &at[i / 2 * 10 + i % 2 * 3];
      result.equal(i < 5 ? 64 * entries[i] : 1024, block[0], "first key", i, num_full);
      result.equal(partial, block[1], "is partial", i, num_full);
      result.equal(partial ? 20 + i - num_full : -1, block[2], "tile", i, num_full);
    }
    for (int i = 0; i < 3; ++i) {
      const int* group = &at[i * 10];
      result.equal(group[1] + group[4], group[6], "partial blocks", i, num_full);
      result.equal(i == 1, group[7], "a block ends inside", i, num_full);
      for (int j = 0; j < 2; ++j) result.equal(2 * i + j == 3, group[8 + j], "ends inside", i, j);
    }
  }
}

// Of a warpgroup whose first row is first_row: half of a block's columns.
__global__ void store_half_hidden(const uint8_t* tile, int first_row, int half, float* found) {
  float s[HalfBlockBits::kRegisters];
  for (float& x : s) x = 1.f;
  HalfBlockBits bits;
  bits.load(tile, first_row + thread_row(threadIdx.x), half);
  bits.hide(s, 0.f);
  for (int i = 0; i < HalfBlockBits::kRegisters; ++i) {
    found[threadIdx.x * HalfBlockBits::kRegisters + i] = s[i];
  }
}

inline void check_half_bits(Result& result) {
  std::mt19937_64 random(2);
  std::vector<uint64_t> rows(kListRows);
  for (uint64_t& row : rows) row = random();
  Array<uint64_t> given(rows);
  const auto* tile = reinterpret_cast<const uint8_t*>(given.device());
  for (int part = 0; part < 4; ++part) {
    const int first_row = part / 2 * 64, half = part % 2;
    const auto found = results_of<float>(128 * HalfBlockBits::kRegisters, store_half_hidden, 1, 128,
                                         0, tile, first_row, half);
    for (int t = 0; t < 128; ++t) {
      for (int i = 0; i < HalfBlockBits::kRegisters; ++i) {
        const int row = first_row + thread_row(t) + register_row(i);
        const int column = half * 32 + thread_column(t) + register_column(i);
        result.equal(rows[row] >> column & 1, found[t * HalfBlockBits::kRegisters + i],
                     "half of a block", t, i);
      }
    }
  }
}

// Each list once: first the longest of all heads, then those of a group of heads.
inline void check_order(Result& result) {
  for (const int num_blocks : {1, 5, 32, 33, 100}) {
    for (const int last_group : {1, 3}) {
      const HeadGroups heads{num_blocks, 7, 2, last_group};
      const int num_long = (num_blocks + 31) / 32;
      std::vector<int> visits(num_blocks * heads.num_heads);
      int previous_group = 0;
      for (int index = 0; index < num_blocks * heads.num_heads; ++index) {
        const TileCoord tile = listed_tile(heads, index);
        ++visits[tile.block * heads.num_heads + tile.batch_head_idx];
        if (index < num_long * heads.num_heads) {
          result.equal(index / heads.num_heads, tile.block, "rank of a long list", index);
          continue;
        }
        const int group = std::min(tile.batch_head_idx, heads.num_heads - last_group) / 2;
        result.equal(1, group >= previous_group, "groups in order", index);
        previous_group = group;
      }
      for (const int visited : visits) result.equal(1, visited, "visits");
    }
  }
}

static const Tests kTests = {{"attention/mask_lists: order", Where::kHost, check_order},
                             {"attention/mask_lists: blocks", Where::kGpu, check_blocks},
                             {"attention/mask_lists: groups", Where::kGpu, check_groups},
                             {"attention/mask_lists: half bits", Where::kGpu, check_half_bits}};

}  // namespace unit::mask_lists
