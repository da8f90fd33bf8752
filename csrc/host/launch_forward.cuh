// The launch of one forward kernel. Included by the generated unit of each row, which instantiates
//   template void flashattn3::launch_forward<row>(const ForwardParams&, cudaStream_t);
#pragma once

#include <cuda_runtime.h>

#include "host/forward_row.h"
#include "host/params.h"

namespace flashattn3 {

// Enqueues the kernel; waits for nothing. Throws std::runtime_error, naming the row, the grid and
// the shared memory. A problem without a query row launches nothing.
template <ForwardRow kRow>
void launch_forward(const ForwardParams& params, cudaStream_t stream);

// The kernel's entry, for cudaFuncGetAttributes. Threads and shared memory:
// forward_num_threads(kRow), forward_shared_bytes(kRow).
template <ForwardRow kRow>
const void* forward_entry();

}  // namespace flashattn3
