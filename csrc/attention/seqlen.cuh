// Where the rows of a batch entry begin and how many there are.
#pragma once

#include <cstdint>

namespace flashattn3 {

struct SequenceTable {
  const int32_t* cu_seqlens;  // (batch + 1), or null
  const int32_t* seqused;     // (batch), or null
  int longest;                // rows of an entry without cu_seqlens; an upper bound with
  int total;                  // rows of the tensor; read only with cu_seqlens
};

struct Sequence {
  int offset;  // first row in the tensor; 0 where entries have a dimension of their own
  int length;
};

// Whatever the tables hold, the rows lie inside the tensor.
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
