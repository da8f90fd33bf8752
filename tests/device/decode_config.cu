// One kernel config of decode_configs.h, compiled with -DDECODE_CHECK_CONFIG=<its number>; with
// -DFLASHATTN3_WAIT_LIMIT_NS=<nanoseconds> waits time out and are listed instead of hanging.
#include "decode_configs.h"
#include "given_up_waits.cuh"
#include "launch/decode.cuh"

namespace flashattn3 {

template <>
void launch_check_config<DECODE_CHECK_CONFIG>(const DecodeParams& params, cudaStream_t stream) {
  launch_decode<kCheckConfigs[DECODE_CHECK_CONFIG]>(kCheckConfigNames[DECODE_CHECK_CONFIG], params,
                                                    stream);
  using Storage = decode::SharedStorageOf<kCheckConfigs[DECODE_CHECK_CONFIG]>;
  print_given_up_waits({FLASHATTN3_OFFSET(Storage, q_full), FLASHATTN3_OFFSET(Storage, q_empty),
                        FLASHATTN3_OFFSET(Storage, k_full), FLASHATTN3_OFFSET(Storage, k_empty),
                        FLASHATTN3_OFFSET(Storage, v_full), FLASHATTN3_OFFSET(Storage, v_empty),
                        FLASHATTN3_OFFSET(Storage, exchange_full),
                        FLASHATTN3_OFFSET(Storage, exchange_empty)});
}

}  // namespace flashattn3
