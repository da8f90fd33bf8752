// GEMMs with operands in shared memory of which one or both are MN-major; gemm.cuh has their
// layout.
#pragma once

#include <cstdint>

#include "ptx/smem_operand.cuh"
#include "tile/gemm.cuh"

namespace flashattn3 {

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

template <ElementType kElement, int kDepth, int kColumns, class Operand>
__device__ __forceinline__ void add_gemm_ss_mn_ab(float (&o)[kColumns / 2], Operand s, Operand k,
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

// The same with high words that ptxas does not know (SmemOperand), two for each half of the depth:
// none serves more than eight WGMMAs.
template <ElementType kElement, int kDepth, int kColumns>
__device__ __forceinline__ void gemm_ss_mn_ab_in_halves(float (&o)[kColumns / 2], uint32_t s,
                                                        uint32_t k) {
  constexpr int kHalf = kDepth / 2, kOffset = kHalf / 16 * 128;
  warpgroup_fence_operand(o);
  cute::warpgroup_arrive();
  const uint32_t ones = opaque_ones();
  add_gemm_ss_mn_ab<kElement, kHalf, kColumns>(o, SmemOperand{s, opaque_desc_high<0>(ones)},
                                               SmemOperand{k, opaque_desc_high<1>(ones)}, false);
  add_gemm_ss_mn_ab<kElement, kHalf, kColumns>(
      o, SmemOperand{s + kOffset, opaque_desc_high<2>(ones)},
      SmemOperand{k + kOffset, opaque_desc_high<3>(ones)}, true);
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

}  // namespace flashattn3
