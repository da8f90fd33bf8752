// tile/permuted_v.h: the order of 16 keys, padded sizes, and where sequences begin.
// row_sum_columns_test.cuh multiplies by a V in this order.
#pragma once

#include <algorithm>

#include "../unit.cuh"
#include "tile/fragment.h"
#include "tile/permuted_v.h"

namespace unit::permuted_v {

using namespace flashattn3;

constexpr bool is_a_permutation() {
  bool seen[kCoreRowKeys] = {};
  for (int quad = 0; quad < 4; ++quad) {
    for (int i = 0; i < 4; ++i) {
      const int key = permuted_key(quad, i);
      if (key < 0 || key >= kCoreRowKeys || seen[key]) return false;
      seen[key] = true;
    }
  }
  return true;
}
static_assert(is_a_permutation());

// Lane t of a quad holds probabilities of its columns in registers 0, 1, 4 and 5 of a row; these
// four keys are the lane's four bytes of the A operand.
inline void check_keys(Result& result) {
  constexpr int kRegisters[4] = {0, 1, 4, 5};
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 4; ++i) {
      result.equal(thread_column(lane) + register_column(kRegisters[i]), permuted_key(lane, i),
                   "key", lane, i);
    }
  }
}

inline void check_sizes(Result& result) {
  for (int head_dim = 1; head_dim <= 256; ++head_dim) {
    const int columns = padded_columns(head_dim);
    result.equal(true, columns >= head_dim && (columns == 64 || columns / 2 < head_dim),
                 "padded_columns covers and is the least", head_dim);
    result.equal(true, columns == 64 || columns == 128 || columns == 256, "padded_columns",
                 head_dim);
  }
  for (int keys = 0; keys <= 200; ++keys) {
    const int64_t padded = padded_keys(keys);
    result.equal(0, padded % 32, "padded_keys modulo 32", keys);
    result.equal(true, padded >= keys && padded < keys + 32, "padded_keys", keys);
  }
}

// Sequences of any lengths, also 0: each begins at a multiple of 32, ends before the next begins
// and before the end of the tensor.
inline void check_sequences(Result& result) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int batch = 1 + static_cast<int>(random() % 9);
    int64_t offset = 0, end = 0;
    for (int b = 0; b < batch; ++b) {
      const int length = random() % 3 == 0 ? 0 : static_cast<int>(random() % 130);
      const int64_t first = first_permuted_key(offset, b);
      result.equal(0, first % kKeyGroup, "first_permuted_key modulo 32", round, b);
      result.equal(true, first >= end, "sequences do not overlap", round, b);
      end = first + padded_keys(length);
      offset += length;
    }
    result.equal(true, end <= first_permuted_key(offset, batch), "end of the tensor", round);
  }
}

static const Tests kTests = {{"tile/permuted_v: keys", Where::kHost, check_keys},
                             {"tile/permuted_v: sizes", Where::kHost, check_sizes},
                             {"tile/permuted_v: sequences", Where::kHost, check_sequences}};

}  // namespace unit::permuted_v
