// One kernel config of forward_configs.h, compiled with -DFORWARD_CHECK_CONFIG=<its number>; with
// -DFLASHATTN3_WAIT_LIMIT_NS=<nanoseconds> waits time out and are listed instead of hanging.
#include <cstddef>
#include <cstdio>

#include "forward_configs.h"
#include "launch/forward.cuh"

namespace flashattn3 {

template <>
void launch_check_config<FORWARD_CHECK_CONFIG>(const ForwardParams& params, cudaStream_t stream) {
  launch_forward<kCheckConfigs[FORWARD_CHECK_CONFIG]>(kCheckConfigNames[FORWARD_CHECK_CONFIG],
                                                      params, stream);
#ifdef FLASHATTN3_WAIT_LIMIT_NS
  using Storage = forward::SharedStorageOf<kCheckConfigs[FORWARD_CHECK_CONFIG]>;
  cudaDeviceSynchronize();
  static GivenUpWaits waits;
  cudaMemcpyFromSymbol(&waits, given_up_waits, sizeof(waits));
  if (waits.count == 0) return;
  std::printf(
      "%u waits given up; offsets: q_full %zu, q_empty %zu, k_full %zu, k_empty %zu, "
      "v_full %zu, v_empty %zu, v_unfilled_full %zu, tile_full %zu, tile_empty %zu\n",
      waits.count, offsetof(Storage, q_full), offsetof(Storage, q_empty), offsetof(Storage, k_full),
      offsetof(Storage, k_empty), offsetof(Storage, v_full), offsetof(Storage, v_empty),
      offsetof(Storage, v_unfilled_full), offsetof(Storage, tile_full),
      offsetof(Storage, tile_empty));
  for (uint32_t i = 0; i < waits.count && i < 64; ++i) {
    const GivenUpWait& w = waits.first[i];
    std::printf("  CTA %u thread %u: offset %u parity %u\n", w.block, w.thread, w.barrier - 1024,
                w.parity);
  }
  waits = {};
  cudaMemcpyToSymbol(given_up_waits, &waits, sizeof(waits));
#endif
}

}  // namespace flashattn3
