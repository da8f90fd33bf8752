// Emulation of csrc/ptx/mma_sync.cuh.
#pragma once

#include <cstdint>

#include "emulation.h"
#include "ptx/convert_16bit.cuh"
#include "tile/fragment.h"

namespace flashattn3 {

template <ElementType kElement>
void mma_fragment(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  uint32_t words[6][32];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) words[i][lane] = emulation::shuffle(a[i], lane);
    for (int i = 0; i < 2; ++i) words[4 + i][lane] = emulation::shuffle(b[i], lane);
  }
  const auto element = [&](int word, int lane, int half) {
    return element_of<kElement>(static_cast<uint16_t>(words[word][lane] >> 16 * half));
  };
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4;
  for (int i = 0; i < 4; ++i) {
    const int column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      d[i] += element(row_of(i) + k / 8 * 2, row * 4 + k % 8 / 2, k % 2) *
              element(4 + k / 8, column * 4 + k % 8 / 2, k % 2);
    }
    if (std::isnan(d[i])) d[i] = emulation::kCanonicalNan;
  }
}

}  // namespace flashattn3
