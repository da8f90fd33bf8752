// The kernel configs that decode_check and decode_emulation run (build_support/device_checks.py
// writes them). decode_config.cu compiles the one with the index DECODE_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include "decode_check_configs.h"
#include "launch/decode_params.h"

namespace flashattn3 {

// The config with the smallest sufficient head dim; -1 if there is none. spans: for split_tokens.
// bytes: for caches of 8 bits. tree: for a tree_mask. prefix: for one.
inline int config_of(bool fp16, int head_dim, bool spans = false, bool bytes = false,
                     bool tree = false, bool prefix = false) {
  const ElementType type = fp16 ? ElementType::kFloat16 : ElementType::kBFloat16;
  int best = -1;
  for (int i = 0; i < kNumCheckConfigs; ++i) {
    const decode::Config& config = kCheckConfigs[i];
    if (config.dtype != type || config.spans != spans || config.head_dim < head_dim) continue;
    if (decode::has_bytes(config) != bytes || config.tree != tree || config.prefix != prefix) {
      continue;
    }
    if (best < 0 || kCheckConfigs[i].head_dim < kCheckConfigs[best].head_dim) best = i;
  }
  return best;
}

template <int kIndex>
void launch_check_config(const DecodeParams& params, cudaStream_t stream);

}  // namespace flashattn3
