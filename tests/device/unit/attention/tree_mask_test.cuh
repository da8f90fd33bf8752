// attention/tree_mask.cuh against the definition, key by key.
#pragma once

#include "../unit.cuh"
#include "attention/tree_mask.cuh"
#include "tile/fragment.h"

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

// One warp with 16 rows; scores are 1.
template <int kN>
__global__ void hide_scores(const uint64_t* bits, int first_token, float* found) {
  const int row = thread_row(threadIdx.x);
  const TreeRows rows{{bits[row], bits[row + kRowStride]}};
  float s[kN / 2];
  for (int i = 0; i < kN / 2; ++i) s[i] = 1.f;
  rows.hide<kN>(s, first_token);
  store_fragment<kN>(s, found);
}

template <int kN>
void check_scores(Result& result) {
  const std::vector<uint64_t> of_rows = bits_of_rows(kRowsOfWarp);
  Array<uint64_t> bits(of_rows);
  for (const int first : {-kFurthest, -kN, -kN + 1, -65, -64, -63, -7, 0, 1, 40, 63, 64}) {
    const auto s =
        results_of<float>(kRowsOfWarp * kN, hide_scores<kN>, 1, 32, 0, bits.device(), first);
    for (int row = 0; row < kRowsOfWarp; ++row) {
      for (int i = 0; i < kN; ++i) {
        const float wanted = sees(of_rows[row], first + i) ? 1.f : -INFINITY;
        result.equal(wanted, s[row * kN + i], "scores from " + std::to_string(first), row, i);
      }
    }
  }
}

static const Tests kTests = {
    {"attention/tree_mask: bits of 64 keys", Where::kHost, check_seen},
    {"attention/tree_mask: scores, 32 keys", Where::kGpu, check_scores<32>},
    {"attention/tree_mask: scores, 64 keys", Where::kGpu, check_scores<64>},
    {"attention/tree_mask: scores, 128 keys", Where::kGpu, check_scores<128>}};

}  // namespace unit::tree_mask
