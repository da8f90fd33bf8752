// The descales of a quantized tensor: a stored number times its descale is the real value.
#pragma once

#include <cstdint>

namespace flashattn3 {

struct Descale {
  const float* data;           // (batch, heads, blocks); null: all descales are 1
  int64_t batch, head, block;  // strides in elements
  int log2_tokens;             // log2 of the number of tokens in a block, which share a descale
  int last_block;              // tokens past this block share its descale
  int heads_per_descale;       // number of neighbouring heads that share their descales

  // Returns the descales of one head of one sequence, for at(); null if data is null.
  __host__ __device__ __forceinline__ const float* of(int batch_idx, int of_head) const {
    if (data == nullptr) return nullptr;
    return data + batch_idx * batch + of_head / heads_per_descale * head;
  }
  // Returns the descale of a token of the sequence.
  __host__ __device__ __forceinline__ float at(const float* of_head, int token) const {
    return of_head == nullptr ? 1.f : of_head[min(token >> log2_tokens, last_block) * block];
  }
};

}  // namespace flashattn3
