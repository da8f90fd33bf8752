// Checks of the tensors of a cached call, one by one (decode_op.cpp).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "launch/errors.h"
#include "launch/registry.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/decode_call.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

constexpr char kName[] = "decode";
constexpr int64_t kMostTreeWords = 2;

inline void expect_dtype(const char* name, const Tensor& tensor, int32_t wanted, const char* text) {
  expect(dtype_of(tensor) == wanted, kName, name, text, "another dtype");
}

inline void check_aligned(const char* name, const Tensor& tensor, int element_bytes) {
  expect(has_aligned_rows(tensor, element_bytes), kName, name, "of rows at multiples of 16 bytes",
         "another layout");
}

// Rows of 16-bit elements, which the kernel copies 16 bytes at a time.
inline void check_rows(const char* name, const Tensor& tensor, ElementType dtype,
                       const Shape& shape) {
  expect_shape(kName, name, tensor, shape);
  const bool fp16 = dtype == ElementType::kFloat16;
  if (dtype_of(tensor) != (fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16())) {
    const std::string what = std::string(name) + ".dtype";
    expect(false, kName, what.c_str(), fp16 ? "fp16" : "bf16", "another dtype");
  }
  check_aligned(name, tensor, 2);
}

// Both caches of 8 bits, of which K's dtype is that of V.
inline void check_byte_caches(const DecodeCall& call, const Shape& k, const Shape& v) {
  expect_shape(kName, "k_cache", call.k_cache, k);
  expect_shape(kName, "v_cache", call.v_cache, v);
  const int32_t dtype = dtype_of(call.k_cache);
  expect(has_bytes(call.k_cache), kName, "k_cache.dtype", "e4m3 or int8", "another dtype");
  expect_dtype("v_cache.dtype", call.v_cache, dtype, "that of k_cache");
  check_aligned("k_cache", call.k_cache, 1);
  check_aligned("v_cache", call.v_cache, 1);
}

// Page numbers, (entries, pages).
inline void check_pages(const Tensor& table) {
  expect(table.dim() == 2, kName, "the number of axes of page_table", 2, table.dim());
  expect_dtype("page_table.dtype", table, aoti_torch_dtype_int32(), "int32");
  expect(table.size(1) <= 1 || table.stride(1) == 1, kName, "page_table.stride(-1)", 1,
         table.stride(1));
}

// An optional tensor of int32 or float32, dense.
inline void check_dense(const char* name, const std::optional<Tensor>& tensor, int32_t dtype,
                        const Shape& shape) {
  if (!tensor) return;
  expect_shape(kName, name, *tensor, shape);
  expect(dtype_of(*tensor) == dtype, kName, name,
         dtype == aoti_torch_dtype_int32() ? "int32" : "float32", "another dtype");
  expect(tensor->is_contiguous(), kName, name, "contiguous", "another layout");
}

// The words of each query, as many as the queries of a sequence need. Python compares those of a
// varlen batch, whose longest sequence may have fewer queries than max_seqlen_q; kernels read any.
// Not inlined: beside the other checks GCC calls a constructor of a stream that GCC 8 lacks.
[[gnu::noinline]] inline void check_tree(const DecodeCall& call) {
  if (!call.tree_mask) return;
  const Tensor& tree = *call.tree_mask;
  const int64_t total = call.total_q(), seqlen = call.seqlen_q();
  const int64_t last = tree.dim() > 0 ? tree.size(tree.dim() - 1) : 0;
  const int64_t words = call.varlen() ? std::min(last, kMostTreeWords) : (seqlen + 31) / 32;
  if (words > kMostTreeWords) fail(kName, "tree_mask has the bits of at most 64 queries");
  expect_shape(kName, "tree_mask", tree,
               call.varlen() ? Shape{2, {total, words}} : Shape{3, {call.batch(), total, words}});
  expect_dtype("tree_mask.dtype", tree, aoti_torch_dtype_int32(), "int32");
  const int64_t stride = tree.stride(tree.dim() - 1);
  expect(words <= 1 || stride == 1, kName, "tree_mask.stride(-1)", 1, stride);
}

// A descale is one number for all heads, one for each head, or of keys of a cache of 8 bits.
inline void check_descale(const char* name, const std::optional<Tensor>& descale,
                          const DecodeCall& call, bool of_keys) {
  if (!descale) return;
  const std::string dtype = std::string(name) + ".dtype";
  expect_dtype(dtype.c_str(), *descale, aoti_torch_dtype_float32(), "float32");
  if (is_one_number(*descale)) return;
  const int64_t heads = call.num_heads_kv();
  if (!of_keys || descale->dim() != 3) {
    return expect_shape(kName, name, *descale, {2, {call.batch(), heads}});
  }
  const int64_t tokens = descale->size(1) == 1 ? 1 : call.k_cache.size(1);
  expect_shape(kName, name, *descale, {3, {call.k_cache.size(0), tokens, heads}});
}

}  // namespace flashattn3
