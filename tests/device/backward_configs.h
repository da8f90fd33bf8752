// The kernel configs that backward_check runs. backward_config.cu compiles the one with the index
// BACKWARD_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backward/config.h"
#include "launch/params.h"

namespace flashattn3 {

constexpr ElementType kBf16 = ElementType::kBFloat16;
constexpr ElementType kFp16 = ElementType::kFloat16;

// dtype, head_dim, num_stages, num_mma_warpgroups
constexpr backward::Config kCheckConfigs[] = {
    {kBf16, 64, 4, 3}, {kBf16, 96, 2, 2}, {kBf16, 128, 2, 2}, {kBf16, 256, 2, 2},
    {kFp16, 64, 4, 3}, {kFp16, 96, 2, 2}, {kFp16, 128, 2, 2}, {kFp16, 256, 2, 2},
};
constexpr int kNumCheckConfigs = sizeof(kCheckConfigs) / sizeof(kCheckConfigs[0]);

template <int kIndex>
void launch_check_config(const BackwardParams& params, cudaStream_t stream);
template <int kIndex>
int64_t check_config_workspace_bytes(const ForwardParams& params);
// Address of the counter from which a deterministic launch with this workspace draws work tiles.
template <int kIndex>
const int32_t* check_config_tile_semaphore(const BackwardParams& params);

}  // namespace flashattn3
