// What the quantizing kernels are launched with.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "attention/seqlen.cuh"

namespace flashattn3::quantize {

// Rows of one head: distance between batch entries (0 where cu_seqlens says where they begin),
// between rows and between heads, in elements.
struct HeadStrides {
  int64_t batch, seq, head;
};

// Where a kernel reads: (batch, seqlen, heads, head_dim), head_dim with stride 1.
struct Source {
  const void* data;
  HeadStrides stride;
  SequenceTable tokens;
  int head_dim;
  cutlass::FastDivmod by_heads;   // divides by the number of heads,
  cutlass::FastDivmod by_blocks;  // and of blocks (tiles, permute_v) of the longest sequence
  bool whole_vecs;                // 8 columns are an aligned load, here and in rows of the result
};

// What a tensor becomes.
enum class Narrowed { kE4m3, kInt8, kE4m3Permuted };

// A tensor to quantize.
struct QuantizedTensor {
  Source x;
  Narrowed to;
  const float* mean;     // (batch, heads, head_dim): subtract; null: do not. Not with slots
  const float* signs;    // (head_dim): rotate; null: do not. Not with slots
  float rotation_scale;  // after the additions

  uint8_t* data;  // in slots: stride.seq is the columns, which 16 slots have 16 times
  HeadStrides data_stride;
  float* descale;  // (batch, heads, blocks)
};

constexpr int kMaxTensors = 3;  // q, k, v

// A block is the tokens of a cluster. The first `rounds` blocks of each tensor come in turn, so
// that a rotation's arithmetic runs beside other loads; then the tensors' other blocks, if any.
struct Arguments {
  QuantizedTensor tensor[kMaxTensors];
  uint32_t num_blocks[kMaxTensors];
  cutlass::FastDivmod by_tensors;  // divides by the number of tensors
  int rounds;
};

struct SampleArguments {
  Source x;
  float* mean;  // (batch, heads, head_dim)
};

struct PermuteArguments {
  Source v;
  uint8_t* data;
  HeadStrides data_stride;
};

}  // namespace flashattn3::quantize
