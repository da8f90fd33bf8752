// The order of the keys of e4m3 V in memory: a row of bytes for each column and 16 keys.
//
// The second matrix product takes P from the accumulators of the first as they lie in a thread.
// There a thread has, of each 16 keys, {2t, 2t + 1, 8 + 2t, 9 + 2t}, t its place among four; the
// 8-bit product wants four neighbours of it. So the four keys get four neighbouring slots 4t to
// 4t + 3, in P for free and in V once, when it is written. 16 slots of a column are 16 bytes: a row
// of a core matrix of WGMMA, whose second operand has to lie along the keys.
//
// In memory: (heads, slots / 16, columns, 16 slots), dense, columns 64, 128 or 256; with a batch
// dimension in front where the sequences have equal lengths. Else one follows the other.
//
// A tile in shared memory: (columns / 8, slots / 16, 8 columns, 16 slots), so that kSumColumns more
// (row_sums.cuh) may lie behind the others.
#pragma once

#include <cstdint>

namespace flashattn3 {

constexpr int kSlotsOfRow = 16;
constexpr int kSlotGroup = 32;  // sequences begin at multiples
constexpr int kCoreColumns = 8;
constexpr int kCoreBytes = kCoreColumns * kSlotsOfRow;
constexpr int kSumColumns = kCoreColumns;

constexpr int slot_columns(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// The first of the four slots' keys is 2t, this is how far slot i of them is from it.
constexpr int key_of_quad(int quad, int i) { return 2 * quad + i % 2 + i / 2 * 8; }

constexpr int64_t slots_for(int64_t keys) {
  return (keys + kSlotGroup - 1) / kSlotGroup * kSlotGroup;
}

// Of unequal sequences: the first slot of sequence `entry`, which begins at key `offset` of the
// tensor. Known without the lengths before, and no two sequences overlap. With the number of keys
// and of sequences: how many slots there are.
constexpr int64_t first_slot(int64_t offset, int64_t entry) {
  return (offset / kSlotGroup + entry) * kSlotGroup;
}

}  // namespace flashattn3
