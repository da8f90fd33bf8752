// The descales of a quantized tensor: what the stored numbers are to be multiplied with.
#pragma once

#include <cstdint>

namespace flashattn3 {

struct Descale {
  const float* data;           // (batch, heads, blocks); null: 1 everywhere
  int64_t batch, head, block;  // strides in elements
  int log2_tokens;             // of the tokens of a sequence that share one
  int last_block;              // what lies behind it shares its descale
  int heads_per_descale;       // neighbouring heads that share theirs

  // Those of one head of one sequence; null as above.
  __host__ __device__ __forceinline__ const float* of(int batch_idx, int of_head) const {
    if (data == nullptr) return nullptr;
    return data + batch_idx * batch + of_head / heads_per_descale * head;
  }
  __host__ __device__ __forceinline__ float at(const float* of_head, int token) const {
    return of_head == nullptr ? 1.f : of_head[min(token >> log2_tokens, last_block) * block];
  }
};

}  // namespace flashattn3
