// The two matrix products of attention on tiles in shared memory, and what has to stand around
// them.
//
// A tile of rows x columns lies in chunks of 64 columns: chunk c holds all rows, 128 bytes each, in
// the 128-byte swizzle that TMA writes; a chunk of R rows takes R * 128 bytes. Chunks, and the
// 64-row slabs of Q in them, start at multiples of 1024 bytes.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include "blocks/wgmma.cuh"

namespace flashattn3 {

// The low word of a matrix descriptor: address and the distance between 64-column chunks (used only
// where the columns are contiguous), both in 16 bytes. Steps through a tile are added to it.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, int chunk_bytes) {
  return ((address >> 4) & 0x3fff) | static_cast<uint32_t>(chunk_bytes >> 4) << 16;
}

// The high word never changes: 1024 bytes between groups of 8 rows, 128-byte swizzle.
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  constexpr uint32_t kHigh = (1024 >> 4) | 1u << 30;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// Tells the compiler that WGMMA, which it can't see through, writes these registers until here.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

// Starts s = q * k^T for the warpgroup's 64 rows. q: its slab of a kBlockM-row tile; k: kN rows.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim>
__device__ __forceinline__ void start_scores(float (&s)[kN / 2], uint32_t q, uint32_t k) {
  pin_registers(s);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    // 16 columns are 32 bytes; four steps to a chunk.
    const uint32_t q_step = step / 4 * (kBlockM * 128 / 16) + step % 4 * 2;
    const uint32_t k_step = step / 4 * (kN * 128 / 16) + step % 4 * 2;
    Wgmma<kElement, kN>::scores(s, descriptor(q + q_step), descriptor(k + k_step), step > 0);
  }
  cute::warpgroup_commit_batch();
}

// Starts o += p * v. p: the warpgroup's 64 x kN probabilities as operand fragments; v: kN rows.
template <ElementType kElement, int kN, int kHeadDim>
__device__ __forceinline__ void start_values(float (&o)[kHeadDim / 2],
                                             const uint32_t (&p)[kN / 16][4], uint32_t v) {
  pin_registers(o);
  cute::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    // 16 rows of 128 bytes.
    Wgmma<kElement, kHeadDim>::values(o, p[step], descriptor(v + step * 128));
  }
  cute::warpgroup_commit_batch();
}

// Waits until at most kPending of the groups started above are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_products() {
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

// Accumulators of the scores become the operand of the values without any exchange: thread and
// register of an accumulator pair are those that the operand wants for the same row and keys.
template <ElementType kElement, int kN>
__device__ __forceinline__ void pack_probabilities(uint32_t (&p)[kN / 16][4],
                                                   const float (&s)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) p[i / 4][i % 4] = pack<kElement>(s[2 * i], s[2 * i + 1]);
}

}  // namespace flashattn3
