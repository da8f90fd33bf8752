// Row sums of e4m3 probabilities by WGMMA, in the product that makes out: behind V's columns its
// tile has kRowSumColumns more, which hold what each key counts, and so the sums come as columns of
// out. They are taken from there after every tile: what WGMMA adds to a large sum loses bits,
// always to the same side (9 % of a sum over 4096 keys).
//
// What a key counts is the inverse of a factor of its probability, any float (score_scale.cuh).
// Column c has of it what the columns before it leave, 2^(4c) times as much, in e4m3, whose four
// bits leave a sixteenth. A weight of 1 is 2^kLog2KeyWeight, so that the largest is below 448.
#pragma once

#include <cstdint>

#include "ptx/convert_fp8.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/gemm.cuh"
#include "tile/permuted_v.h"

namespace flashattn3 {

constexpr int kLog2KeyWeight = 6;
// WGMMA cuts off about 1.1 % of the sum of a tile of normal scores, nothing where one key has it
// all.
constexpr float kRowSumCorrection = 1.006f;
constexpr int kUsedRowSumColumns = 4;  // that hold something; the others are 0
// As log2 of the factor, where a weight still stands for it to 12 bits.
constexpr float kLeastFactor = -2.f, kGreatestFactor = 14.f;

// By the threads of the CTA, before its first __syncthreads. weights: of kKeys keys.
template <int kKeys>
__device__ __forceinline__ void zero_row_sum_columns(uint8_t* weights) {
  for (int i = threadIdx.x; i < kKeys * kRowSumColumns / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(weights)[i] = 0;
  }
  fence_async_proxy();
}

// What the columns hold for a key, a byte for each.
__device__ __forceinline__ uint32_t row_sum_column_bytes(float weight) {
  float left[kUsedRowSumColumns] = {weight * (1 << kLog2KeyWeight)};
#pragma unroll
  for (int c = 1; c < kUsedRowSumColumns; ++c) {
    left[c] = (left[c - 1] - rounded_to_e4m3(left[c - 1])) * 16.f;
  }
  return to_e4m3(left[0], left[1], left[2], left[3]);
}

// Which key of a tile a lane writes the weight of; with it of the 15 next.
__device__ __forceinline__ int row_sum_key(int lane) {
  return lane / kUsedRowSumColumns * kCoreRowKeys;
}

// By a warp, whose lanes have the columns of their keys' weights.
template <int kKeys>
__device__ __forceinline__ void write_row_sum_columns(uint8_t* weights, uint32_t columns,
                                                      int lane) {
  static_assert(kKeys <= 32 / kUsedRowSumColumns * kCoreRowKeys);
  if (row_sum_key(lane) >= kKeys) return;
  const int column = lane % kUsedRowSumColumns;
  const uint32_t bytes = __byte_perm(columns, 0, column * 0x1111);
  *reinterpret_cast<uint4*>(weights + row_sum_key(lane) * kRowSumColumns + column * kCoreRowKeys) =
      make_uint4(bytes, bytes, bytes, bytes);
}

// Starts out += p * v, with the sums as out's last columns. v: kN slots of kHeadDim columns, and
// their weights.
template <int kN, int kHeadDim>
__device__ __forceinline__ void gemm_rs_with_row_sum(float (&out)[(kHeadDim + kRowSumColumns) / 2],
                                                     const Probabilities<ElementType::kE4m3, kN>& p,
                                                     uint32_t v) {
  constexpr int kFirst = kHeadDim > 128 ? 128 : 0;  // columns; an instruction has 256 at most
  constexpr int kRest = kHeadDim + kRowSumColumns - kFirst;
  warpgroup_fence_operand(out);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kN / 32; ++step) {
    const uint32_t at = v + step * (2 * kCoreBytes / 16);
    if constexpr (kFirst > 0) {
      Wgmma<ElementType::kE4m3, kFirst>::rs(reinterpret_cast<float (&)[kFirst / 2]>(out), p[step],
                                            permuted_v_desc<kN>(at));
    }
    Wgmma<ElementType::kE4m3, kRest>::rs(reinterpret_cast<float (&)[kRest / 2]>(out[kFirst / 2]),
                                         p[step], permuted_v_desc<kN>(at + kFirst * kN / 16));
  }
  cute::warpgroup_commit_batch();
}

// What a probability of 1 is in a lane's share of a row's sum, columns 2 * (lane % 4) and the next,
// as log2. Found out where it is wanted, which is seldom: kept, it would take a register of the
// main loop.
__device__ __forceinline__ int log2_of_one() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return kLog2KeyWeight + 8 * static_cast<int>(lane % 4);
}

// Moves the sums from out's last accumulators. They become 0 by a product: ptxas takes no
// accumulator of which a part begins anew.
template <int kCount>
__device__ __forceinline__ void take_row_sums(float (&sum)[2], float (&out)[kCount]) {
  constexpr int kFirst = kCount - kRowSumColumns / 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* columns = out + kFirst + 2 * r;
    sum[r] = fmaf(columns[1], 1.f / 16.f, sum[r] + columns[0]);
    columns[0] *= 0.f;
    columns[1] *= 0.f;
  }
}

}  // namespace flashattn3
