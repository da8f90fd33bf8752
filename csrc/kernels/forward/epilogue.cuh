// Normalises a warpgroup's 64 rows and stores them and their log-sum-exp.
#pragma once

#include "blocks/element.h"
#include "blocks/online_softmax.cuh"
#include "blocks/row_store.cuh"
#include "blocks/tile_product.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"

namespace flashattn3 {

// o: sums of 2^(score - reference) * v. first_row: of the warpgroup, in the sequence; rows past the
// sequence are not stored. Rows that saw no key: out 0, lse -inf. Straight from registers: no
// shared memory, so no other warpgroup and no copy has to be waited for.
template <ElementType kElement, int kHeadDim, class Softmax>
__device__ __forceinline__ void store_out(const ForwardArguments& args, const RowTile& tile,
                                          int first_row, const float (&o)[kHeadDim / 2],
                                          const Softmax& softmax) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
    const bool inside = row < tile.num_rows;
    const int64_t token = tile.row_offset + row;
    const float sum = softmax.row_sum(r);
    const bool empty = sum == 0.f;
    const float inverse = 1.f / sum;
    uint16_t* out =
        args.out + tile.entry * args.out_batch + token * args.out_seq + tile.head * args.out_head;
    if (args.lse != nullptr && inside && lane % 4 == 0) {
      constexpr float kLn2 = 0.693147180559945f;
      args.lse[tile.entry * args.lse_batch + token * args.lse_seq + tile.head * args.lse_head] =
          empty ? -INFINITY : (softmax.reference[r] + __log2f(sum)) * kLn2;
    }
#pragma unroll
    for (int group = 0; group < kHeadDim / 32; ++group) {  // of 32 columns
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * group + 4 * i + 2 * r;
        word[i] = pack<kElement>(empty ? 0.f : o[at] * inverse, empty ? 0.f : o[at + 1] * inverse);
      }
      transpose_quad(word);
      if (inside) store_columns(out, group * 32 + lane % 4 * 8, args.head_dim_v, word);
    }
  }
}

// Rows of which none sees a key.
__device__ __forceinline__ void store_nothing(const ForwardArguments& args, const RowTile& tile,
                                              int first_row) {
  const int row = first_row + threadIdx.x % 128 / 2;
  if (row >= tile.num_rows) return;
  const int64_t token = tile.row_offset + row;
  uint16_t* out =
      args.out + tile.entry * args.out_batch + token * args.out_seq + tile.head * args.out_head;
  constexpr uint32_t kZeros[4] = {0, 0, 0, 0};
  for (int column = threadIdx.x % 2 * 8; column < args.head_dim_v; column += 16) {
    store_columns(out, column, args.head_dim_v, kZeros);
  }
  if (args.lse == nullptr || threadIdx.x % 2 != 0) return;
  args.lse[tile.entry * args.lse_batch + token * args.lse_seq + tile.head * args.lse_head] =
      -INFINITY;
}

}  // namespace flashattn3
