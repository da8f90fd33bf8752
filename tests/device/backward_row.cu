// One row of backward_rows.h, compiled with -DBACKWARD_CHECK_ROW=<its number>.
#include "backward_rows.h"
#include "host/launch_backward.cuh"

namespace flashattn3 {

template <>
void launch_check_row<BACKWARD_CHECK_ROW>(const BackwardParams& params, cudaStream_t stream) {
  launch_backward<kCheckRows[BACKWARD_CHECK_ROW]>(params, stream);
}

template <>
int64_t check_row_workspace_bytes<BACKWARD_CHECK_ROW>(const ForwardParams& params) {
  return backward_workspace_bytes<kCheckRows[BACKWARD_CHECK_ROW]>(params);
}

template <>
const int32_t* check_row_tiles_taken<BACKWARD_CHECK_ROW>(const BackwardParams& params) {
  return make_row_room<kCheckRows[BACKWARD_CHECK_ROW]>(params).tiles_taken;
}

}  // namespace flashattn3
