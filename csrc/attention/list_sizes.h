// Sizes of the blocks of a mask's lists (mask_lists.cuh).
#pragma once

namespace flashattn3 {

constexpr int kListRows = 128, kListColumns = 64;
constexpr int kBitTileBytes = kListRows * kListColumns / 8;  // 64 bits of each row

}  // namespace flashattn3
