// Extra arguments of forward kernels with 8-bit inputs.
#pragma once

#include "attention/descale.cuh"

namespace flashattn3::forward {

// Extra arguments of kernels with 8-bit inputs.
struct QuantizedArguments {
  Descale q, k, v;
  bool out_is_fp16;  // else bf16
  // Promotion workspace (promotion.cuh), (CTAs, promoted_words(head_dim), consumer threads) of
  // 16 bytes; null: O is not promoted.
  float4* promoted;
};

}  // namespace flashattn3::forward
