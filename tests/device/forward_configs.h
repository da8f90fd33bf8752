// The kernel configs that forward_check runs: those of flashattn3/dispatch/kernel_configs.py, and
// variants for timing. forward_config.cu compiles the one with the index FORWARD_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include "launch/forward_config.h"
#include "launch/params.h"

namespace flashattn3 {

constexpr ElementType kBf16 = ElementType::kBFloat16;
constexpr ElementType kFp16 = ElementType::kFloat16;
constexpr ElementType kE4m3 = ElementType::kE4m3;
constexpr ElementType kInt8 = ElementType::kInt8;

// dtype, head_dim, masked, block_m, block_n, num_stages, num_mma_warpgroups, num_q_buffers,
// keys_per_descale, promote_keys
constexpr forward::Config kCheckConfigs[] = {
    {kBf16, 64, false, 192, 128, 4, 3, 2},
    {kBf16, 64, true, 192, 128, 4, 3, 2},
    {kBf16, 64, true, 192, 64, 4, 3, 2},
    {kBf16, 96, false, 192, 96, 2, 3, 2},
    {kBf16, 96, true, 192, 96, 2, 3, 2},
    {kBf16, 128, false, 192, 64, 4, 3, 2},
    {kBf16, 128, true, 192, 64, 4, 3, 2},
    {kBf16, 192, false, 128, 80, 2, 2, 2},
    {kBf16, 192, true, 128, 80, 2, 2, 2},
    {kBf16, 256, false, 128, 64, 2, 2, 1},
    {kBf16, 256, true, 128, 64, 2, 2, 1},
    {kFp16, 64, true, 192, 128, 4, 3, 2},
    {kFp16, 128, false, 192, 64, 4, 3, 2},
    {kFp16, 128, true, 192, 64, 4, 3, 2},
    {kFp16, 256, true, 128, 64, 2, 2, 1},
    {kE4m3, 64, false, 192, 128, 4, 3, 2, 64, 768},
    {kE4m3, 64, true, 192, 128, 4, 3, 2, 64, 768},
    {kE4m3, 128, false, 128, 128, 4, 2, 2, 64, 768},
    {kE4m3, 128, true, 128, 128, 4, 2, 2, 64, 768},
    {kE4m3, 128, true, 192, 96, 5, 3, 2, 32, 768},
    {kE4m3, 256, false, 128, 128, 2, 2, 2, 64, 768},
    {kE4m3, 256, false, 128, 128, 2, 2, 1, 64, 768},
    {kE4m3, 256, true, 128, 128, 2, 2, 2, 64, 768},
    {kE4m3, 256, true, 128, 128, 2, 2, 1, 64, 768},
    {kInt8, 64, false, 192, 128, 4, 3, 2, 64, 768},
    {kInt8, 64, true, 192, 128, 4, 3, 2, 64, 768},
    {kInt8, 128, false, 128, 128, 4, 2, 2, 64, 768},
    {kInt8, 128, true, 128, 128, 4, 2, 2, 64, 768},
    {kInt8, 128, true, 192, 96, 5, 3, 2, 32, 768},
    {kInt8, 256, false, 128, 128, 2, 2, 2, 64, 768},
    {kInt8, 256, false, 128, 128, 2, 2, 1, 64, 768},
    {kInt8, 256, true, 128, 128, 2, 2, 2, 64, 768},
    {kInt8, 256, true, 128, 128, 2, 2, 1, 64, 768},
    // Variants for timing.
    {kE4m3, 128, false, 192, 96, 5, 3, 2, 32, 768},
    {kInt8, 128, false, 192, 96, 5, 3, 2, 32, 768},
    {kBf16, 128, false, 192, 80, 3, 3, 2},
    {kBf16, 128, true, 192, 80, 3, 3, 2},
    {kBf16, 192, false, 128, 96, 2, 2, 1},
    {kBf16, 192, true, 128, 96, 2, 2, 1},
};
constexpr int kNumCheckConfigs = sizeof(kCheckConfigs) / sizeof(kCheckConfigs[0]);

template <int kIndex>
void launch_check_config(const ForwardParams& params, cudaStream_t stream);

}  // namespace flashattn3
