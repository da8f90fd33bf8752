#include "launch/launch.cuh"
#include "launch/varlen.h"
#include "launch/varlen_arguments.h"

namespace flashattn3 {

static void launch_prepare(const ForwardParams& params, const varlen::Arguments& args,
                           cudaStream_t stream) {
  const KernelGrid grid{static_cast<unsigned>(num_prepare_ctas(params)), varlen::kThreads};
  launch_kernel("varlen::prepare", "", varlen::prepare, grid, stream, params.pdl, args);
}

void launch_varlen_forward(const ForwardParams& params, const TileShape& shape, cudaStream_t stream,
                           int min_queries, int32_t* semaphore) {
  launch_prepare(params, make_prepare_arguments(params, shape, min_queries, semaphore), stream);
}

void launch_varlen_backward(const BackwardParams& params, int block_n, cudaStream_t stream) {
  launch_prepare(params.forward, make_prepare_arguments(params, block_n), stream);
}

}  // namespace flashattn3
