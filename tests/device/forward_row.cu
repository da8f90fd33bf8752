// One row of forward_rows.h, compiled with -DFORWARD_CHECK_ROW=<its number>; with
// -DFLASHATTN3_WAIT_LIMIT_NS=<nanoseconds> it gives up waits and lists them instead of hanging.
#include <cstddef>
#include <cstdio>

#include "forward_rows.h"
#include "host/launch_forward.cuh"

namespace flashattn3 {

template <>
void launch_check_row<FORWARD_CHECK_ROW>(const ForwardParams& params, cudaStream_t stream) {
  launch_forward<kCheckRows[FORWARD_CHECK_ROW]>(params, stream);
#ifdef FLASHATTN3_WAIT_LIMIT_NS
  using Control = ForwardControlOf<kCheckRows[FORWARD_CHECK_ROW]>;
  cudaDeviceSynchronize();
  static GivenUpWaits waits;
  cudaMemcpyFromSymbol(&waits, given_up_waits, sizeof(waits));
  if (waits.count == 0) return;
  std::printf(
      "%u waits given up; offsets: q_full %zu, q_empty %zu, k_full %zu, k_empty %zu, "
      "v_full %zu, v_empty %zu, tail_full %zu, tile_full %zu, tile_empty %zu\n",
      waits.count, offsetof(Control, q_full), offsetof(Control, q_empty), offsetof(Control, k_full),
      offsetof(Control, k_empty), offsetof(Control, v_full), offsetof(Control, v_empty),
      offsetof(Control, tail_full), offsetof(Control, tile_full), offsetof(Control, tile_empty));
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
