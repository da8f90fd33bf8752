// The two matrix products of attention on tiles in shared memory, and what has to stand around
// them.
//
// A tile of rows x columns lies in chunks of 128 bytes of columns: chunk c holds all rows, 128
// bytes each, in the 128-byte swizzle that TMA writes; a chunk of R rows takes R * 128 bytes.
// Chunks, and the 64-row slabs of Q in them, start at multiples of 1024 bytes.
//
// V in 8 bits, which WGMMA takes with the keys contiguous alone, lies in slots (permuted_v.h,
// row_sum_columns.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include "ptx/wgmma.cuh"
#include "tile/permuted_v.h"

namespace flashattn3 {

// The low word of a matrix descriptor: address and the distance between 64-column chunks (used only
// where the columns are contiguous), both in 16 bytes. Steps through a tile are added to it. In a
// cluster the CTA's rank stands in the address above 2^24.
__device__ __forceinline__ uint32_t smem_desc_low(uint32_t address, int atom_stride) {
  return ((address >> 4) & 0x3fff) + (static_cast<uint32_t>(atom_stride >> 4) << 16);
}

// The high word never changes: 1024 bytes between groups of 8 rows, 128-byte swizzle.
__device__ __forceinline__ uint64_t smem_desc(uint32_t low) {
  constexpr uint32_t kHigh = (1024 >> 4) | 1u << 30;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Of V in slots, a tile of kN: so far are groups of 8 columns from each other, no swizzle;
// smem_desc_low's distance is that between 16 slots and the next 16.
template <int kN>
__device__ __forceinline__ uint64_t permuted_v_desc(uint32_t low) {
  constexpr uint32_t kHigh = kN / kCoreRowKeys * kCoreBytes >> 4;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Tells the compiler that WGMMA, which it can't see through, writes these registers until here.
template <class Register, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

// How far 32 bytes of columns are in a tile of so many rows; four steps to a chunk.
__device__ __forceinline__ constexpr uint32_t score_step(int step, int rows) {
  return step / 4 * (rows * 128 / 16) + step % 4 * 2;
}

// Starts s = q * k^T, with kAdd added to what s holds, for the warpgroup's 64 rows. q: its slab of
// a kBlockM-work tile; k: kN rows of a kBlockN-work tile.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim, bool kAdd = false,
          int kBlockN = kN>
__device__ __forceinline__ void gemm_ss(float (&s)[kN / 2], uint32_t q, uint32_t k) {
  warpgroup_fence_operand(s);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kHeadDim * element_bytes(kElement) / 32; ++step) {
    Wgmma<kElement, kN>::ss(s, smem_desc(q + score_step(step, kBlockM)),
                            smem_desc(k + score_step(step, kBlockN)), kAdd || step > 0);
  }
  cute::warpgroup_commit_batch();
}

// A warpgroup's 64 x kN probabilities as operand fragments, each of 32 bytes of keys.
template <ElementType kElement, int kN>
using Probabilities = uint32_t[kN * element_bytes(kElement) / 32][4];

// Starts o += p * v, in 16 bits. v: kN rows.
template <ElementType kElement, int kN, int kHeadDim>
__device__ __forceinline__ void gemm_rs(float (&o)[kHeadDim / 2],
                                        const Probabilities<kElement, kN>& p, uint32_t v) {
  warpgroup_fence_operand(o);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {  // 16 rows of 128 bytes
    Wgmma<kElement, kHeadDim>::rs(o, p[step], smem_desc(v + step * 128));
  }
  cute::warpgroup_commit_batch();
}

// Starts o += p * v. p: 64 rows of 64 columns; v: 64 rows of kColumns columns.
template <ElementType kElement, int kColumns>
__device__ __forceinline__ void gemm_ss_mn_b(float (&o)[kColumns / 2], uint32_t p, uint32_t v) {
  warpgroup_fence_operand(o);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < 4; ++step) {  // 32 bytes of columns; 16 rows of 128 bytes
    Wgmma<kElement, kColumns>::ss_mn_b(o, smem_desc(p + step * 2), smem_desc(v + step * 128));
  }
  cute::warpgroup_commit_batch();
}

template <ElementType kElement, int kDepth, int kColumns>
__device__ __forceinline__ void add_gemm_ss_mn_ab(float (&o)[kColumns / 2], uint32_t s, uint32_t k,
                                                  bool add) {
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {  // 16 rows of 128 bytes
    Wgmma<kElement, kColumns>::ss_mn_ab(o, smem_desc(s + step * 128), smem_desc(k + step * 128),
                                        add || step > 0);
  }
}

// Starts o = s^T * k. s: kDepth rows of 64 columns, o's rows; k: kDepth rows of kColumns columns.
template <ElementType kElement, int kDepth, int kColumns>
__device__ __forceinline__ void gemm_ss_mn_ab(float (&o)[kColumns / 2], uint32_t s, uint32_t k) {
  warpgroup_fence_operand(o);
  cute::warpgroup_arrive();
  add_gemm_ss_mn_ab<kElement, kDepth, kColumns>(o, s, k, false);
  cute::warpgroup_commit_batch();
}

// Starts o = s^T * k + other_s^T * other_k.
template <ElementType kElement, int kDepth, int kColumns>
__device__ __forceinline__ void gemm_ss_mn_ab(float (&o)[kColumns / 2], uint32_t s, uint32_t k,
                                              uint32_t other_s, uint32_t other_k) {
  warpgroup_fence_operand(o);
  cute::warpgroup_arrive();
  add_gemm_ss_mn_ab<kElement, kDepth, kColumns>(o, s, k, false);
  add_gemm_ss_mn_ab<kElement, kDepth, kColumns>(o, other_s, other_k, true);
  cute::warpgroup_commit_batch();
}

// Waits until at most kPending of the groups started above are unfinished.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  cute::warpgroup_wait<kPending>();
}

template <ElementType kElement>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (kElement == ElementType::kBFloat16) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <ElementType kElement>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kElement == ElementType::kBFloat16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// Accumulators of the scores become the operand of the values without any exchange: thread and
// register of an accumulator pair are those that the operand wants for the same row and keys. (In 8
// bits they are so for V's slots: softmax_e4m3.cuh.)
template <ElementType kElement, int kN>
__device__ __forceinline__ void pack_probabilities(Probabilities<kElement, kN>& p,
                                                   const float (&s)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) p[i / 4][i % 4] = pack<kElement>(s[2 * i], s[2 * i + 1]);
}

}  // namespace flashattn3
