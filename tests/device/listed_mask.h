// A random mask of a case, and its lists of blocks (attention/mask_lists.cuh), on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "attention/list_sizes.h"
#include "backward/waves.h"
#include "launch/params.h"

// Which keys each query sees.
struct RandomMask {
  int batch, heads, queries, keys;  // batch, heads: 1 or those of q; 0: no mask
  std::vector<uint8_t> seen;        // (batch, heads, queries, keys)

  bool sees(int b, int h, int query, int key) const {
    const int64_t list = int64_t{batch == 1 ? 0 : b} * heads + (heads == 1 ? 0 : h);
    return seen[(list * queries + query) * keys + key] != 0;
  }

  // For each list, blocks of 128 rows that see all, nothing, whole blocks, half of the keys, and
  // few; every third list hides a block of 128 keys from all.
  RandomMask(int batch, int heads, int queries, int keys)
      : batch(batch),
        heads(heads),
        queries(queries),
        keys(keys),
        seen(static_cast<size_t>(batch) * heads * queries * keys) {
    std::mt19937 random(77);
    const auto some = [&](uint32_t of) { return random() % of == 0; };
    for (int list = 0; list < batch * heads; ++list) {
      const int hidden = list % 3 == 1 ? static_cast<int>(random() % (keys / 128 + 1)) : -1;
      for (int query = 0, first = list % 5; query < queries; ++query) {
        enum { kBlocks, kAll, kHalf, kFew, kNothing };
        const int kind = (first + query / 128) % 5;
        for (int key = 0; key < keys; ++key) {
          const uint32_t block = (list * 31 + query / 128 * 7 + key / 64) * 2654435761u >> 24;
          const bool drawn = kind == kBlocks ? block % 3 == 0 || (block % 3 == 1 && some(4))
                             : kind == kHalf ? query % 16 != 5 && some(2)
                             : kind == kFew  ? some(50)
                                             : kind == kAll;
          seen[(int64_t{list} * queries + query) * keys + key] = drawn && key / 128 != hidden;
        }
      }
    }
  }
};

// The lists of queries, or of keys, whose columns are queries.
struct BlockLists {
  std::vector<int32_t> entries, work, turns;
  std::vector<int64_t> tiles;
  int batch, heads;

  BlockLists(const RandomMask& mask, bool of_keys) : batch(mask.batch), heads(mask.heads) {
    const int rows = of_keys ? mask.keys : mask.queries;
    const int columns = of_keys ? mask.queries : mask.keys;
    const int row_blocks = (rows + flashattn3::kListRows - 1) / flashattn3::kListRows;
    const int blocks = (columns + flashattn3::kListColumns - 1) / flashattn3::kListColumns;
    for (int list = 0; list < batch * heads; ++list) {
      const auto sees = [&](int row, int column) {
        if (row >= rows || column >= columns) return false;
        const int query = of_keys ? column : row, key = of_keys ? row : column;
        return mask.sees(list / heads, list % heads, query, key);
      };
      std::vector<std::vector<int32_t>> listed(row_blocks);
      std::vector<int32_t> lines;
      for (int r = 0; r < row_blocks; ++r) {
        add_row_block(sees, r, std::min(flashattn3::kListRows, rows - r * flashattn3::kListRows),
                      blocks, listed[r], lines);
      }
      add_order(listed, blocks, lines);
    }
  }

  // memory: returns where the kernels can read a vector.
  template <class Memory>
  flashattn3::MaskListParams params(Memory& memory) const {
    return {.entries = memory(entries),
            .work = memory(work),
            .tiles = memory(tiles),
            .batch = batch,
            .heads = heads,
            .num_tiles = static_cast<int>(tiles.size()) / flashattn3::kListRows};
  }

 private:
  // Appends the entries, and the tiles of the partial blocks.
  template <class Sees>
  void add_row_block(Sees sees, int r, int length, int blocks, std::vector<int32_t>& listed,
                     std::vector<int32_t>& lines) {
    std::vector<int32_t> full, partial, hidden;
    const auto first_tile = static_cast<int32_t>(tiles.size() / flashattn3::kListRows);
    for (int block = 0; block < blocks; ++block) {
      std::vector<int64_t> words(flashattn3::kListRows);
      int count = 0;
      for (int i = 0; i < flashattn3::kListRows; ++i) {
        for (int j = 0; j < flashattn3::kListColumns; ++j) {
          if (!sees(r * flashattn3::kListRows + i, block * flashattn3::kListColumns + j)) continue;
          words[i] |= int64_t{1} << j;
          ++count;
        }
      }
      if (count == length * flashattn3::kListColumns) {
        full.push_back(block);
      } else if (count > 0) {
        partial.push_back(block);
        tiles.insert(tiles.end(), words.begin(), words.end());
      } else {
        hidden.push_back(block);
      }
    }
    lines.insert(lines.end(), {static_cast<int32_t>(full.size()),
                               static_cast<int32_t>(full.size() + partial.size()), first_tile});
    for (const auto& kind : {full, partial}) listed.insert(listed.end(), kind.begin(), kind.end());
    entries.insert(entries.end(), listed.begin(), listed.end());
    entries.insert(entries.end(), hidden.begin(), hidden.end());
  }

  // Appends work, with the row blocks of the longest lists first, and turns.
  void add_order(const std::vector<std::vector<int32_t>>& listed, int blocks,
                 const std::vector<int32_t>& lines) {
    const int row_blocks = static_cast<int>(listed.size());
    std::vector<int> order(row_blocks), rank(row_blocks);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return listed[a].size() > listed[b].size(); });
    for (int i = 0; i < row_blocks; ++i) {
      rank[order[i]] = i;
      work.insert(work.end(), lines.begin() + 3 * i, lines.begin() + 3 * i + 3);
      work.push_back(order[i]);
    }
    // Of each entry, in ascending order of additions: its wave, its step in its work tile, the
    // tile.
    using Place = std::array<int, 3>;
    const auto place = [&](int r, int i) -> Place {
      const int full = lines[3 * r], size = lines[3 * r + 1], drawn = row_blocks - 1 - rank[r];
      return {drawn / flashattn3::backward::kWave, i < full ? i + size - full : i - full, drawn};
    };
    for (int r = 0; r < row_blocks; ++r) {
      for (int i = 0; i < static_cast<int>(listed[r].size()); ++i) {
        int before = 0;
        for (int other = 0; other < row_blocks; ++other) {
          const auto found = std::find(listed[other].begin(), listed[other].end(), listed[r][i]);
          before += found != listed[other].end() &&
                    place(other, static_cast<int>(found - listed[other].begin())) < place(r, i);
        }
        turns.push_back(before);
      }
      turns.insert(turns.end(), blocks - listed[r].size(), -1);  // of hidden blocks: not read
    }
  }
};
