// Offset and length of each sequence of a batch, from cu_seqlens and seqused.
#pragma once

#include <cstdint>

namespace flashattn3 {

struct SequenceTable {
  const int32_t* cu_seqlens;  // (batch + 1), or null
  const int32_t* seqused;     // (batch), or null
  int longest;                // length of every sequence without cu_seqlens; with it an upper bound
  int total;                  // number of tokens of the tensor; read only with cu_seqlens
};

struct Sequence {
  int offset;  // first token in the tensor; 0 without cu_seqlens, where batch is a dimension
  int length;
};

// Returns a sequence whose tokens are inside the tensor, whatever values the tables hold.
__host__ __device__ __forceinline__ Sequence find_sequence(const SequenceTable& table,
                                                           int batch_idx) {
  Sequence sequence{0, table.longest};
  if (table.cu_seqlens != nullptr) {
    const int begin = min(max(table.cu_seqlens[batch_idx], 0), table.total);
    const int end = min(max(table.cu_seqlens[batch_idx + 1], begin), table.total);
    sequence = {begin, min(end - begin, table.longest)};
  }
  if (table.seqused != nullptr) {
    sequence.length = min(max(table.seqused[batch_idx], 0), sequence.length);
  }
  return sequence;
}

}  // namespace flashattn3
