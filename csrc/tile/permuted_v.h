// Permuted V: the order of the keys of e4m3 V in memory, K-major, 16 keys of a column in a row.
//
// The PV GEMM takes P from the accumulators of the QK^T GEMM without shuffles. Of each 16 keys,
// lane t of a quad holds {2t, 2t + 1, 8 + 2t, 9 + 2t} (fragment.h), but the A operand of the 8-bit
// GEMM takes four neighbouring keys from a lane. So these four keys get the neighbouring positions
// 4t to 4t + 3: in P at no cost, in V once, when it is quantized. The 16 keys of a column are 16
// bytes: one row of a core matrix of WGMMA, which takes 8-bit B operands K-major only.
//
// In memory the shape is (heads, keys / 16, columns, 16 keys), dense, with 64, 128 or 256 columns.
// Sequences of equal lengths have a batch dimension in front of it; varlen sequences follow each
// other along the keys.
//
// A tile in shared memory has the shape (columns / 8, keys / 16, 8 columns, 16 keys), so that
// kRowSumColumns more columns (row_sum_columns.cuh) can follow.
#pragma once

#include <cstdint>

namespace flashattn3 {

constexpr int kCoreRowKeys = 16;  // keys, and bytes, of a row of a core matrix
constexpr int kKeyGroup = 32;     // every sequence begins at a multiple of it
constexpr int kCoreColumns = 8;   // rows of a core matrix
constexpr int kCoreBytes = kCoreColumns * kCoreRowKeys;
constexpr int kRowSumColumns = kCoreColumns;

constexpr int padded_columns(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// Key, among 16, at position 4 * quad + i. quad: lane in a quad; i: 0 to 3.
constexpr int permuted_key(int quad, int i) { return 2 * quad + i % 2 + i / 2 * 8; }

constexpr int64_t padded_keys(int64_t keys) {
  return (keys + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}

// Varlen: the first permuted key of sequence batch_idx, which begins at key `offset` of the
// tensor. It follows from these two alone, and no two sequences overlap. For the number of keys
// and the number of sequences it returns the number of permuted keys.
constexpr int64_t first_permuted_key(int64_t offset, int64_t batch_idx) {
  return (offset / kKeyGroup + batch_idx) * kKeyGroup;
}

}  // namespace flashattn3
