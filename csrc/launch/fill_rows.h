// The kernel that runs after a kernel of cached calls where rows belong to no sequence or where the
// call has scheduler metadata.
#pragma once

#include <cuda_runtime.h>

#include "launch/decode_params.h"

namespace flashattn3 {

struct SchedulerMetadata {
  const int32_t* data;  // int32, 2 + 4 * batch, on the device; null: the call has none
  int options_hash;     // what it must hold
};

// Clears the rows of out and lse that belong to no sequence and sets those to NaN whose metadata
// was made for another call. Enqueues a kernel without waiting, or none if there are no such rows.
// Throws std::runtime_error.
void launch_fill_rows(const DecodeParams& params, const SchedulerMetadata& metadata,
                      cudaStream_t stream);

}  // namespace flashattn3
