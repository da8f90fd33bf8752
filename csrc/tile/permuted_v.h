// The order of the keys of e4m3 V in memory: a row of bytes for each column and 16 keys.
//
// The PV GEMM reads P from the accumulators of the QK GEMM, in registers. Thread t of a quad holds
// keys {2t, 2t + 1, 8 + 2t, 9 + 2t} of each 16, and 8-bit WGMMA expects four adjacent keys there.
// So these four keys are stored at positions 4t to 4t + 3: P needs no permutation, and V is
// permuted once, when it is written. 16 keys of a column are 16 bytes: a row of a WGMMA core matrix
// of the second operand, which is K-major.
//
// In memory: (heads, keys / 16, columns, 16), dense, columns 64, 128 or 256; not varlen: with a
// batch dimension in front; varlen: the sequences are concatenated.
//
// A tile in shared memory: (columns / 8, keys / 16, 8 columns, 16), so that kRowSumColumns more
// columns (row_sum_columns.cuh) may follow.
#pragma once

#include <cstdint>

namespace flashattn3 {

constexpr int kCoreRowKeys = 16;
constexpr int kKeyGroup = 32;  // sequences begin at multiples
constexpr int kCoreColumns = 8;
constexpr int kCoreBytes = kCoreColumns * kCoreRowKeys;
constexpr int kRowSumColumns = kCoreColumns;

constexpr int padded_columns(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// Key at position 4 * quad + i of each 16; quad: index of the thread in its quad.
constexpr int permuted_key(int quad, int i) { return 2 * quad + i % 2 + i / 2 * 8; }

constexpr int64_t padded_keys(int64_t keys) {
  return (keys + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}

// Varlen: position of the first key of sequence batch_idx, which begins at key `offset` of the
// tensor. It depends on no other length, and no two sequences overlap. With the total number of
// keys and the number of sequences as arguments: the number of positions.
constexpr int64_t first_permuted_key(int64_t offset, int64_t batch_idx) {
  return (offset / kKeyGroup + batch_idx) * kKeyGroup;
}

}  // namespace flashattn3
