// The kernel configs that decode_check runs (build_support/device_checks.py writes them).
// decode_config.cu compiles the one with the index DECODE_CHECK_CONFIG.
#pragma once

#include <cuda_runtime.h>

#include "decode_check_configs.h"
#include "launch/decode_params.h"

namespace flashattn3 {

template <int kIndex>
void launch_check_config(const DecodeParams& params, cudaStream_t stream);

}  // namespace flashattn3
