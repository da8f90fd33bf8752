// The order of the keys of e4m3 V in memory: a row of bytes for each column and 16 keys.
//
// The second matrix product takes P from the accumulators of the first as they lie in a thread.
// There a thread has, of each 16 keys, {2t, 2t + 1, 8 + 2t, 9 + 2t}, t its place among four; the
// 8-bit product wants four neighbours of it. So the four keys get four neighbouring slots 4t to
// 4t + 3, in P for free and in V once, when it is written. 16 slots of a column are 16 bytes: a row
// of a core matrix of WGMMA, whose second operand has to lie along the keys.
//
// In memory: (heads, keys / 16, columns, 16 slots), dense, columns 64, 128 or 256; with a batch
// dimension in front where the sequences have equal lengths. Else one follows the other.
//
// A tile in shared memory: (columns / 8, keys / 16, 8 columns, 16 slots), so that kRowSumColumns
// more (row_sum_columns.cuh) may lie behind the others.
#pragma once

#include <cstdint>

#include "tile/fragment.h"

namespace flashattn3 {

constexpr int kCoreRowKeys = 16;
constexpr int kKeyGroup = 32;  // sequences begin at multiples
constexpr int kCoreColumns = 8;
constexpr int kCoreBytes = kCoreColumns * kCoreRowKeys;
constexpr int kRowSumColumns = kCoreColumns;

constexpr int padded_columns(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// The first of the four slots' keys is 2t, this is how far slot i of them is from it.
constexpr int permuted_key(int quad, int i) { return 2 * quad + i % 2 + i / 2 * 8; }
static_assert(permuted_key(3, 1) == thread_column(3) + register_column(1) &&
              permuted_key(3, 2) == thread_column(3) + register_column(4));

constexpr int64_t padded_keys(int64_t keys) {
  return (keys + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}

// Of unequal sequences: the first slot of sequence `entry`, which begins at key `offset` of the
// tensor. Known without the lengths before, and no two sequences overlap. With the number of keys
// and of sequences: how many slots there are.
constexpr int64_t first_permuted_key(int64_t offset, int64_t batch_idx) {
  return (offset / kKeyGroup + batch_idx) * kKeyGroup;
}

}  // namespace flashattn3
