// Shapes of the tensors of a mask's lists (flashattn3/masks/block_lists.py).
#pragma once

#include <cstdint>

#include "attention/list_sizes.h"

namespace flashattn3 {

constexpr int64_t kBitTileRows = kListRows;
constexpr int64_t num_row_blocks(int64_t rows) { return (rows + kListRows - 1) / kListRows; }
constexpr int64_t num_column_blocks(int64_t columns) {
  return (columns + kListColumns - 1) / kListColumns;
}

}  // namespace flashattn3
