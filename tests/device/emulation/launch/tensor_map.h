// Emulation of csrc/launch/tensor_map.h.
#pragma once

#include "launch/params.h"
#include "ptx/element.h"
#include "tensor_map.h"

namespace flashattn3 {

struct TensorMapShape {
  int64_t head_dim, seq, heads, batch;
};

inline CUtensorMap make_tensor_map(const char*, ElementType, const void* address,
                                   const void* unused, const TensorMapShape& shape,
                                   const Strides& strides, int box_rows) {
  const bool empty = shape.seq == 0 || address == nullptr;
  return emulation::TensorMap{static_cast<const uint8_t*>(empty ? unused : address),
                              {shape.head_dim, empty ? 1 : shape.seq, shape.heads, shape.batch, 1},
                              {strides.seq * 2, strides.head * 2, strides.batch * 2, 0},
                              {64, box_rows, 1, 1, 1}}
      .pack();
}

struct GroupedRows {
  int64_t atoms, groups, heads, row_stride, head_stride;
};

inline CUtensorMap make_grouped_map(const char*, ElementType, const void* address,
                                    const GroupedRows& rows, int box_atoms, int box_groups) {
  return emulation::TensorMap{
      static_cast<const uint8_t*>(address),
      {64, 8, rows.atoms, rows.groups, rows.heads},
      {rows.row_stride * 2, 128, rows.row_stride * 16, rows.head_stride * 2},
      {64, 8, box_atoms, box_groups, 1}}
      .pack();
}

inline CUtensorMap make_float_map(const char*, const float* address, int64_t columns, int64_t rows,
                                  int box_columns) {
  return emulation::FloatMap{address, columns, rows, box_columns}.pack();
}

// Of 8-bit kernel configs, which are not emulated.
CUtensorMap make_permuted_v_map(const void* address, const void* unused, int64_t num_permuted_keys,
                                int64_t heads, int columns, int box_keys);

}  // namespace flashattn3
