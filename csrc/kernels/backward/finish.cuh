// After the backward kernel: dq from its sums, which lie as the accumulators held them.
#pragma once

#include "blocks/grid_dependency.cuh"
#include "blocks/row_store.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/backward/arguments.h"

namespace flashattn3 {

// A CTA of 128 threads: 64 rows of a head; warps of 16 rows as in WGMMA's
// accumulators.
template <ElementType kElement, int kHeadDim>
__global__ void __launch_bounds__(128)
    backward_finish(const __grid_constant__ FinishArguments args) {
  constexpr int kChunks = (kHeadDim + 63) / 64;
  __shared__ __align__(1024) uint8_t staged[4][kChunks][kRowsOfWarp * 128];
  allow_dependents();
  wait_for_earlier_kernels();
  const auto [block, head, sequence] = RowBlock::of_this_cta(args.num_blocks, args.num_heads);
  const Sequence rows = find_sequence(args.rows, sequence);
  const Sequence keys = find_sequence(args.keys, sequence);
  const int first_row = block * kBackwardRows;
  if (first_row >= rows.length) return;
  const BlockRange seen =
      Visibility::of(rows.length, keys.length, args.window_left, args.window_right)
          .template blocks<64>(first_row, min(first_row + kBackwardRows, rows.length) - 1);
  const int64_t first =
      args.room.first(args.rows, sequence, head, args.num_heads, rows.offset) + first_row;
  const float4* sums =
      reinterpret_cast<const float4*>(args.room.sums + first * kHeadDim) + threadIdx.x;
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

}  // namespace flashattn3
