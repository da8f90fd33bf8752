// The epilogue: normalises a warp's 16 rows of O and stores out and lse.
#pragma once

#include "attention/sinks.cuh"
#include "forward/arguments.h"
#include "forward/single_key.cuh"
#include "forward/traits.cuh"
#include "ptx/element.h"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::forward {

// Packs two elements of out; low is the first.
template <class Traits>
__device__ __forceinline__ uint32_t pack_out(const Arguments& args, float low, float high) {
  constexpr auto kElement = Traits::kQuantized ? ElementType::kBFloat16 : Traits::kElement;
  const bool fp16 = Traits::kQuantized && args.quantized.out_is_fp16;
  return fp16 ? pack<ElementType::kFloat16>(low, high) : pack<kElement>(low, high);
}

// first_row: of the warp, in the sequence. scale: of out. o: sums of 2^(score - row_max) * v; 0 in
// rows that saw no key: out 0, and lse -inf or the sink. sink: of the head, if it has one. staged:
// the warp's shared memory, of kOutAtoms atoms, atom_stride bytes apart; copies may read it
// afterwards (wait_for_stores).
template <class Traits, class Tile, class Softmax>
__device__ __forceinline__ void store_rows(const Arguments& args, const Tile& tile, int warpgroup,
                                           int first_row, const float (&o)[Traits::kOutRegisters],
                                           const Softmax& softmax, float scale, float sink,
                                           uint8_t* staged, int atom_stride) {
  const int lane = threadIdx.x % 32;
  float inverse[2], share[2] = {1.f, 1.f};  // share: of the row's keys, beside its sink
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = softmax.row_sum(r);
    RowStats stats{sum == 0.f ? -INFINITY : softmax.row_max_log2(r), sum};
    inverse[r] = (sum == 0.f ? 0.f : 1.f / sum) * scale;
    if (args.sinks.any()) {
      constexpr float kLog2e = 1.44269504088896f;
      const float rescale = add_sink(stats, sink * kLog2e);
      if constexpr (Traits::kSpans) {  // as decode/epilogue.cuh
        inverse[r] = stats.sum == 0.f ? 0.f : rescale / stats.sum;
      } else {
        share[r] = stats.sum == 0.f ? 1.f : sum * rescale / stats.sum;
      }
    }
    const int row = first_row + thread_row(lane) + kRowStride * r;
    if (args.lse != nullptr && row < tile.num_rows && lane % 4 == 0) {
      constexpr float kLn2 = 0.693147180559945f;
      args.lse[tile.batch_coord * args.lse_batch + (tile.row_offset + row) * args.lse_seq +
               tile.head_of(warpgroup) * args.lse_head] =
          stats.sum == 0.f ? -INFINITY : (stats.max + __log2f(stats.sum)) * kLn2;
    }
  }
  correct_single_keys<Traits>(args, tile, first_row, scale, inverse);
  inverse[0] *= share[0], inverse[1] *= share[1];
  // num_rows is marked uniform over the warp, or the main loop would lose its uniform registers.
  const RowTarget target{.tensor_map = &args.out_map,
                         .row = tile.row_offset + first_row,
                         .head = tile.head_of(warpgroup),
                         .batch_coord = tile.batch_coord,
                         .data = args.out + tile.batch_coord * args.out_batch +
                                 (tile.row_offset + first_row) * args.out_seq +
                                 tile.head_of(warpgroup) * args.out_head,
                         .row_stride = args.out_seq,
                         .num_rows = uniform(min(kRowsOfWarp, tile.num_rows - first_row)),
                         .num_columns = args.head_dim_v};
  constexpr int kAtoms = (Traits::kHeadDimV + 63) / 64;
#pragma unroll
  for (int first = 0; first < kAtoms; first += Traits::kOutAtoms) {
    if (first > 0) {
      if (lane == 0) wait_for_stores();
      __syncwarp();
    }
#pragma unroll
    for (int atom = first; atom < min(first + Traits::kOutAtoms, kAtoms); ++atom) {
      uint32_t word[16] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int at = 32 * atom + 2 * i;
        if (at < Traits::kHeadDimV / 2) {
          word[i] =
              pack_out<Traits>(args, o[at] * inverse[row_of(at)], o[at + 1] * inverse[row_of(at)]);
        }
      }
      stage_rows(staged + (atom - first) * atom_stride, word);
    }
    store_staged<Traits::kOutAtoms>(target, staged, atom_stride, 64 * first);
  }
}

// Stores a warp's rows that see no key: out 0, and lse -inf or the sink.
template <class Traits, class Tile>
__device__ __forceinline__ void store_nothing(const Arguments& args, const Tile& tile,
                                              int warpgroup, int first_row) {
  const int row = first_row + threadIdx.x % 32 / 2;
  if (row >= tile.num_rows) return;
  const int64_t token = tile.row_offset + row;
  uint16_t* out = args.out + tile.batch_coord * args.out_batch + token * args.out_seq +
                  tile.head_of(warpgroup) * args.out_head;
  for (int column = threadIdx.x % 2 * 8; column < args.head_dim_v; column += 16) {
    store_columns(out, column, args.head_dim_v, make_uint4(0, 0, 0, 0));
  }
  if (args.lse == nullptr || threadIdx.x % 2 != 0) return;
  float lse = args.sinks.any() ? args.sinks.at(tile.head_of(warpgroup)) : -INFINITY;
  if constexpr (Traits::kSpans) {  // as of a row without keys in a tile with keys
    constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
    lse = lse * kLog2e * kLn2;
  }
  args.lse[tile.batch_coord * args.lse_batch + token * args.lse_seq +
           tile.head_of(warpgroup) * args.lse_head] = lse;
}

}  // namespace flashattn3::forward
