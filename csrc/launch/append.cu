#include "append/kernel.cuh"
#include "launch/append.h"
#include "launch/append_arguments.h"
#include "launch/launch.cuh"

namespace flashattn3 {

void launch_append(const AppendParams& params, cudaStream_t stream) {
  const append::Arguments args = make_append_arguments(params);
  const int64_t num_ctas = num_append_ctas(args);
  if (num_ctas == 0) return;
  expect(num_ctas <= INT_MAX, "launch", "the number of CTAs", "below 2^31", num_ctas);
  const bool fp16 = params.dtype == ElementType::kFloat16;
  launch_kernel("append", "",
                fp16 ? &append::append_kernel<ElementType::kFloat16>
                     : &append::append_kernel<ElementType::kBFloat16>,
                {static_cast<unsigned>(num_ctas), append::kThreads}, stream, true, args);
}

}  // namespace flashattn3
