#include "torch_binding/mask_tensors.h"

#include <cstdint>

#include "launch/errors.h"
#include "launch/list_shapes.h"
#include "torch_binding/attention_call.h"

namespace flashattn3 {

void check_mask(const char* function, const AttentionProblem& problem, const MaskTensors& mask,
                int rows, int columns, int device) {
  const auto& [entries, work, tiles] = mask;
  if (!entries && !work && !tiles) return;
  expect(entries && work && tiles, function, "mask", "its entries, work and tiles", "a part");
  const auto one_or = [&](int axis, int64_t size) {
    return entries->dim() == 4 && entries->size(axis) == 1 ? 1 : size;
  };
  const int64_t batch = one_or(0, problem.batch), heads = one_or(1, problem.num_heads_q);
  const int64_t row_blocks = num_row_blocks(rows), column_blocks = num_column_blocks(columns);
  const int64_t num_tiles = tiles->dim() == 2 ? tiles->size(0) : 0;
  const auto check = [&](const char* name, const Tensor& tensor, const Shape& shape, int32_t dtype,
                         const char* dtype_name) {
    expect_shape(function, name, tensor, shape);
    expect(dtype_of(tensor) == dtype, function, name, dtype_name, "another dtype");
    expect(tensor.is_contiguous(), function, name, "contiguous", "another layout");
    expect_on_gpu(function, name, tensor, device, "on the GPU of q");
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
    expect(aligned, function, name, "at a multiple of 16 bytes", "another address");
  };
  const int32_t int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();
  check("mask_entries", *entries, {4, {batch, heads, row_blocks, column_blocks}}, int32, "int32");
  check("mask_work", *work, {4, {batch, heads, row_blocks, 4}}, int32, "int32");
  check("mask_tiles", *tiles, {2, {num_tiles, kBitTileRows}}, int64, "int64");
  expect(num_tiles <= INT32_MAX, function, "mask_tiles.shape[0]", "below 2^31", num_tiles);
}

MaskListParams list_params(const MaskTensors& mask) {
  const auto& [entries, work, tiles] = mask;
  if (!entries) return {};
  return {.entries = static_cast<const int32_t*>(entries->data_ptr()),
          .work = static_cast<const int32_t*>(work->data_ptr()),
          .tiles = static_cast<const int64_t*>(tiles->data_ptr()),
          .batch = static_cast<int>(entries->size(0)),
          .heads = static_cast<int>(entries->size(1)),
          .num_tiles = static_cast<int>(tiles->size(0))};
}

}  // namespace flashattn3
