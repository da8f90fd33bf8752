// One kernel config of forward_configs.h, compiled with -DFORWARD_CHECK_CONFIG=<its number>; with
// -DFLASHATTN3_WAIT_LIMIT_NS=<nanoseconds> waits time out and are listed instead of hanging.
#include "forward_configs.h"
#include "given_up_waits.cuh"
#include "launch/forward_cached.cuh"

namespace flashattn3 {
namespace {

constexpr forward::Config kConfig = kCheckConfigs[FORWARD_CHECK_CONFIG];
constexpr const char* kName = kCheckConfigNames[FORWARD_CHECK_CONFIG];

void print_waits() {
  using Storage = forward::SharedStorageOf<kConfig>;
  print_given_up_waits({FLASHATTN3_OFFSET(Storage, q_full), FLASHATTN3_OFFSET(Storage, q_empty),
                        FLASHATTN3_OFFSET(Storage, k_full), FLASHATTN3_OFFSET(Storage, k_empty),
                        FLASHATTN3_OFFSET(Storage, v_full), FLASHATTN3_OFFSET(Storage, v_empty),
                        FLASHATTN3_OFFSET(Storage, v_unfilled_full),
                        FLASHATTN3_OFFSET(Storage, tile_full),
                        FLASHATTN3_OFFSET(Storage, tile_empty)});
}

// Templates, so that the branch for the other kind of config is not compiled.
template <forward::Config kTheConfig>
void launch_tensors(const ForwardParams& params, cudaStream_t stream) {
  if constexpr (kTheConfig.cached) {
    fail(kName, "takes cached calls alone");
  } else {
    launch_forward<kTheConfig>(kName, params, stream);
  }
}
template <forward::Config kTheConfig>
void launch_cached(const DecodeParams& params, cudaStream_t stream) {
  if constexpr (kTheConfig.cached) {
    launch_cached_forward<kTheConfig>(kName, params, stream);
  } else {
    fail(kName, "takes no cached call");
  }
}

}  // namespace

template <>
void launch_check_config<FORWARD_CHECK_CONFIG>(const ForwardParams& params, cudaStream_t stream) {
  launch_tensors<kConfig>(params, stream);
  print_waits();
}

template <>
void launch_cached_check_config<FORWARD_CHECK_CONFIG>(const DecodeParams& params,
                                                      cudaStream_t stream) {
  launch_cached<kConfig>(params, stream);
  print_waits();
}

}  // namespace flashattn3
