// Arguments of the quantization kernels.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "attention/rotary_angles.cuh"
#include "attention/seqlen.cuh"

namespace flashattn3::quantize {

// Strides in elements between batch entries (0 with cu_seqlens), between tokens and between heads.
struct HeadStrides {
  int64_t batch, seq, head;
};

// Input tensor: (batch, seqlen, heads, head_dim), head_dim with stride 1.
struct Source {
  const void* data;
  HeadStrides stride;
  SequenceTable tokens;
  int head_dim;
  cutlass::FastDivmod by_heads;   // divides by the number of heads
  cutlass::FastDivmod by_blocks;  // by the blocks (permute_v: tiles) of the longest sequence
  bool whole_vecs;                // 8 columns are one aligned vector, here and in output rows
};

// Output type and layout of a tensor.
enum class Narrowed { kE4m3, kInt8, kE4m3Permuted };

// A tensor to quantize.
struct QuantizedTensor {
  Source x;
  Narrowed to;
  const float* mean;     // (batch, heads, head_dim), smoothing; null: none. Null for permuted V
  const float* signs;    // (head_dim), incoherent processing; null: none. Null for permuted V
  float rotation_scale;  // factor after the Hadamard transform

  uint8_t* data;  // permuted V: data_stride.seq is the number of columns
  HeadStrides data_stride;
  float* descale;  // (batch, heads, blocks)
};

constexpr int kMaxTensors = 3;  // q, k, v

// A cluster quantizes one block of tokens. The first `rounds` blocks of the tensors alternate, so
// that the arithmetic of a rotation overlaps other loads; the tensors' remaining blocks follow.
struct Arguments {
  QuantizedTensor tensor[kMaxTensors];
  uint32_t num_blocks[kMaxTensors];
  cutlass::FastDivmod by_tensors;  // divides by the number of tensors
  int rounds;
};

// Steps of q and k between a projection and their quantization.
struct Embedding {
  const float* weight;  // (head_dim) of an RMSNorm (arXiv 1910.07467); null: none
  float eps;            // added to the mean square
  int half;             // of the rotated columns; 0: none is rotated
  RotaryTables tables;
  const void* positions;    // (batch, seqlen), varlen (total): rows of the tables; null: the place
                            // of a token in its sequence
  bool wide_positions;      // they are int64, else int32
  int64_t positions_batch;  // stride; 0 with cu_seqlens
};

// A cluster takes the same block of kHeadsTogether neighbouring heads one after the other, which
// share the angles, where that divides the tensor's heads; num_blocks counts clusters.
constexpr int kHeadsTogether = 8;
struct EmbeddedArguments : Arguments {
  Embedding embedding[kMaxTensors];  // that of permuted V is not read
  int heads_together[kMaxTensors];   // 1 to kHeadsTogether
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
