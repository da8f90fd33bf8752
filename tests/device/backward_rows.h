// The rows that backward_check runs. backward_row.cu compiles the row with the number
// BACKWARD_CHECK_ROW.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "host/params.h"
#include "kernels/backward/row.h"

namespace flashattn3 {

constexpr ElementType kBf16 = ElementType::kBFloat16;
constexpr ElementType kFp16 = ElementType::kFloat16;

// dtype, head_dim, num_stages, num_mma_warpgroups
constexpr BackwardRow kCheckRows[] = {
    {kBf16, 64, 4, 3}, {kBf16, 96, 2, 2}, {kBf16, 128, 2, 2}, {kBf16, 256, 2, 2},
    {kFp16, 64, 4, 3}, {kFp16, 96, 2, 2}, {kFp16, 128, 2, 2}, {kFp16, 256, 2, 2},
};
constexpr int kNumCheckRows = sizeof(kCheckRows) / sizeof(kCheckRows[0]);

template <int kIndex>
void launch_check_row(const BackwardParams& params, cudaStream_t stream);
template <int kIndex>
int64_t check_row_workspace_bytes(const ForwardParams& params);
// Where a launch with this workspace counts the tiles of keys that it hands out in order.
template <int kIndex>
const int32_t* check_row_tiles_taken(const BackwardParams& params);

}  // namespace flashattn3
