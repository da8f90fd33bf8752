#include "launch/launch.cuh"
#include "launch/widen_arguments.h"
#include "launch/widen_cache.h"

namespace flashattn3 {

int widened_heads(const DecodeParams& params) {
  const int64_t of_head = WidenedHeads::bytes(params, 1, params.head_dim) +
                          WidenedHeads::bytes(params, 1, params.head_dim_v);
  const int64_t fitting = kWidenedBytes / std::max<int64_t>(of_head, 1);
  return static_cast<int>(std::clamp<int64_t>(fitting, 1, params.num_heads_kv));
}

int64_t widened_bytes(const DecodeParams& params) {
  const int heads = widened_heads(params);
  return WidenedHeads::bytes(params, heads, params.head_dim) +
         WidenedHeads::bytes(params, heads, params.head_dim_v);
}

void launch_widened(const DecodeKernel& kernel, const ByteDecodeParams& params, void* widened,
                    cudaStream_t stream) {
  const bool fp16 = kernel.info.dtype == ElementType::kFloat16;
  const int at_once = widened_heads(params);
  for (int first = 0; first < params.num_heads_kv; first += at_once) {
    const int count = std::min(at_once, params.num_heads_kv - first);
    const WidenedHeads heads = WidenedHeads::of(params, first, count, widened);
    const forward::WidenArguments args = make_widen_arguments(params, heads);
    const int num_ctas = num_widen_ctas(params, args);
    if (num_ctas > 0) {
      launch_kernel("widen_cache", "",
                    fp16 ? &forward::widen_cache<ElementType::kFloat16>
                         : &forward::widen_cache<ElementType::kBFloat16>,
                    {static_cast<unsigned>(num_ctas), forward::kWidenThreads}, stream, params.pdl,
                    args);
    }
    kernel.launch(kernel.info.name, params_of_widened(params, heads), stream);
  }
}

}  // namespace flashattn3
