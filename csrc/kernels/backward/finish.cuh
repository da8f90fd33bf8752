// Behind the backward kernel: dq from its sums, which lie as the accumulators held them.
#pragma once

#include "blocks/grid_dependency.cuh"
#include "blocks/row_store.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/arrivals.cuh"

namespace flashattn3 {

// All threads of the CTA, until all tiles of the head's keys are through, whose additions they can
// then read.
template <BackwardRow kRow>
__device__ __forceinline__ void wait_for_tiles(const BackwardArguments& args, int sequence,
                                               int head, int num_keys) {
  constexpr int kKeys = backward_keys(kRow);
  const int num_tiles = (num_keys + kKeys - 1) / kKeys;
  if (threadIdx.x == 0) {
    const int32_t* through =
        args.room.tiles_through + sequence * args.num_heads_kv + head / args.heads_per_kv;
    while (load_acquire(through) < num_tiles * kRow.num_mma_warpgroups) __nanosleep(256);
  }
  __syncthreads();
  fence_global_proxies();
}

// A CTA of 128 threads: 64 rows of a head; warps of 16 rows as in WGMMA's accumulators. number: of
// the block in the room.
template <BackwardRow kRow>
__device__ __forceinline__ void finish_block(const BackwardArguments& args, int number) {
  constexpr ElementType kElement = kRow.dtype;
  constexpr int kHeadDim = kRow.head_dim;
  constexpr int kChunks = (kHeadDim + 63) / 64;
  __shared__ __align__(1024) uint8_t staged[4][kChunks][kRowsOfWarp * 128];
  const RowBlock block =
      RowBlock::of_number(number, args.room, args.rows, args.order.ragged.batch, args.num_heads_q);
  if (!block.any()) return;
  const int head = block.head, sequence = block.sequence, first_row = block.first_row;
  const Sequence rows = block.rows;
  const int num_keys = find_sequence(args.keys, sequence).length;
  const BlockRange seen =
      Visibility::of(rows.length, num_keys, args.window_left, args.window_right)
          .template blocks<64>(first_row, min(first_row + kBackwardRows, rows.length) - 1);
  if (!backward_in_pairs(kRow)) wait_for_tiles<kRow>(args, sequence, head, num_keys);
  const float4* sums = reinterpret_cast<const float4*>(
                           args.room.sums + int64_t{number} * (kBackwardRows * kHeadDim)) +
                       threadIdx.x;
  float4 sum[kHeadDim / 8];
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) {
    sum[i] = seen.begin < seen.end ? __ldcs(sums + i * 128) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    uint32_t word[16] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (8 * chunk + i >= kHeadDim / 8) continue;
      const float4 four = sum[8 * chunk + i];
      const float scale = args.softmax_scale;
      word[2 * i] = pack<kElement>(four.x * scale, four.y * scale);
      word[2 * i + 1] = pack<kElement>(four.z * scale, four.w * scale);
    }
    stage_rows(staged[warp][chunk], word);
  }
  __syncwarp();
  const int units = (args.head_dim + 7) / 8;
  const int64_t entry = args.rows.cu_seqlens != nullptr ? 0 : sequence;
  const int row_of_warp = first_row + warp * kRowsOfWarp;
  uint16_t* dq = args.dq + entry * args.dq_batch + (rows.offset + row_of_warp) * args.dq_seq +
                 head * args.dq_head;
  for (int i = lane; i < kRowsOfWarp * units; i += 32) {
    const int row = i / units, unit = i % units;
    if (row_of_warp + row >= rows.length) break;
    store_columns(dq + row * args.dq_seq, unit * 8, args.head_dim,
                  staged_columns(staged[warp][unit / 8], row, unit % 8));
  }
}

// The CTAs take the places of those of the kernel before as they become free. Up to 128 columns
// they begin with heads whose sums are complete; for pairs that is not counted.
template <class Config>  // a type and not a row, as for backward_attention
__global__ void __launch_bounds__(128)
    backward_finish(const __grid_constant__ BackwardArguments args) {
  constexpr BackwardRow kRow = Config::kRow;
  allow_dependents();
  if constexpr (backward_in_pairs(kRow)) {
    wait_for_earlier_kernels();
    finish_block<kRow>(args, gridDim.x - 1 - blockIdx.x);  // the last sums are in L2
  } else {
    finish_block<kRow>(args, blockIdx.x);
    // Nobody is to find this kernel complete before that.
    if (blockIdx.x == gridDim.x - 1) wait_for_earlier_kernels();
  }
}

}  // namespace flashattn3
