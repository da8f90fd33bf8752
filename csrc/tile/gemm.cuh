// The two GEMMs of attention on tiles in shared memory, with their fences and waits.
//
// A tile of rows x columns is stored as atoms of 128 bytes of columns: atom c holds all R rows,
// 128 bytes each, in the 128-byte swizzle that TMA writes, R * 128 bytes in total. Atoms, and the
// 64-row slabs of Q in them, start at multiples of 1024 bytes.
//
// 8-bit V is stored permuted (permuted_v.h, row_sum_columns.cuh), because WGMMA takes 8-bit B
// operands K-major only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include "ptx/wgmma.cuh"
#include "tile/permuted_v.h"

namespace flashattn3 {

// Low word of an smem matrix descriptor: address and stride between 64-column atoms (used by
// MN-major operands only), both in units of 16 bytes. Steps through a tile are added to it. In a
// cluster the address holds the CTA's rank above 2^24.
__device__ __forceinline__ uint32_t smem_desc_low(uint32_t address, int atom_stride) {
  return ((address >> 4) & 0x3fff) + (static_cast<uint32_t>(atom_stride >> 4) << 16);
}

// The high word is constant: 1024 bytes between groups of 8 rows, 128-byte swizzle.
__device__ __forceinline__ uint64_t smem_desc(uint32_t low) {
  constexpr uint32_t kHigh = (1024 >> 4) | 1u << 30;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Matrix descriptor of a K-major, unswizzled permuted V tile of kN keys. Stride byte offset:
// between groups of 8 columns. atom_stride of smem_desc_low: between groups of 16 keys.
template <int kN>
__device__ __forceinline__ uint64_t permuted_v_desc(uint32_t low) {
  constexpr uint32_t kHigh = kN / kCoreRowKeys * kCoreBytes >> 4;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Tells the compiler that asynchronous WGMMA may write these registers up to this point.
template <class Register, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

// Offset of step `step` (32 bytes of columns, four steps per atom) in a tile of `rows` rows, in
// units of 16 bytes.
__device__ __forceinline__ constexpr uint32_t score_step(int step, int rows) {
  return step / 4 * (rows * 128 / 16) + step % 4 * 2;
}

// Starts s = q * k^T (s += with kAdd) for the warpgroup's 64 rows. q: the warpgroup's slab of a
// tile of kBlockM rows; k: kN rows of a tile of kBlockN rows.
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

// Starts o += p * v, with 16-bit p and v. v: kN rows.
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

// Starts o = s^T * k. s: kDepth rows x 64 columns (o's rows); k: kDepth rows x kColumns columns.
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

// Waits until at most kPending WGMMA groups committed above are in flight.
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

// Packs the accumulators of S as the A operand of PV without shuffles: an accumulator pair is in
// the thread and register that the operand needs for the same row and keys. (For 8 bits this holds
// with permuted V: softmax_e4m3.cuh.)
template <ElementType kElement, int kN>
__device__ __forceinline__ void pack_probabilities(Probabilities<kElement, kN>& p,
                                                   const float (&s)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) p[i / 4][i % 4] = pack<kElement>(s[2 * i], s[2 * i + 1]);
}

}  // namespace flashattn3
