// The scores of one warp's 16 rows once more, from tiles that are still in shared memory. For the
// rare case that they were overwritten by exponentials that overflowed; no other warp takes part.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "ptx/element.h"

namespace flashattn3 {

template <ElementType kElement>
__device__ __forceinline__ void mma_fragment(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  if constexpr (kElement == ElementType::kBFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// q: address of a tile of kBlockM rows, first_row the warp's first in it; k: of kN rows; both in
// the layout of gemm.cuh. s: the fragment that wgmma leaves (mma.sync shares its layout, 8
// columns at a time). Rows and keys of a lane are lane / 4 modulo 8, which is what the swizzle
// exchanges 16-byte units by.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim>
__device__ __forceinline__ void recompute_scores(float (&s)[kN / 2], uint32_t q, uint32_t k,
                                                 int first_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) s[i] = 0.f;
  q += (first_row + lane / 4) * 128 + lane % 4 * 4;
  k += lane / 4 * 128 + lane % 4 * 4;
#pragma unroll 1
  for (int step = 0; step < kHeadDim * element_bytes(kElement) / 32; ++step) {
    const uint32_t vecs[2] = {static_cast<uint32_t>((step % 4 * 2) ^ (lane / 4)) * 16,
                              static_cast<uint32_t>((step % 4 * 2 + 1) ^ (lane / 4)) * 16};
    const uint32_t q_atom = q + step / 4 * kBlockM * 128, k_atom = k + step / 4 * kN * 128;
    const uint32_t a[4] = {load_shared(q_atom + vecs[0]), load_shared(q_atom + vecs[0] + 1024),
                           load_shared(q_atom + vecs[1]), load_shared(q_atom + vecs[1] + 1024)};
#pragma unroll
    for (int group = 0; group < kN / 8; ++group) {
      const uint32_t b[2] = {load_shared(k_atom + group * 1024 + vecs[0]),
                             load_shared(k_atom + group * 1024 + vecs[1])};
      float d[4] = {s[4 * group], s[4 * group + 1], s[4 * group + 2], s[4 * group + 3]};
      mma_fragment<kElement>(d, a, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * group + i] = d[i];
    }
  }
}

}  // namespace flashattn3
