// Stores a warp's 16 keys of dK and dV.
#pragma once

#include "backward/arguments.h"
#include "backward/traits.cuh"
#include "tile/gemm.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::backward {

// Stores columns first_column to first_column + kColumns - 1. staged: the warp's shared memory,
// swizzle atoms of 64 columns, atom_stride bytes apart; no thread reads it any more.
template <ElementType kElement, int kColumns>
__device__ __forceinline__ void store_gradient(const RowTarget& target, int first_column,
                                               const float (&gradient)[kColumns / 2], float factor,
                                               uint8_t* staged, int atom_stride) {
  constexpr int kAtoms = (kColumns + 63) / 64;
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    uint32_t word[16] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = 32 * atom + 2 * i;
      if (at < kColumns / 2) {
        word[i] = pack<kElement>(gradient[at] * factor, gradient[at + 1] * factor);
      }
    }
    stage_rows(staged + atom * atom_stride, word);
  }
  store_staged<kAtoms>(target, staged, atom_stride, first_column);
  // The staging memory is reused or loaded into afterwards.
  if (threadIdx.x % 32 == 0) wait_for_stores();
  __syncwarp();
}

// The same without shared memory, for rare cases.
template <ElementType kElement, int kCount>
__device__ __forceinline__ void store_unstaged(const RowTarget& target,
                                               const float (&gradient)[kCount], float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int row = thread_row(lane) + register_row(i);
    const int column = thread_column(lane) + register_column(i);
    if (row >= target.num_rows || column >= target.num_columns) continue;
    *reinterpret_cast<uint32_t*>(target.data + row * target.row_stride + column) =
        pack<kElement>(gradient[i] * factor, gradient[i + 1] * factor);
  }
}

// first_key: of the warp, in the sequence.
__device__ __forceinline__ RowTarget key_target(const Arguments& args, const WorkTile& tile,
                                                int first_key) {
  const int row = tile.key_offset + first_key, head = kv_head(args, tile);
  return {
      .tensor_map = &args.dk_map,
      .row = row,
      .head = head,
      .batch_coord = tile.batch_coord,
      .data = args.dk + tile.batch_coord * args.dk_batch + row * args.dk_seq + head * args.dk_head,
      .row_stride = args.dk_seq,
      .num_rows = uniform(min(kRowsOfWarp, tile.num_keys - first_key)),
      .num_columns = args.head_dim};
}
__device__ __forceinline__ RowTarget value_target(const Arguments& args, const WorkTile& tile,
                                                  int first_key) {
  const int row = tile.key_offset + first_key, head = kv_head(args, tile);
  return {
      .tensor_map = &args.dv_map,
      .row = row,
      .head = head,
      .batch_coord = tile.batch_coord,
      .data = args.dv + tile.batch_coord * args.dv_batch + row * args.dv_seq + head * args.dv_head,
      .row_stride = args.dv_seq,
      .num_rows = uniform(min(kRowsOfWarp, tile.num_keys - first_key)),
      .num_columns = args.head_dim_v};
}

// Stores zeros for keys that no query sees.
__device__ __forceinline__ void store_zeros(const RowTarget& target) {
  const int row = threadIdx.x % 32 / 2;
  if (row >= target.num_rows) return;
  for (int column = threadIdx.x % 2 * 8; column < target.num_columns; column += 16) {
    store_columns(target.data + row * target.row_stride, column, target.num_columns,
                  make_uint4(0, 0, 0, 0));
  }
}

}  // namespace flashattn3::backward
