// The kernel configs that forward_check runs (build_support/device_checks.py writes them).
// forward_config.cu compiles the one with the index FORWARD_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include "configs.h"
#include "forward_check_configs.h"
#include "launch/decode_params.h"
#include "launch/params.h"

namespace flashattn3 {

using forward::kCheckConfigNames, forward::kCheckConfigs, forward::kNumCheckConfigs;

constexpr ElementType kBf16 = ElementType::kBFloat16;
constexpr ElementType kFp16 = ElementType::kFloat16;
constexpr ElementType kE4m3 = ElementType::kE4m3;
constexpr ElementType kInt8 = ElementType::kInt8;

// The cached kernel config with the smallest sufficient head dim; -1: none. tree: for a tree_mask.
// spans: for split_tokens.
inline int cached_config(bool fp16, int head_dim, bool tree = false, bool spans = false) {
  return first_or_none(smallest_configs(kCheckConfigs, head_dim, [&](const forward::Config& r) {
    return r.cached && r.spans == spans && r.tree == tree && (r.dtype == kFp16) == fp16;
  }));
}

template <int kIndex>
void launch_check_config(const ForwardParams& params, cudaStream_t stream);
template <int kIndex>
void launch_cached_check_config(const DecodeParams& params, cudaStream_t stream);

}  // namespace flashattn3
