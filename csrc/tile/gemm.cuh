// The two GEMMs of attention on tiles in shared memory, with their fences and waits.
//
// ptx/smem_desc.cuh has the layout of a tile. Tiles, and the 64-row slabs of Q in them, start at
// multiples of 1024 bytes.
// gemm_int8.cuh, row_sum_columns.cuh and gemm_mn.cuh have the others.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include "ptx/convert_16bit.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/smem_desc.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// Tells the compiler that asynchronous WGMMA may write these registers up to this point.
template <class Register, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

// Starts s = q * k^T (s += with kAdd) for the warpgroup's 64 rows. q: the warpgroup's slab of a
// tile of kBlockM rows; k: kN rows of a tile of kBlockN rows, or of one with these strides. Each a
// low word or a SmemOperand.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim, bool kAdd = false,
          int kBlockN = kN, class Operand = uint32_t, class Strides = AtomMajor<kBlockN>>
__device__ __forceinline__ void gemm_ss(float (&s)[kN / 2], Operand q, Operand k,
                                        const Strides& strides = {}) {
  warpgroup_fence_operand(s);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kHeadDim * element_bytes(kElement) / 32; ++step) {
    Wgmma<kElement, kN>::ss(s, smem_desc(q + score_step(step, AtomMajor<kBlockM>::atom)),
                            smem_desc(k + score_step(step, strides.atom), strides.group),
                            kAdd || step > 0);
  }
  cute::warpgroup_commit_batch();
}

// A warpgroup's 64 x kN probabilities as operand fragments, each of 32 bytes of keys.
template <ElementType kElement, int kN>
using Probabilities = uint32_t[kN * element_bytes(kElement) / 32][4];

// Starts o += p * v, with 16-bit p and v. v: kN rows, of a tile with these strides.
template <ElementType kElement, int kN, int kHeadDim, class Operand = uint32_t,
          class Strides = AtomMajor<kN>>
__device__ __forceinline__ void gemm_rs(float (&o)[kHeadDim / 2],
                                        const Probabilities<kElement, kN>& p, Operand v,
                                        const Strides& strides = {}) {
  warpgroup_fence_operand(o);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {  // two groups of 8 rows
    Wgmma<kElement, kHeadDim>::rs(o, p[step],
                                  smem_desc(v + step * 2 * strides.group, strides.group));
  }
  cute::warpgroup_commit_batch();
}

// Waits until at most so many WGMMA groups committed above are in flight.
using cute::warpgroup_wait;

// Packs the accumulators of S as the A operand of PV without shuffles: an accumulator pair is in
// the thread and register that the operand needs for the same row and keys. (For 8 bits this holds
// with permuted V: softmax_e4m3.cuh.)
template <ElementType kElement, int kN>
__device__ __forceinline__ void pack_probabilities(Probabilities<kElement, kN>& p,
                                                   const float (&s)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) p[i / 4][i % 4] = pack<kElement>(s[2 * i], s[2 * i + 1]);
}

// Computes S of one warp's 16 rows once more, from tiles that are still in shared memory: for the
// rare case that overflowing exponentials have overwritten it; no other warp takes part. q: address
// of a tile of kBlockM rows, first_row the warp's first in it; k: of kN rows, with these strides.
// s: as gemm_ss leaves it; mma.sync has the same fragments, 8 columns at a time. The swizzle
// exchanges vectors of 16 bytes by the row modulo 8, here that of register 0.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim, class Strides = AtomMajor<kN>>
__device__ __forceinline__ void recompute_scores(float (&s)[kN / 2], uint32_t q, uint32_t k,
                                                 int first_row, const Strides& strides = {}) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) s[i] = 0.f;
  const int row = thread_row(lane);
  q += (first_row + row) * 128 + thread_column(lane) * element_bytes(kElement);
  k += row * 128 + thread_column(lane) * element_bytes(kElement);
#pragma unroll 1
  for (int step = 0; step < kHeadDim * element_bytes(kElement) / 32; ++step) {
    const uint32_t vecs[2] = {static_cast<uint32_t>((step % 4 * 2) ^ row) * 16,
                              static_cast<uint32_t>((step % 4 * 2 + 1) ^ row) * 16};
    const uint32_t q_atom = q + step / 4 * kBlockM * 128;
    const uint32_t k_atom = k + step / 4 * strides.atom * 16;
    const uint32_t a[4] = {
        load_shared(q_atom + vecs[0]), load_shared(q_atom + vecs[0] + kRowStride * 128),
        load_shared(q_atom + vecs[1]), load_shared(q_atom + vecs[1] + kRowStride * 128)};
#pragma unroll
    for (int group = 0; group < kN / 8; ++group) {
      const uint32_t k_group = k_atom + group * strides.group * 16;
      const uint32_t b[2] = {load_shared(k_group + vecs[0]), load_shared(k_group + vecs[1])};
      mma_fragment<kElement>(reinterpret_cast<float (&)[4]>(s[4 * group]), a, b);
    }
  }
}

}  // namespace flashattn3
