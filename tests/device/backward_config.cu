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
  constexpr int kIndex = BACKWARD_CHECK_CONFIG;
  return backward_size<kCheckConfigs[kIndex]>(kCheckConfigNames[kIndex], params).workspace_bytes;
}

template <>
const int32_t* check_config_tile_semaphore<BACKWARD_CHECK_CONFIG>(const BackwardParams& params) {
  constexpr backward::Config kConfig = kCheckConfigs[BACKWARD_CHECK_CONFIG];
  const BackwardSizes sizes =
      backward_sizes<kConfig>(kCheckConfigNames[BACKWARD_CHECK_CONFIG], params.forward);
  return make_workspace<kConfig>(sizes, params).tile_semaphore;
}

}  // namespace flashattn3
