// Emulation of csrc/ptx/mma_sync.cuh.
#pragma once

#include <cstdint>

#include "emulation.h"
#include "ptx/convert_16bit.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

// The words of all lanes, by word and lane; of two words in one exchange.
template <int kCount>
void gather_words(const uint32_t (&mine)[kCount], uint32_t (&words)[kCount][32]) {
  for (int i = 0; i < kCount; i += 2) {
    const bool two = i + 1 < kCount;
    const auto& both = emulation::of_warp(mine[i] | uint64_t{two ? mine[i + two] : 0} << 32);
    for (int lane = 0; lane < 32; ++lane) {
      words[i][lane] = static_cast<uint32_t>(both[lane]);
      if (two) words[i + 1][lane] = static_cast<uint32_t>(both[lane] >> 32);
    }
  }
}

// kDepth: 16, or 8, which has the first word of each operand row.
template <ElementType kElement, int kDepth>
void mma_of_depth(float (&d)[4], const uint32_t (&a)[kDepth / 4], const uint32_t (&b)[kDepth / 8]) {
  uint32_t of_a[kDepth / 4][32], of_b[kDepth / 8][32];
  gather_words(a, of_a), gather_words(b, of_b);
  const auto element = [](uint32_t word, int half) {
    return element_of<kElement>(static_cast<uint16_t>(word >> 16 * half));
  };
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4;
  for (int i = 0; i < 4; ++i) {
    const int column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < kDepth; ++k) {
      d[i] += element(of_a[row_of(i) + k / 8 * 2][row * 4 + k % 8 / 2], k % 2) *
              element(of_b[k / 8][column * 4 + k % 8 / 2], k % 2);
    }
    if (std::isnan(d[i])) d[i] = emulation::kCanonicalNan;
  }
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
