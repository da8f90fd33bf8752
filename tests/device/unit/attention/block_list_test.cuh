// attention/block_list.cuh against the definition of visibility, key by key. The emulations compare
// masked scores and probabilities.
#pragma once

#include <algorithm>

#include "../unit.cuh"
#include "attention/block_list.cuh"
#include "backward/work_tile.cuh"

namespace unit::block_list {

using namespace flashattn3;

struct Case {
  int num_rows, num_keys, left, right;

  Mask mask() const { return Mask::of(num_rows, num_keys, {left, right}); }
  // Bottom-right aligned: the last query is at the last key.
  bool visible(int row, int key) const {
    const int diagonal = row + num_keys - num_rows;
    return key >= 0 && key < num_keys && key >= diagonal - left && key <= diagonal + right;
  }
};

// An open window is as long as the longer sequence. More queries than keys: the first rows see
// nothing. Lengths are at, below and above multiples of 16, 64, 80 and 128.
inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int rows : {1, 63, 64, 65, 200}) {
    for (const int keys : {0, 1, 16, 79, 80, 128, 200, 333}) {
      const int open = std::max(rows, keys);
      for (const int left : {0, 1, 63, 64, 100, open}) {
        for (const int right : {0, 1, 64, open}) cases.push_back({rows, keys, left, right});
      }
    }
  }
  return cases;
}

inline std::string name(const char* what, const Case& c) {
  return std::string(what) + " of " + std::to_string(c.num_rows) + " x " +
         std::to_string(c.num_keys) + " window " + std::to_string(c.left) + ", " +
         std::to_string(c.right);
}

// The range from the first to the last block for which holds(block) is true must be `found`.
template <class Holds>
void compare_range(Result& result, const std::string& what, int num_blocks, Holds holds,
                   BlockRange found, int i, int j) {
  int begin = num_blocks, end = 0;
  for (int block = 0; block < num_blocks; ++block) {
    const bool in = holds(block);
    if (in) begin = std::min(begin, block), end = block + 1;
    result.equal(in, found.has(block), what + ", has", i, j);
  }
  if (begin < end) {
    result.equal(begin, found.begin, what + ", begin", i, j);
    result.equal(end, found.end, what + ", end", i, j);
  } else {
    result.equal(0, found.end - found.begin, what + ", length", i, j);
  }
}

constexpr int kBlockM = 64, kBlockN = 80;

// Which blocks of keys a block of rows visits, and which of them need no mask.
inline void check_n_blocks(Result& result) {
  for (const Case& c : all_cases()) {
    const Mask mask = c.mask();
    const int num_blocks = (c.num_keys + kBlockN - 1) / kBlockN;
    for (int first = 0; first < c.num_rows; first += kBlockM) {
      const int last = std::min(first + kBlockM, c.num_rows) - 1;
      const auto seen = [&](int block) {
        for (int row = first; row <= last; ++row) {
          for (int key = block * kBlockN; key < (block + 1) * kBlockN; ++key) {
            if (c.visible(row, key)) return true;
          }
        }
        return false;
      };
      const auto full = [&](int block) {
        for (int row = first; row <= last; ++row) {
          for (int key = block * kBlockN; key < (block + 1) * kBlockN; ++key) {
            if (!c.visible(row, key)) return false;
          }
        }
        return true;
      };
      compare_range(result, name("n_blocks", c), num_blocks, seen,
                    mask.n_blocks<kBlockN>(first, last), first, last);
      compare_range(result, name("full_n_blocks", c), num_blocks, full,
                    mask.full_n_blocks<kBlockN>(first, last), first, last);
    }
    const BlockRange none = mask.n_blocks<kBlockN>(5, 4);
    result.equal(0, none.end - none.begin, name("n_blocks of no rows", c));
  }
}

// The same where the first keys are hidden: the range holds all blocks that are seen, and those
// that need no mask are exact.
inline void check_hidden_keys(Result& result) {
  for (const Case& c : all_cases()) {
    for (const int hidden : {0, 1, 79, 80, 130, c.num_keys}) {
      const int first_key = std::min(hidden, c.num_keys);
      const Mask mask = Mask::of(c.num_rows, c.num_keys, {c.left, c.right}, first_key);
      const auto visible = [&](int row, int key) {
        return key >= first_key && c.visible(row, key);
      };
      const std::string what = name("hidden keys", c) + " from " + std::to_string(first_key);
      for (int first = 0; first < c.num_rows; first += kBlockM) {
        const int last = std::min(first + kBlockM, c.num_rows) - 1;
        const BlockRange range = mask.n_blocks<kBlockN>(first, last);
        const BlockRange full = mask.full_n_blocks<kBlockN>(first, last);
        for (int block = 0; block * kBlockN < c.num_keys; ++block) {
          bool any = false, all = true;
          for (int row = first; row <= last; ++row) {
            for (int key = block * kBlockN; key < (block + 1) * kBlockN; ++key) {
              const bool seen = visible(row, key);
              any = any || seen, all = all && seen;
            }
          }
          if (any) result.equal(true, range.has(block), what + ", range", first, block);
          result.equal(all, full.has(block), what + ", full", first, block);
        }
      }
      for (int row = 0; row < c.num_rows; ++row) {
        for (int key = 0; key < c.num_keys; ++key) {
          const bool in = key >= mask.begin(row) && key < mask.end(row);
          result.equal(visible(row, key), in, what + ", row", row, key);
        }
      }
    }
  }
}

// Which blocks of rows a block of keys visits, and which of them need no mask.
inline void check_m_blocks(Result& result) {
  constexpr int kKeys = 64;
  for (const Case& c : all_cases()) {
    const Mask mask = c.mask();
    const int num_blocks = (c.num_rows + kBlockM - 1) / kBlockM;
    for (int first = 0; first < c.num_keys; first += kKeys) {
      const int last = std::min(first + kKeys, c.num_keys) - 1;
      const auto seen = [&](int block) {
        for (int row = block * kBlockM; row < std::min((block + 1) * kBlockM, c.num_rows); ++row) {
          for (int key = first; key <= last; ++key) {
            if (c.visible(row, key)) return true;
          }
        }
        return false;
      };
      // Rows past the last one count as if the sequence went on: more blocks than it has.
      const auto full = [&](int block) {
        for (int row = block * kBlockM; row < (block + 1) * kBlockM; ++row) {
          for (int key = first; key < first + kKeys; ++key) {
            if (!c.visible(row, key)) return false;
          }
        }
        return true;
      };
      compare_range(result, name("m_blocks_of", c), num_blocks, seen,
                    backward::m_blocks_of<kBlockM>(mask, c.num_rows, first, last), first, last);
      compare_range(result, name("full_m_blocks", c), 16, full,
                    backward::full_m_blocks<kBlockM>(mask, first, first + kKeys - 1), first, last);
    }
    const BlockRange none = backward::m_blocks_of<kBlockM>(mask, c.num_rows, 5, 4);
    result.equal(0, none.end - none.begin, name("m_blocks_of of no keys", c));
  }
}

static const Tests kTests = {
    {"attention/block_list: blocks of keys", Where::kHost, check_n_blocks},
    {"attention/block_list: hidden keys", Where::kHost, check_hidden_keys},
    {"attention/block_list: blocks of queries", Where::kHost, check_m_blocks}};

}  // namespace unit::block_list
