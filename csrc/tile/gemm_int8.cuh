// The QK^T GEMM of int8 tiles in shared memory, as gemm_ss in gemm.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/element.h"
#include "ptx/load_shared.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"

namespace flashattn3 {

// The type of a score's register. WGMMA accumulates floats as floats and int8 as integers. Integer
// scores start from kInt8Bias, so that none is negative. The bits of a score n are then those of
// the denormal float n * 2^-149, and one FMA turns it into a code (softmax_e4m3.cuh) that is a
// denormal too and whose bits are the code: no instruction converts. For the compiler these
// registers stay integers throughout: with floats of the same bits beside them ptxas (13.0) spills
// hundreds of bytes.
template <ElementType kElement>
using ScoreAccumulator = std::conditional_t<kElement == ElementType::kInt8, uint32_t, float>;

// The integer n has the bits of the denormal n * kDenormalUnit. from_denormal converts that back
// to n, in two products since 2^149 is not a float.
constexpr float kDenormalUnit = 0x1p-149f;
__device__ __forceinline__ float from_denormal(float integer) {
  return integer * 0x1p100f * 0x1p49f;
}

// Accumulator bias of int8 scores: 32 * 255^2 for each 128 columns, each of whose products is at
// least -128 * 127.
template <int kHeadDim>
constexpr int kInt8Bias = (kHeadDim + 127) / 128 * 32 * 255 * 255;

// A GEMM writes the bias: the product of a tile of 255s with itself. Eight rows of 16 bytes stand
// for the whole tile. Writing as many registers by moves would take a third of all instructions of
// a step. (H100, full, 16384 tokens, TFLOP/s: d64 794 to 860, d128 1124 to 1206.)
constexpr int kBiasTileBytes = 128;

// All threads of the CTA call it before its first __syncthreads.
__device__ __forceinline__ void write_bias_tile(uint8_t* bias_tile) {
  for (int i = threadIdx.x; i < kBiasTileBytes; i += blockDim.x) bias_tile[i] = 255;
  fence_async_proxy();
}

// Starts s = kInt8Bias + q * k^T, with q and k as in gemm_ss. bias_tile: address of the tile that
// write_bias_tile wrote.
template <int kBlockM, int kN, int kHeadDim>
__device__ __forceinline__ void gemm_ss_int8(uint32_t (&s)[kN / 2], uint32_t q, uint32_t k,
                                             uint32_t bias_tile) {
  using Product = Wgmma<ElementType::kInt8, kN>;
  const uint64_t bias_desc = bias_tile >> 4;  // strides 0, no swizzle
  warpgroup_fence_operand(s);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < kInt8Bias<kHeadDim> / kInt8Bias<128>; ++i) {
    Product::ss_unsigned(s, bias_desc, bias_desc, i > 0);
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 32; ++step) {
    Product::ss(s, smem_desc(q + score_step(step, AtomMajor<kBlockM>::atom)),
                smem_desc(k + score_step(step, AtomMajor<kN>::atom)), true);
  }
  cute::warpgroup_commit_batch();
}

// Returns the tile column of a score of row r that equals `value`; -1 if this thread holds none.
template <class S, int kCount>
__device__ __forceinline__ int column_of(const S (&s)[kCount], int r, float value) {
  int column = -1;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (row_of(i) == r && get(s[i]) == value) column = register_column(i);
  }
  return column < 0 ? -1 : column + static_cast<int>(thread_column(threadIdx.x));
}

// Recomputes the score of one query row and one key from the tiles in shared memory and returns it
// in the four lanes of a quad, each of which multiplies 16-byte vectors of its own. q, k:
// addresses of tiles of kBlockM and kN rows (gemm.cuh). All lanes of the warp call it.
template <int kBlockM, int kN, int kHeadDim>
__device__ __forceinline__ int int8_score(uint32_t q, uint32_t k, int row, int key) {
  int sum = 0;
  q += row * 128;
  k += key * 128;
#pragma unroll
  for (int i = 0; i < kHeadDim / 64; ++i) {
    const int atom = i / 2, vec = i % 2 * 4 + threadIdx.x % 4;
    const uint4 a = load_shared_unit(q + atom * kBlockM * 128 + (vec ^ (row % 8)) * 16);
    const uint4 b = load_shared_unit(k + atom * kN * 128 + (vec ^ (key % 8)) * 16);
    sum = __dp4a(static_cast<int>(a.x), static_cast<int>(b.x), sum);
    sum = __dp4a(static_cast<int>(a.y), static_cast<int>(b.y), sum);
    sum = __dp4a(static_cast<int>(a.z), static_cast<int>(b.z), sum);
    sum = __dp4a(static_cast<int>(a.w), static_cast<int>(b.w), sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

}  // namespace flashattn3
