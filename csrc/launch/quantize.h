// Block quantization to e4m3 or int8, and permutation of e4m3 V. torch_binding fills the structs;
// this file does not use torch. All pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "launch/params.h"
#include "ptx/element.h"
#include "tile/permuted_v.h"

namespace flashattn3 {

// A batch of sequences, of equal length or concatenated (varlen).
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

// Steps before a tensor is quantized; all null: none. Never of permuted data, whose
// launch may have others with it. With it every 8 elements of a token's head start at a multiple of
// 16 bytes, and the addresses here are such multiples. Rotated columns are the first 2 * half.
struct EmbeddingParams {
  const float* weight;     // (head_dim), of an RMSNorm; null: none
  float eps;               // of the norm
  const void *cos, *sin;   // (num_positions, half), dense; null: no rotation
  bool tables_are_fp32;    // else the dtype of x
  bool interleaved;        // pairs are columns (2i, 2i + 1); else (i, i + half)
  int num_positions;       // a position outside gives NaN
  int half;                // interleaved: a multiple of 4; else 32, 64 or 128
  const void* positions;   // (batch, seqlen) or (total), dense; null: the place in the sequence
  bool positions_are_i64;  // else int32
};

// A tensor to quantize.
struct QuantizeParams {
  TokenTensor x;   // fastest if every 8 elements of a token's head start at a multiple of 16 bytes
  ElementType to;  // kE4m3, or kInt8 if not permuted
  bool permuted;   // data has the layout of permuted V (tile/permuted_v.h)
  // (batch, num_heads, head_dim), subtracted before quantization (smoothing: SageAttention). Null:
  // none; always null if permuted.
  const float* mean;
  // (head_dim), ±1, for the rotation (incoherent processing: QuIP, FlashAttention-3); head_dim is a
  // power of two. Null: no rotation; always null if permuted.
  const float* signs;
  uint8_t* data;  // of type `to`, 16-byte aligned; shape of x, dense, or permuted
  // (batch, num_heads, ceil(seqlen / block)); 2^-126 for blocks past the end of a sequence.
  float* descale;
  EmbeddingParams embedding{};
};

struct SampleParams {
  TokenTensor x;  // as in QuantizeParams
  float* mean;    // (batch, num_heads, head_dim)
};

struct PermuteParams {
  TokenTensor v;  // e4m3
  uint8_t* data;  // permuted V (tile/permuted_v.h), 16-byte aligned
};

// These functions enqueue kernels and do not wait for them. They do not write tokens or permuted
// keys that belong to no sequence. They throw std::runtime_error.
//
// Quantizes up to three tensors of one dtype, fp16 or bf16. Tensors with equal
// padded_columns(head_dim) share a launch. block: tokens that share a descale, 64, 128 or 256.
void launch_quantize(std::span<const QuantizeParams> tensors, ElementType dtype, int block,
                     cudaStream_t stream);
// Estimates each sequence's mean from 128 tokens; 0 in columns where it is below 3 standard errors.
// dtype: of x, fp16 or bf16.
void launch_sample_mean(const SampleParams& params, ElementType dtype, cudaStream_t stream);
void launch_permute_v(const PermuteParams& params, cudaStream_t stream);

// Permuted keys per head: of one sequence, or varlen of all sequences.
inline int64_t num_permuted_keys(const AttentionProblem& problem) {
  return problem.varlen ? first_permuted_key(problem.total_k, problem.batch)
                        : padded_keys(problem.total_k);
}
inline int64_t num_permuted_keys(const TokenTensor& tensor) {
  return tensor.cu_seqlens != nullptr ? first_permuted_key(tensor.total, tensor.batch)
                                      : padded_keys(tensor.seqlen);
}

}  // namespace flashattn3
