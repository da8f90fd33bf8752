// The kernel configs that decode_check and decode_emulation run (build_support/device_checks.py
// writes them). decode_config.cu compiles the one with the index DECODE_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include "configs.h"
#include "decode_check_configs.h"
#include "launch/decode_params.h"

namespace flashattn3 {

using decode::kCheckConfigNames, decode::kCheckConfigs, decode::kNumCheckConfigs;

// The config with the smallest sufficient head dim; -1 if there is none. spans: for split_tokens.
// bytes: for caches of 8 bits. tree: for a tree_mask. prefix: for one.
inline int config_of(bool fp16, int head_dim, bool spans = false, bool bytes = false,
                     bool tree = false, bool prefix = false) {
  const ElementType type = fp16 ? ElementType::kFloat16 : ElementType::kBFloat16;
  return first_or_none(smallest_configs(kCheckConfigs, head_dim, [&](const decode::Config& config) {
    return config.dtype == type && config.spans == spans && decode::has_bytes(config) == bytes &&
           config.tree == tree && config.prefix == prefix;
  }));
}

template <int kIndex>
void launch_check_config(const DecodeParams& params, cudaStream_t stream);

}  // namespace flashattn3
