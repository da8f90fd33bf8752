// What the quantizing kernels are launched with.
#pragma once

#include <cstdint>

#include "blocks/sequence.cuh"

namespace flashattn3 {

// Rows of one head: distance between batch entries (0 where cu_seqlens says where they begin),
// between rows and between heads, in elements.
struct HeadRows {
  int64_t batch, seq, head;
};

// Where a kernel reads: (batch, seqlen, num_heads, head_dim), head_dim with stride 1.
struct QuantizeSource {
  const void* data;
  HeadRows stride;
  SequenceTable tokens;
  int num_heads;
  int head_dim;
  bool whole_units;  // 8 columns are one or two aligned loads, here, in signs and in rows of the
                     // result
};

struct QuantizeArguments {
  QuantizeSource x;
  int num_blocks;        // of the longest sequence; a block is the tokens of a cluster
  const float* signs;    // (head_dim), read by kernels that rotate
  float rotation_scale;  // after the additions

  uint8_t* data;  // in slots: stride.seq is the columns, which 16 slots have 16 times
  HeadRows data_stride;
  float* descale;  // (batch, num_heads, num_blocks)
};

struct ToSlotsArguments {
  QuantizeSource v;
  int num_tiles;  // of the longest sequence
  uint8_t* data;
  HeadRows data_stride;
};

}  // namespace flashattn3
