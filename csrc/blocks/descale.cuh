// The descales of a quantized tensor: what the stored numbers are to be multiplied with.
#pragma once

#include <cstdint>

namespace flashattn3 {

struct Descale {
  const float* data;           // (batch, heads, blocks); null: 1 everywhere
  int64_t batch, head, block;  // strides in elements
  int block_tokens;            // tokens of a sequence that share one
  int last_block;              // what lies behind it shares its descale
  int heads_per_scale;         // neighbouring heads that share theirs
  __device__ __forceinline__ float at(int sequence, int of_head, int token) const {
    if (data == nullptr) return 1.f;
    return data[sequence * batch + of_head / heads_per_scale * head +
                min(token / block_tokens, last_block) * block];
  }
};

}  // namespace flashattn3
