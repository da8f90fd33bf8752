// Shared by the operators that quantize: tensors of tokens, their parameters and results, and the
// launch.
#pragma once

#include <torch/csrc/stable/tensor.h>

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

inline Tensor new_rows(const TokenTensor& rows, int32_t dtype, int device) {
  if (rows.cu_seqlens != nullptr) {
    return new_tensor<3>({rows.total, rows.num_heads, rows.head_dim}, dtype, device);
  }
  return new_tensor<4>({rows.batch, rows.seqlen, rows.num_heads, rows.head_dim}, dtype, device);
}

inline Tensor new_permuted_v(const TokenTensor& rows, int device) {
  const int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn();
  const int64_t groups = num_permuted_keys(rows) / kCoreRowKeys,
                columns = padded_columns(rows.head_dim);
  if (rows.cu_seqlens != nullptr) {
    return new_tensor<4>({rows.num_heads, groups, columns, kCoreRowKeys}, e4m3, device);
  }
  return new_tensor<5>({rows.batch, rows.num_heads, groups, columns, kCoreRowKeys}, e4m3, device);
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
  expect(tensor->numel() == size, function, name, wanted,
         std::to_string(tensor->numel()) + " elements");
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

// Quantizes tensors of a dtype on torch's current stream. Their descales share an allocation, each
// from a multiple of 16 bytes on.
template <size_t kCount>
std::array<Quantized, kCount> quantize_all(const char* function, const Source (&sources)[kCount],
                                           ElementType dtype, int64_t block, int device) {
  expect(block >= 1, function, "block", "64, 128 or 256", block);
  int64_t first[kCount], number = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const TokenTensor& rows = sources[i].rows;
    first[i] = number;
    number += (rows.batch * rows.num_heads * num_blocks(rows, block) + 3) / 4 * 4;
  }
  const Tensor descales = new_tensor<1>({number}, aoti_torch_dtype_float32(), device);
  const auto quantized = [&](size_t i) -> Quantized {
    const auto& [rows, form] = sources[i];
    const int64_t heads = rows.num_heads, blocks = num_blocks(rows, block);
    const int64_t sizes[] = {rows.batch, heads, blocks}, strides[] = {heads * blocks, blocks, 1};
    const Tensor data =
        form.permuted
            ? new_permuted_v(rows, device)
            : new_rows(rows, form.int8 ? aoti_torch_dtype_int8() : aoti_torch_dtype_float8_e4m3fn(),
                       device);
    const Tensor descale = view_of(descales, sizes, strides, first[i]);
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
