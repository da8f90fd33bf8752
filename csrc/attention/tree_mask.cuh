// The mask of new tokens that are nodes of a tree (tree_mask), as in speculative decoding. The new
// tokens of a sequence are its last keys, as many as its queries. A query sees those whose bit its
// row of the mask has, and all older keys.
#pragma once

#include <cstdint>

#include "tile/fragment.h"

namespace flashattn3 {

struct TreeMask {
  const int32_t* words;  // (batch, seqlen_q, num_words) or (total_q, num_words); null: no tree
  int64_t batch, seq;    // strides in elements
  int num_words;         // of a query, 1 or 2: bit j % 32 of word j / 32 is that of new token j

  __device__ __forceinline__ uint64_t bits_of(int batch_coord, int token) const {
    const int32_t* const of_query = words + batch_coord * batch + token * seq;
    uint64_t bits = static_cast<uint32_t>(of_query[0]);
    if (num_words > 1) bits |= uint64_t{static_cast<uint32_t>(of_query[1])} << 32;
    return bits;
  }
};

// Bit i of the result says whether a row sees the key at token + i. bits: of the row's new tokens.
// token: key 0's number among the new tokens, negative for an older key.
__host__ __device__ __forceinline__ uint64_t seen_in_tree(uint64_t bits, int token) {
  if (token <= -64) return ~uint64_t{0};
  if (token < 0) return bits << -token | ((uint64_t{1} << -token) - 1);
  return token < 64 ? bits >> token : 0;
}

// The new tokens that a thread's two rows see.
struct TreeRows {
  uint64_t bits[2];

  // Sets the scores of new tokens that a row does not see to -inf. first_token: number of the
  // tile's first key among the new tokens.
  template <int kN>
  __device__ __forceinline__ void hide(float (&s)[kN / 2], int first_token) const {
    const int token = first_token + thread_column(static_cast<int>(threadIdx.x % 32));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int first = 0; first < kN; first += 64) {
        const uint64_t seen = seen_in_tree(bits[r], token + first);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          const int column = register_column(i) - first;
          if (row_of(i) != r || column < 0 || column >= 64) continue;
          if (!(seen >> column & 1)) s[i] = -INFINITY;
        }
      }
    }
  }
};

struct NoTree {};

}  // namespace flashattn3
