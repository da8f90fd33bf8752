// Shared by the operators that quantize: tensors of tokens, their parameters and results, and the
// launch.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "launch/errors.h"
#include "launch/quantize.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// tensor: (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim).
inline TokenTensor token_tensor(const char* function, const Tensor& tensor,
                                const std::optional<Tensor>& cu_seqlens, int64_t max_seqlen) {
  const bool varlen = cu_seqlens.has_value();
  const int64_t seq = varlen ? 0 : 1;
  expect(tensor.dim() == seq + 3, function, "the number of axes", seq + 3, tensor.dim());
  const int64_t head_dim = tensor.size(seq + 2), step = tensor.stride(seq + 2);
  expect(head_dim <= 1 || step == 1, function, "the last stride", 1, step);
  expect(!varlen || cu_seqlens->numel() >= 1, function, "cu_seqlens.shape[0]", "at least 1", 0);
  const int64_t tokens = tensor.size(seq);
  return {.data = tensor.data_ptr(),
          .stride = row_strides(tensor, varlen),
          .batch = to_int(function, "the batch", varlen ? cu_seqlens->numel() - 1 : tensor.size(0)),
          .seqlen = to_int(function, "the longest sequence", varlen ? max_seqlen : tokens),
          .total = to_int(function, "the number of tokens", tokens),
          .num_heads = to_int(function, "the number of heads", tensor.size(seq + 1)),
          .head_dim = to_int(function, "the head dim", head_dim),
          .cu_seqlens = indices(cu_seqlens)};
}

inline Shape sizes_of_rows(const TokenTensor& rows) {
  if (rows.cu_seqlens != nullptr) return {3, {rows.total, rows.num_heads, rows.head_dim}};
  return {4, {rows.batch, rows.seqlen, rows.num_heads, rows.head_dim}};
}

inline Shape sizes_of_permuted_v(const TokenTensor& rows) {
  const int64_t groups = num_permuted_keys(rows) / kCoreRowKeys,
                columns = padded_columns(rows.head_dim);
  if (rows.cu_seqlens != nullptr) return {4, {rows.num_heads, groups, columns, kCoreRowKeys}};
  return {5, {rows.batch, rows.num_heads, groups, columns, kCoreRowKeys}};
}

inline Tensor new_permuted_v(const TokenTensor& rows, int device) {
  const Shape sizes = sizes_of_permuted_v(rows);
  return view_of(new_tensor({1, {sizes.count()}}, aoti_torch_dtype_float8_e4m3fn(), device), sizes);
}

inline ElementType sixteen_bit_type(const char* function, const Tensor& x) {
  const int32_t dtype = dtype_of(x);
  if (dtype == aoti_torch_dtype_bfloat16()) return ElementType::kBFloat16;
  expect(dtype == aoti_torch_dtype_float16(), function, "dtype", "fp16 or bf16", "another");
  return ElementType::kFloat16;
}

inline int64_t num_blocks(const TokenTensor& rows, int64_t block) {
  return (rows.seqlen + block - 1) / block;
}

// Null if there is no tensor. wanted: what an fp32 tensor of `size` elements is.
inline const float* floats(const char* function, const char* name,
                           const std::optional<Tensor>& tensor, int64_t size, const char* wanted) {
  if (!tensor) return nullptr;
  expect(dtype_of(*tensor) == aoti_torch_dtype_float32(), function, name, wanted, "another dtype");
  const int64_t count = tensor->numel();
  if (count != size) {
    expect(false, function, name, wanted, std::to_string(count) + " elements");
  }
  return static_cast<const float*>(tensor->data_ptr());
}

// Options of one tensor. data is dense: shape of x in e4m3 or int8, or permuted e4m3
// (tile/permuted_v.h).
struct Form {
  std::optional<Tensor> mean;   // fp32 (batch, heads, head_dim), dense: subtract
  std::optional<Tensor> signs;  // fp32 (head_dim): rotate
  bool permuted;
  bool int8;
  EmbeddingParams embedding{};
};
inline const Form kFormOfV{
    .mean = std::nullopt, .signs = std::nullopt, .permuted = true, .int8 = false};

// Parameters and results of one tensor: data, and descale, fp32 (batch, heads, blocks).
struct Quantized {
  QuantizeParams params;
  Tensor data, descale;
};

// One tensor to quantize, fp16 or bf16.
struct Source {
  TokenTensor rows;
  Form form;
};

// How the results of a launch lie in memory.
enum class Memory {
  kOfEach,  // data in allocations of their own, descales in one
  kOfAll,   // one allocation
};

// Quantizes tensors of a dtype on torch's current stream. In an allocation that results share, each
// begins at a multiple of 16 bytes, data at one of 256.
template <size_t kCount>
std::array<Quantized, kCount> quantize_all(const char* function, const Source (&sources)[kCount],
                                           ElementType dtype, int64_t block, int device,
                                           Memory memory = Memory::kOfEach) {
  expect(block >= 1, function, "block", "64, 128 or 256", block);
  const bool together = memory == Memory::kOfAll;
  Shape of_data[kCount], of_descale[kCount];
  int64_t first_byte[kCount], first_descale[kCount], bytes = 0, number = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const auto& [rows, form] = sources[i];
    of_data[i] = form.permuted ? sizes_of_permuted_v(rows) : sizes_of_rows(rows);
    of_descale[i] = {3, {rows.batch, rows.num_heads, num_blocks(rows, block)}};
    first_byte[i] = together ? bytes : 0;
    first_descale[i] = number;
    bytes += (of_data[i].count() + 255) / 256 * 256;
    number += (of_descale[i].count() + 3) / 4 * 4;
  }
  constexpr int64_t kDescaleBytes = sizeof(float);
  const int64_t before = together ? bytes / kDescaleBytes : 0;
  const int32_t fp32 = aoti_torch_dtype_float32(), e4m3 = aoti_torch_dtype_float8_e4m3fn();
  std::optional<Tensor> of_all, of_int8;  // views of the allocation that results share
  if (together) {
    of_all = new_tensor({1, {bytes + number * kDescaleBytes}}, e4m3, device);
    const auto is_int8 = [](const Source& source) { return source.form.int8; };
    if (std::ranges::any_of(sources, is_int8)) of_int8 = view_as(*of_all, aoti_torch_dtype_int8());
  }
  const Tensor descales =
      together ? view_as(*of_all, fp32) : new_tensor({1, {number}}, fp32, device);
  const auto quantized = [&](size_t i) -> Quantized {
    const auto& [rows, form] = sources[i];
    const int64_t heads = rows.num_heads;
    const int32_t to = form.int8 ? aoti_torch_dtype_int8() : e4m3;
    const Tensor bytes_of_data = !together   ? new_tensor({1, {of_data[i].count()}}, to, device)
                                 : form.int8 ? *of_int8
                                             : *of_all;
    const Tensor data = view_of(bytes_of_data, of_data[i], first_byte[i]);
    const Tensor descale = view_of(descales, of_descale[i], before + first_descale[i]);
    return {
        .params = {.x = rows,
                   .to = form.int8 ? ElementType::kInt8 : ElementType::kE4m3,
                   .permuted = form.permuted,
                   .mean = floats(function, "mean", form.mean, rows.batch * heads * rows.head_dim,
                                  "fp32 (batch, heads, head dim)"),
                   .signs =
                       floats(function, "signs", form.signs, rows.head_dim, "fp32 (head dim,)"),
                   .data = static_cast<uint8_t*>(data.data_ptr()),
                   .descale = static_cast<float*>(descale.data_ptr()),
                   .embedding = form.embedding},
        .data = data,
        .descale = descale};
  };
  const auto made = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<Quantized, kCount>{quantized(kIndex)...};
  }(std::make_index_sequence<kCount>{});
  QuantizeParams params[kCount];
  for (size_t i = 0; i < kCount; ++i) params[i] = made[i].params;
  launch_quantize(params, dtype, static_cast<int>(block), current_stream(device));
  return made;
}

}  // namespace flashattn3
