// Estimates the mean of a head's tokens from kSample of them, spread evenly over the sequence, for
// smoothing (SageAttention). It equals flashattn3/quantization/smoothing.py bit for bit: intrinsics
// round each operation once (no fusion), and the order of the sums is fixed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ptx/pdl.cuh"
#include "quantize/arguments.h"
#include "quantize/tile.cuh"
#include "quantize/values.cuh"
#include "quantize_limits.h"

namespace flashattn3::quantize {

constexpr int kSampleLanes = 16;  // threads that share the tokens of 8 columns
constexpr int kTokensOfLane = kSample / kSampleLanes;

constexpr int sample_threads(int columns) { return kSampleLanes * columns / kVec; }

// Tree sum: adds pairs at a distance of half of all values, then a quarter, and so on.
template <int kCount>
__device__ __forceinline__ float tree_sum(float (&x)[kCount]) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) x[i] = __fadd_rn(x[i], x[i + half]);
  }
  return x[0];
}

// Loads tokens `lane`, lane + 16, ... of the sample; zeros past its end.
__device__ __forceinline__ void load_sample(VecWords<uint16_t> (&vec)[kTokensOfLane],
                                            const Source& source, const WorkTile& tile, int lane,
                                            int column) {
  const auto* head = tile_rows<uint16_t>(source, tile) + column;
  const int length = tile.sequence.length, num_columns = source.head_dim - column;
  memset(vec, 0, sizeof(vec));
#pragma unroll
  for (int i = 0; i < kTokensOfLane; ++i) {
    const int permuted_key = lane + i * kSampleLanes;
    if (permuted_key >= min(length, kSample) || num_columns <= 0) continue;
    const int64_t token =
        length <= kSample ? permuted_key : uint64_t(permuted_key) * length / kSample;
    const uint16_t* columns = head + token * source.stride.seq;
    if (source.whole_vecs) {
      load_vec(vec[i], columns);
    } else {
      load_vec(vec[i], columns, num_columns);
    }
  }
}

// Grid: heads * batch.
template <ElementType kType, int kColumns>
__global__ void __launch_bounds__(sample_threads(kColumns))
    sample_mean(const __grid_constant__ SampleArguments args) {
  __shared__ float4 sums[kSampleLanes][kColumns / 4], squares[kSampleLanes][kColumns / 4];
  launch_dependents();
  griddepcontrol_wait();
  WorkTile tile{};
  args.x.by_heads(tile.batch_idx, tile.head, blockIdx.x);
  tile.sequence = find_sequence(args.x.tokens, tile.batch_idx);
  constexpr int kVecsOfToken = kColumns / kVec;
  const int lane = threadIdx.x / kVecsOfToken, column = threadIdx.x % kVecsOfToken * kVec;
  VecWords<uint16_t> vec[kTokensOfLane];
  load_sample(vec, args.x, tile, lane, column);
  float sum[kVec], square_sum[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float x[kTokensOfLane], square[kTokensOfLane];
#pragma unroll
    for (int j = 0; j < kTokensOfLane; ++j) {
      const float2 two = Pair<kType>::floats(vec[j][i / 2]);
      const float value = i % 2 == 0 ? two.x : two.y;
      x[j] = fabsf(value) < INFINITY ? value : 0.f;
      square[j] = __fmul_rn(x[j], x[j]);
    }
    sum[i] = tree_sum(x);
    square_sum[i] = tree_sum(square);
  }
  memcpy(&sums[lane][column / 4], sum, sizeof(sum));
  memcpy(&squares[lane][column / 4], square_sum, sizeof(square_sum));
  __syncthreads();  // all lanes' sums are written

  const int own = threadIdx.x;  // column
  if (own >= args.x.head_dim) return;
  float x[kSampleLanes], square[kSampleLanes];
#pragma unroll
  for (int i = 0; i < kSampleLanes; ++i) {
    x[i] = reinterpret_cast<const float*>(sums[i])[own];
    square[i] = reinterpret_cast<const float*>(squares[i])[own];
  }
  const float total = tree_sum(x), count = min(tile.sequence.length, kSample);
  const float of_total = __fmul_rn(total, total);
  const float spread = __fsub_rn(tree_sum(square), __fdiv_rn(of_total, count));
  // 0 for an empty sequence too, whose spread is NaN.
  const bool found = of_total > __fmul_rn(kSignificant, spread);
  args.mean[int64_t{blockIdx.x} * args.x.head_dim + own] = found ? __fdiv_rn(total, count) : 0.f;
}

}  // namespace flashattn3::quantize
