// The gradient of a bias from the dS of each sequence and head, which the main kernel has written
// in 16 bits: sums, in float32 and always in the same order, over the sequences and heads that
// share the bias, and zeros where the mask hides blocks, which the main kernel does not visit.
#pragma once

#include <cstdint>

#include "attention/block_list.cuh"
#include "backward/config.h"
#include "ptx/convert_16bit.cuh"

namespace flashattn3::backward {

constexpr int kReduceBiasThreads = 256;

// Planes are (seqlen_q, pitch) of 16-bit elements and dense; pitch is a multiple of 8.
struct ReduceBiasArguments {
  const uint16_t* ds;  // planes of (batch, num_heads_q)
  uint16_t* dbias;     // planes of the bias; with one term the main kernel has written it
  int64_t plane;       // elements of a plane
  int64_t num_vecs;    // of 8 elements, in all planes of dbias
  // Plane i of dbias is the sum of num_terms planes of ds, from plane i * first_step on.
  int64_t num_terms, first_step, term_step;
  int seqlen_q, seqlen_k, pitch;
  Window window;
};

// A thread: 8 neighbouring elements of dbias.
template <ElementType kElement>
__global__ void __launch_bounds__(kReduceBiasThreads)
    reduce_bias_kernel(const __grid_constant__ ReduceBiasArguments args) {
  constexpr int kBlock = 64;  // queries and keys of the smallest block that the main kernel skips
  const int64_t vec = int64_t{blockIdx.x} * kReduceBiasThreads + threadIdx.x;
  if (vec >= args.num_vecs) return;
  const int64_t plane = vec * 8 / args.plane;
  const int64_t within = vec * 8 - plane * args.plane;
  const int row = static_cast<int>(within / args.pitch);
  const int key = static_cast<int>(within - int64_t{row} * args.pitch);
  const int first_row = row / kBlock * kBlock;
  const BlockRange seen =
      Mask::of(args.seqlen_q, args.seqlen_k, args.window)
          .template n_blocks<kBlock>(first_row, min(first_row + kBlock, args.seqlen_q) - 1);
  uint4* to = reinterpret_cast<uint4*>(args.dbias) + vec;
  if (!seen.has(key / kBlock)) {
    *to = make_uint4(0, 0, 0, 0);
    return;
  }
  if (args.num_terms == 1) return;
  const uint16_t* from = args.ds + plane * args.first_step * args.plane + within;
  float sum[8] = {};
#pragma unroll 8
  for (int64_t i = 0; i < args.num_terms; ++i) {
    const uint4 term =
        __ldcs(reinterpret_cast<const uint4*>(from + i * args.term_step * args.plane));
    const uint32_t word[4] = {term.x, term.y, term.z, term.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack<kElement>(word[j]);
      sum[2 * j] += pair.x, sum[2 * j + 1] += pair.y;
    }
  }
  *to = make_uint4(pack<kElement>(sum[0], sum[1]), pack<kElement>(sum[2], sum[3]),
                   pack<kElement>(sum[4], sum[5]), pack<kElement>(sum[6], sum[7]));
}

}  // namespace flashattn3::backward
