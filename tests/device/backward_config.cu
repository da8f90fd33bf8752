// One kernel config of backward_configs.h, compiled with -DBACKWARD_CHECK_CONFIG=<its number>.
#include "backward_configs.h"
#include "launch/backward.cuh"

namespace flashattn3 {

template <>
void launch_check_config<BACKWARD_CHECK_CONFIG>(const BackwardParams& params, cudaStream_t stream) {
  launch_backward<kCheckConfigs[BACKWARD_CHECK_CONFIG]>(kCheckConfigNames[BACKWARD_CHECK_CONFIG],
                                                        params, stream);
}

template <>
int64_t check_config_workspace_bytes<BACKWARD_CHECK_CONFIG>(const ForwardParams& params) {
  return backward_workspace_bytes<kCheckConfigs[BACKWARD_CHECK_CONFIG]>(params);
}

template <>
const int32_t* check_config_tile_semaphore<BACKWARD_CHECK_CONFIG>(const BackwardParams& params) {
  return make_workspace<kCheckConfigs[BACKWARD_CHECK_CONFIG]>(params).tile_semaphore;
}

}  // namespace flashattn3
