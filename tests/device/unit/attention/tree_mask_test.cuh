// attention/tree_mask.cuh: bits against the definition, key by key. The emulations compare scores.
#pragma once

#include "../unit.cuh"
#include "attention/tree_mask.cuh"

namespace unit::tree_mask {

using namespace flashattn3;

constexpr int kFurthest = 200;  // from the first new token to the first key of a tile

inline std::vector<uint64_t> bits_of_rows(int num_rows) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> bits{0, ~uint64_t{0}, 1, uint64_t{1} << 63};
  while (static_cast<int>(bits.size()) < num_rows) bits.push_back(random());
  return bits;
}

inline bool sees(uint64_t bits, int token) {
  return token < 0 || (token < 64 && (bits >> token & 1) != 0);
}

inline void check_seen(Result& result) {
  for (const uint64_t bits : bits_of_rows(20)) {
    for (int token = -kFurthest; token <= kFurthest; ++token) {
      const uint64_t seen = seen_in_tree(bits, token);
      for (int i = 0; i < 64; ++i) {
        result.equal(sees(bits, token + i), seen >> i & 1, "seen_in_tree", token, i);
      }
    }
  }
}

static const Tests kTests = {{"attention/tree_mask: bits of 64 keys", Where::kHost, check_seen}};

}  // namespace unit::tree_mask
