// Sizes of the blocks of a mask's lists (mask_lists.cuh).
#pragma once

namespace flashattn3 {

constexpr int kListRows = 128, kListColumns = 64;
constexpr int kBitTileBytes = kListRows * kListColumns / 8;  // 64 bits of each row
// Columns, 32 blocks a word, of masks whose lists a forward kernel joins.
constexpr int kJoinedWords = 256;
constexpr int kMostJoinedColumns = kJoinedWords * 32 * kListColumns;

}  // namespace flashattn3
