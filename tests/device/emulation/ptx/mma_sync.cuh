// Emulation of csrc/ptx/mma_sync.cuh.
#pragma once

#include <cstdint>

#include "emulation.h"
#include "ptx/convert_16bit.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// kDepth: 16, or 8, which has the first word of each operand row.
template <ElementType kElement, int kDepth>
void mma_of_depth(float (&d)[4], const uint32_t (&a)[kDepth / 4], const uint32_t (&b)[kDepth / 8]) {
  struct Operands {
    float* d;
    const uint32_t *a, *b;
  } mine{d, a, b};
  emulation::meet_warp(mine, [](auto of_lane) {
    const auto element = [](uint32_t word, int half) {
      return element_of<kElement>(static_cast<uint16_t>(word >> 16 * half));
    };
    float of_a[16][kDepth], of_b[kDepth][8];
    for (int k = 0; k < kDepth; ++k) {
      for (int row = 0; row < 16; ++row) {
        const Operands& owner = of_lane(row % 8 * 4 + k % 8 / 2);
        of_a[row][k] = element(owner.a[row / 8 + k / 8 * 2], k % 2);
      }
      for (int column = 0; column < 8; ++column) {
        of_b[k][column] = element(of_lane(column * 4 + k % 8 / 2).b[k / 8], k % 2);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float& sum = of_lane(lane).d[i];
        const int row = thread_row(lane) + register_row(i);
        const int column = thread_column(lane) + register_column(i);
        for (int k = 0; k < kDepth; ++k) sum += of_a[row][k] * of_b[k][column];
        if (std::isnan(sum)) sum = emulation::kCanonicalNan;
      }
    }
  });
}

template <ElementType kElement>
void mma_fragment(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma_of_depth<kElement, 16>(d, a, b);
}

template <ElementType kElement>
void mma_half_fragment(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  mma_of_depth<kElement, 8>(d, a, {b});
}

}  // namespace flashattn3
