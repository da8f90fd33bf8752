// Block quantization to e4m3 or int8, and e4m3 rows in the slot order of V. Filled by
// torch_binding; no torch here. All pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "launch/params.h"
#include "ptx/element.h"
#include "tile/permuted_v.h"

namespace flashattn3 {

// A tensor of rows, whole or in sequences one after the other.
struct TokenTensor {
  const void* data;  // (batch, seqlen, num_heads, head_dim); with cu_seqlens (total, ...)
  Strides stride;    // elements; any
  int batch;
  int seqlen;  // with cu_seqlens the longest sequence: tokens past it are not read
  int total;   // tokens of the tensor; read only with cu_seqlens
  int num_heads;
  int head_dim;               // 1 to 256
  const int32_t* cu_seqlens;  // (batch + 1), or null: every sequence has seqlen tokens. Values are
                              // clamped to the tensor
};

// A tensor to quantize.
struct QuantizeParams {
  TokenTensor x;   // fastest where 8 elements of a row are at multiples of 16 bytes
  ElementType to;  // kE4m3 or, of rows, kInt8
  bool permuted;
  const float* mean;   // (batch, num_heads, head_dim): subtract first; null: do not. Not slots
  const float* signs;  // (head_dim), ±1: rotate, head_dim a power of two; null: do not. Not slots
  uint8_t* data;  // of type `to`, 16-byte aligned; rows as x, dense, or slots (blocks/permuted_v.h)
  float* descale;  // (batch, num_heads, ceil(seqlen / block)); 2^-126 where there is no such
                   // block
};

struct SampleParams {
  TokenTensor x;  // as of QuantizeParams
  float* mean;    // (batch, num_heads, head_dim)
};

struct PermuteParams {
  TokenTensor v;  // e4m3
  uint8_t* data;  // slots (blocks/permuted_v.h), 16-byte aligned
};

// Rows of no sequence, and slots of none, are not written. Enqueue; wait for nothing. Throw
// std::runtime_error.
//
// Up to three tensors of one dtype, fp16 or bf16; in one launch those whose columns in slots are as
// many. block: tokens that share a scale, 64, 128 or 256.
void launch_quantize(std::span<const QuantizeParams> tensors, ElementType dtype, int block,
                     cudaStream_t stream);
// A vector near the mean of each sequence's tokens; 0 in the columns where 128 tokens show none.
// dtype: of x, fp16 or bf16.
void launch_sample_mean(const SampleParams& params, ElementType dtype, cudaStream_t stream);
void launch_permute_v(const PermuteParams& params, cudaStream_t stream);

// Slots of a head: of one sequence, or with cu_seqlens of all.
inline int64_t num_permuted_keys(const TokenTensor& tensor) {
  return tensor.cu_seqlens != nullptr ? first_permuted_key(tensor.total, tensor.batch)
                                      : padded_keys(tensor.seqlen);
}

}  // namespace flashattn3
