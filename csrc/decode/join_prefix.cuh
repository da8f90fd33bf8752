// Joins the two results of each row of a call with a prefix: of the sequence's own keys, and of the
// prefix (row_results.cuh), with the row's sink. It runs after the decode kernel.
#pragma once

#include <cstdint>

#include "decode/epilogue.cuh"
#include "decode/join_arguments.h"
#include "decode/softmax.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::decode {

// A warp takes a row, a lane four columns of it; head dims are at most 128.
template <ElementType kElement>
__global__ void __launch_bounds__(kJoinThreads)
    join_prefix(const __grid_constant__ JoinArguments args) {
  launch_dependents();
  griddepcontrol_wait();
  const int lane = threadIdx.x % 32, column = 4 * lane;
  const int64_t row = blockIdx.x * int64_t{kJoinRows} + threadIdx.x / 32;
  if (row >= args.num_rows) return;
  float4 value[2] = {};
  float2 stats[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int64_t at = row + k * args.num_rows;
    // L2 only: other SMs have written these lines.
    if (column < args.head_dim_v) {
      value[k] =
          __ldcg(reinterpret_cast<const float4*>(args.row_out + at * args.head_dim_v + column));
    }
    stats[k] = __ldcg(args.row_stats + at);
  }
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  RowStats all{-INFINITY, 0.f};
  add_results(value, stats, sum, all);
  const int token = static_cast<int>(row / args.num_heads_q);
  const int head = static_cast<int>(row - int64_t{token} * args.num_heads_q);
  float factor = args.v_descale == nullptr ? 1.f : *args.v_descale;
  if (args.sinks != nullptr) factor *= add_sink(all, args.sinks[head] * kLog2OfE);
  const int batch_idx = token / args.tokens_of_batch;
  const int64_t in_batch = token - batch_idx * args.tokens_of_batch;
  if (lane == 0 && args.lse != nullptr) {
    args.lse[batch_idx * args.lse_batch + in_batch * args.lse_seq + head * args.lse_head] =
        lse_of(all);
  }
  if (column >= args.head_dim_v) return;
  factor = all.sum == 0.f ? 0.f : factor / all.sum;
  uint16_t* const out =
      args.out + batch_idx * args.out_batch + in_batch * args.out_seq + head * args.out_head;
  *reinterpret_cast<uint2*>(out + column) =
      make_uint2(pack<kElement>(sum.x * factor, sum.y * factor),
                 pack<kElement>(sum.z * factor, sum.w * factor));
}

}  // namespace flashattn3::decode
