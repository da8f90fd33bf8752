// Preprocess: computes delta (sum of dout * out per row) and lse in log2 units, sums the gradients
// of sinks over the rows of a block, and resets dq_semaphore, tiles_done, the states of partial
// sums and, with cluster2, dq_accum to 0.
#pragma once

#include "attention/sinks.cuh"
#include "backward/arguments.h"
#include "ptx/approximations.cuh"
#include "ptx/pdl.cuh"
#include "tile/gemm.cuh"

namespace flashattn3::backward {

constexpr int kPreprocessThreads = 256;

// This lane's part of the dot product of two rows, 8 columns at a time.
template <ElementType kElement>
__device__ __forceinline__ float row_product(const uint16_t* a, const uint16_t* b, int num_columns,
                                             int lane, int num_lanes) {
  float sum = 0.f;
  for (int column = lane * 8; column < num_columns; column += num_lanes * 8) {
    const uint4 x = *reinterpret_cast<const uint4*>(a + column);
    const uint4 y = *reinterpret_cast<const uint4*>(b + column);
    const uint32_t first[4] = {x.x, x.y, x.z, x.w}, second[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 p = unpack<kElement>(first[i]), q = unpack<kElement>(second[i]);
      if (column + 2 * i < num_columns) sum = fmaf(p.x, q.x, sum);
      if (column + 2 * i + 1 < num_columns) sum = fmaf(p.y, q.y, sum);
    }
  }
  return sum;
}

// Stores the gradient of a head's sink over the 64 rows of a block, always summed in the same
// order: the probability of the sink times minus delta. All threads of the CTA call it after its
// rows are in the workspace. first: the block's first row there.
__device__ __forceinline__ void store_sink_gradient(const PreprocessArguments& args, int number,
                                                    int head, int64_t first) {
  constexpr float kLog2e = 1.44269504088896f;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const float sink = args.sinks.at(head) * kLog2e + args.log2_unit;
  float sum = 0.f;
#pragma unroll
  for (int i = threadIdx.x; i < kBlockM; i += 32) {
    const float lse = args.workspace.lse[first + i];  // +inf also where a sink is +inf
    if (lse < INFINITY) sum += exp2_approx(sink - lse) * args.workspace.minus_delta[first + i];
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x == 0) args.workspace.sink_gradients[number] = sum;
}

// A CTA: 64 rows of a head. 8 lanes to a row, 4 rows to a warp at a time.
// kSinks: their gradients are summed, for which the kernel takes more registers.
template <ElementType kElement, bool kSinks>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(const __grid_constant__ PreprocessArguments args) {
  constexpr int kLanes = 8;
  launch_dependents();
  griddepcontrol_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.workspace.tile_semaphore = 0;
  // Last heads first: the heads that the main kernel begins with are then in L2.
  const int number = gridDim.x - 1 - blockIdx.x;
  // Resets all counts, also of sequences without rows, for any cu_seqlens.
  for (int64_t i = int64_t{number} * kPreprocessThreads + threadIdx.x; i < args.num_counts;
       i += int64_t{gridDim.x} * kPreprocessThreads) {
    args.workspace.tiles_done[i] = 0;
  }
  if (threadIdx.x < args.dq_semaphores_per_block) {
    args.workspace.dq_semaphore[int64_t{number} * args.dq_semaphores_per_block + threadIdx.x] = 0;
  }
  const MBlock block =
      MBlock::of_number(number, args.workspace, args.seqlens_q, args.batch, args.num_heads);
  if constexpr (kSinks) {
    if (!block.any() && threadIdx.x == 0) args.workspace.sink_gradients[number] = 0.f;
  }
  if (!block.any()) return;
  const int head = block.head;
  const Sequence rows = block.rows;
  const int64_t first = int64_t{number} * kBlockM;
  const int64_t batch_coord = args.seqlens_q.cu_seqlens != nullptr ? 0 : block.batch_idx;
  float4* dq_accum =
      reinterpret_cast<float4*>(args.workspace.dq_accum + first * args.dq_accum_columns);
  for (int i = threadIdx.x; i < args.dq_accum_columns * kBlockM / 4; i += kPreprocessThreads) {
    dq_accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int i = threadIdx.x / kLanes; i < kBlockM; i += kPreprocessThreads / kLanes) {
    const int row = block.first_row + i;
    const int64_t token = rows.offset + row;
    const bool there = row < rows.length;
    float sum = 0.f;
    if (there) {
      sum = row_product<kElement>(
          args.out + batch_coord * args.out_batch + token * args.out_seq + head * args.out_head,
          args.dout + batch_coord * args.dout_batch + token * args.dout_seq + head * args.dout_head,
          args.head_dim_v, threadIdx.x % kLanes, kLanes);
    }
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (threadIdx.x % kLanes != 0) continue;
    float lse = INFINITY, minus_delta = 0.f;
    if (there) {
      constexpr float kLog2e = 1.44269504088896f;
      const float natural =
          args.lse[batch_coord * args.lse_batch + token * args.lse_seq + head * args.lse_head];
      if (natural != -INFINITY) {
        lse = natural * kLog2e + args.log2_unit;
        minus_delta = -sum;
        if (args.dlse != nullptr) {
          minus_delta += args.dlse[batch_coord * args.dlse_batch + token * args.dlse_seq +
                                   head * args.dlse_head];
        }
      }
    }
    args.workspace.lse[first + i] = lse;
    args.workspace.minus_delta[first + i] = minus_delta;
  }
  if constexpr (kSinks) store_sink_gradient(args, number, head, first);
}

}  // namespace flashattn3::backward
