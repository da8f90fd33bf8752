// What the quantizing kernels are launched with.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "blocks/sequence.cuh"

namespace flashattn3 {

// Rows of one head: distance between batch entries (0 where cu_seqlens says where they begin),
// between rows and between heads, in elements.
struct HeadRows {
  int64_t batch, seq, head;
};

// Where a kernel reads: (batch, seqlen, heads, head_dim), head_dim with stride 1.
struct QuantizeSource {
  const void* data;
  HeadRows stride;
  SequenceTable tokens;
  int head_dim;
  cutlass::FastDivmod by_heads;   // divides by the number of heads,
  cutlass::FastDivmod by_blocks;  // and of blocks (tiles, to_slots) of the longest sequence
  bool whole_units;               // 8 columns are an aligned load, here and in rows of the result
};

// What a tensor becomes.
enum class Narrowed { kE4m3Rows, kInt8Rows, kE4m3Slots };

// A tensor to quantize.
struct QuantizeTensor {
  QuantizeSource x;
  Narrowed to;
  const float* mean;     // (batch, heads, head_dim): subtract; null: do not. Not with slots
  const float* signs;    // (head_dim): rotate; null: do not. Not with slots
  float rotation_scale;  // after the additions

  uint8_t* data;  // in slots: stride.seq is the columns, which 16 slots have 16 times
  HeadRows data_stride;
  float* descale;  // (batch, heads, blocks)
};

constexpr int kMaxTensors = 3;  // q, k, v

// A block is the tokens of a cluster. The first `rounds` blocks of each tensor come in turn, so
// that a rotation's arithmetic runs beside other loads; then the tensors' other blocks, if any.
struct QuantizeArguments {
  QuantizeTensor tensor[kMaxTensors];
  uint32_t num_blocks[kMaxTensors];
  cutlass::FastDivmod by_tensors;  // divides by the number of tensors
  int rounds;
};

struct SampleArguments {
  QuantizeSource x;
  float* mean;  // (batch, heads, head_dim)
};

struct ToSlotsArguments {
  QuantizeSource v;
  uint8_t* data;
  HeadRows data_stride;
};

}  // namespace flashattn3
