// One kernel config of backward_configs.h, compiled with -DBACKWARD_CHECK_CONFIG=<its number>.
#include "backward_configs.h"
#include "launch/backward.cuh"

namespace flashattn3 {

template <>
void launch_check_config<BACKWARD_CHECK_CONFIG>(const BackwardParams& params, cudaStream_t stream) {
  launch_backward<kCheckConfigs[BACKWARD_CHECK_CONFIG]>(kCheckConfigNames[BACKWARD_CHECK_CONFIG],
                                                        params, stream);
}

static BackwardSizes check_config_sizes(const AttentionProblem& problem) {
  constexpr int kIndex = BACKWARD_CHECK_CONFIG;
  return backward_sizes<kCheckConfigs[kIndex]>(kCheckConfigNames[kIndex], problem);
}

template <>
int64_t check_config_workspace_bytes<BACKWARD_CHECK_CONFIG>(const ForwardParams& params) {
  return check_config_sizes(params).workspace_bytes;
}

template <>
int check_config_num_parts<BACKWARD_CHECK_CONFIG>(const ForwardParams& params) {
  return check_config_sizes(params).num_head_parts;
}

template <>
const int32_t* check_config_tile_semaphore<BACKWARD_CHECK_CONFIG>(const BackwardParams& params) {
  return make_workspace<kCheckConfigs[BACKWARD_CHECK_CONFIG]>(check_config_sizes(params.forward),
                                                              params)
      .tile_semaphore;
}

}  // namespace flashattn3
