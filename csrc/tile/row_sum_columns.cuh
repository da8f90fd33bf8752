// The PV GEMM also computes the row sums of e4m3 probabilities: V's tile is extended by
// kRowSumColumns columns that hold each key's weight, so the sums are the last columns of O. They
// move to a register of their own after every tile (accumulator promotion, DeepSeek-V3, arXiv
// 2412.19437): WGMMA truncates additions to a large sum (9 % lost over 4096 keys).
//
// A key's weight is the inverse of a factor of its probability, any float (block_scale.cuh).
// Column c holds the remainder that the columns before it leave, times 2^(4c), in e4m3, whose four
// significant bits leave a sixteenth. A weight of 1 is stored as 2^kLog2KeyWeight, so that the
// largest weight is below 448.
#pragma once

#include <cstdint>

#include "ptx/convert_fp8.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/permuted_v.h"

namespace flashattn3 {

static_assert(permuted_key(3, 1) == thread_column(3) + register_column(1) &&
              permuted_key(3, 2) == thread_column(3) + register_column(4));

constexpr int kLog2KeyWeight = 6;
// WGMMA truncates the sum of a tile by about 1.1 % for normally distributed scores, by nothing if
// one key has all of it.
constexpr float kRowSumCorrection = 1.006f;
constexpr int kUsedRowSumColumns = 4;  // the other columns are 0
// Range of log2 of the factor in which a weight represents its inverse to 12 bits.
constexpr float kLeastFactor = -2.f, kGreatestFactor = 14.f;

// All threads of the CTA call it before its first __syncthreads. weights: of a box of kKeys keys.
template <int kKeys>
__device__ __forceinline__ void zero_row_sum_columns(uint8_t* weights) {
  for (int i = threadIdx.x; i < kKeys * kRowSumColumns / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(weights)[i] = 0;
  }
  fence_async_proxy();
}

// Returns a key's weight as the bytes of the used columns.
__device__ __forceinline__ uint32_t row_sum_column_bytes(float weight) {
  float left[kUsedRowSumColumns] = {weight * (1 << kLog2KeyWeight)};
#pragma unroll
  for (int c = 1; c < kUsedRowSumColumns; ++c) {
    left[c] = (left[c - 1] - rounded_to_e4m3(left[c - 1])) * 16.f;
  }
  return to_e4m3(left[0], left[1], left[2], left[3]);
}

// First of the 16 keys of a tile whose weights a lane writes.
__device__ __forceinline__ int row_sum_key(int lane) {
  return lane / kUsedRowSumColumns * kCoreRowKeys;
}

// A warp calls it. columns: row_sum_column_bytes of the weight that the lane's 16 keys share.
// kBoxKeys: keys of a box, whose weights are kBoxBytes behind those of the one before.
template <int kKeys, int kBoxKeys, int kBoxBytes>
__device__ __forceinline__ void write_row_sum_columns(uint8_t* weights, uint32_t columns,
                                                      int lane) {
  static_assert(kKeys <= 32 / kUsedRowSumColumns * kCoreRowKeys);
  if (row_sum_key(lane) >= kKeys) return;
  const int column = lane % kUsedRowSumColumns;
  const uint32_t bytes = __byte_perm(columns, 0, column * 0x1111);
  if constexpr (kBoxKeys < kKeys) {
    weights += row_sum_key(lane) / kBoxKeys * (kBoxBytes - kBoxKeys * kRowSumColumns);
  }
  *reinterpret_cast<uint4*>(weights + row_sum_key(lane) * kRowSumColumns + column * kCoreRowKeys) =
      make_uint4(bytes, bytes, bytes, bytes);
}

// Matrix descriptor of a K-major, unswizzled permuted V tile of kN keys. Stride byte offset:
// between groups of 8 columns. atom_stride of smem_desc_low: between groups of 16 keys.
template <int kN>
__device__ __forceinline__ uint64_t permuted_v_desc(uint32_t low) {
  constexpr uint32_t kHigh = kN / kCoreRowKeys * kCoreBytes >> 4;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Starts out += p * v, with the row sums as out's last columns. v: permuted V tiles of kBoxKeys
// keys x kHeadDim columns, each followed by its row sum columns, of kN keys in all.
template <int kN, int kHeadDim, int kBoxKeys>
__device__ __forceinline__ void gemm_rs_with_row_sum(float (&out)[(kHeadDim + kRowSumColumns) / 2],
                                                     const Probabilities<ElementType::kE4m3, kN>& p,
                                                     uint32_t v) {
  constexpr int kFirst = kHeadDim > 128 ? 128 : 0;  // columns; WGMMA has at most 256
  constexpr int kRest = kHeadDim + kRowSumColumns - kFirst;
  warpgroup_fence_operand(out);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kN / 32; ++step) {
    uint32_t at = v + step * (2 * kCoreBytes / 16);
    if constexpr (kBoxKeys < kN) at += step / (kBoxKeys / 32) * (kBoxKeys * kHeadDim / 16);
    if constexpr (kFirst > 0) {
      Wgmma<ElementType::kE4m3, kFirst>::rs(reinterpret_cast<float (&)[kFirst / 2]>(out), p[step],
                                            permuted_v_desc<kBoxKeys>(at));
    }
    Wgmma<ElementType::kE4m3, kRest>::rs(reinterpret_cast<float (&)[kRest / 2]>(out[kFirst / 2]),
                                         p[step],
                                         permuted_v_desc<kBoxKeys>(at + kFirst * kBoxKeys / 16));
  }
  cute::warpgroup_commit_batch();
}

// log2 of a probability of 1 in a lane's part of the row sum, columns 2 * (lane % 4) and the next.
// It is rarely needed and computed on demand: stored, it would take a register of the main loop.
__device__ __forceinline__ int log2_of_one() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return kLog2KeyWeight + 4 * thread_column(lane);
}

// Moves the sums from out's last accumulators to `sum`. The accumulators are multiplied by 0:
// ptxas accepts no WGMMA accumulator that is partly reinitialised.
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
