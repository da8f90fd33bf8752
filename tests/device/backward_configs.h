// The kernel configs that backward_check runs (build_support/device_checks.py writes them).
// backward_config.cu compiles the one with the index BACKWARD_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backward_check_configs.h"
#include "configs.h"
#include "launch/params.h"

namespace flashattn3 {

using backward::kCheckConfigNames, backward::kCheckConfigs, backward::kNumCheckConfigs;

constexpr ElementType kBf16 = ElementType::kBFloat16;
constexpr ElementType kFp16 = ElementType::kFloat16;

template <int kIndex>
void launch_check_config(const BackwardParams& params, cudaStream_t stream);
template <int kIndex>
int64_t check_config_workspace_bytes(const ForwardParams& params);
// Parts into which a launch divides the query heads of a KV head.
template <int kIndex>
int check_config_num_parts(const ForwardParams& params);
// Address of the counter from which a deterministic launch with this workspace draws work tiles.
template <int kIndex>
const int32_t* check_config_tile_semaphore(const BackwardParams& params);

}  // namespace flashattn3
