// One kernel config of forward_configs.h, compiled with -DFORWARD_CHECK_CONFIG=<its number>; with
// -DFLASHATTN3_WAIT_LIMIT_NS=<nanoseconds> waits time out and are listed instead of hanging.
#include "forward_configs.h"
#include "given_up_waits.cuh"
#include "launch/forward.cuh"

namespace flashattn3 {

template <>
void launch_check_config<FORWARD_CHECK_CONFIG>(const ForwardParams& params, cudaStream_t stream) {
  launch_forward<kCheckConfigs[FORWARD_CHECK_CONFIG]>(kCheckConfigNames[FORWARD_CHECK_CONFIG],
                                                      params, stream);
  using Storage = forward::SharedStorageOf<kCheckConfigs[FORWARD_CHECK_CONFIG]>;
  print_given_up_waits({FLASHATTN3_OFFSET(Storage, q_full), FLASHATTN3_OFFSET(Storage, q_empty),
                        FLASHATTN3_OFFSET(Storage, k_full), FLASHATTN3_OFFSET(Storage, k_empty),
                        FLASHATTN3_OFFSET(Storage, v_full), FLASHATTN3_OFFSET(Storage, v_empty),
                        FLASHATTN3_OFFSET(Storage, v_unfilled_full),
                        FLASHATTN3_OFFSET(Storage, tile_full),
                        FLASHATTN3_OFFSET(Storage, tile_empty)});
}

}  // namespace flashattn3
