// One row of forward_rows.h, compiled with -DFORWARD_CHECK_ROW=<its number>.
#include "forward_rows.h"
#include "host/launch_forward.cuh"

namespace flashattn3 {

template <>
void launch_check_row<FORWARD_CHECK_ROW>(const ForwardParams& params, cudaStream_t stream) {
  launch_forward<kCheckRows[FORWARD_CHECK_ROW]>(params, stream);
}

}  // namespace flashattn3
