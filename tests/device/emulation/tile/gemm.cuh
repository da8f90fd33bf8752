// Emulation of csrc/tile/gemm.cuh for 16-bit elements. A GEMM reads its operands in shared memory
// through the swizzle of the hardware: address bits 4 to 6 are XORed with bits 7 to 9.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cute/arch/util.hpp"
#include "emulation.h"
#include "ptx/convert_16bit.cuh"
#include "ptx/element.h"
#include "tile/fragment.h"

namespace flashattn3 {

inline uint32_t smem_desc_low(uint32_t address, int atom_stride) {
  return ((address >> 4) & 0x3fff) + (static_cast<uint32_t>(atom_stride >> 4) << 16);
}

template <class Register, int kCount>
void warpgroup_fence_operand(Register (&)[kCount]) {}

// Column of a row of a tile whose matrix descriptor has this low word. Atoms of 64 columns are
// atom_stride bytes from each other.
template <ElementType kElement>
float tile_element(uint32_t low, int atom_stride, int row, int column) {
  const uint32_t address =
      ((low & 0x3fff) << 4) + column / 64 * atom_stride + row * 128 + column % 64 * 2;
  uint16_t bits;
  std::memcpy(&bits, emulation::shared_memory + (address ^ (address >> 7 & 7) << 4), 2);
  return element_of<kElement>(bits);
}

template <ElementType kElement, int kN>
using Probabilities = uint32_t[kN * element_bytes(kElement) / 32][4];

// A GPU's NaN has one value, whatever NaN it comes from.
inline float with_canonical_nan(float x) {
  return std::isnan(x) ? __uint_as_float(0x7fffffffu) : x;
}

// A thread's scores; row: of its register 0.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim>
void multiply_rows(float (&s)[kN / 2], uint32_t q, uint32_t k, int row) {
  float rows[2][kHeadDim], keys[kHeadDim];
  for (int r = 0; r < 2; ++r) {
    for (int d = 0; d < kHeadDim; ++d) {
      rows[r][d] = tile_element<kElement>(q, kBlockM * 128, row + kRowStride * r, d);
    }
  }
  for (int column = 0; column < kN; column = column % 2 ? column + 7 : column + 1) {
    for (int d = 0; d < kHeadDim; ++d) {
      keys[d] = tile_element<kElement>(k, kN * 128, thread_column(threadIdx.x % 4) + column, d);
    }
    for (int r = 0; r < 2; ++r) {
      float sum = 0.f;
      for (int d = 0; d < kHeadDim; ++d) sum += rows[r][d] * keys[d];
      s[register_at(r, column)] = with_canonical_nan(sum);
    }
  }
}

template <ElementType kElement, int kBlockM, int kN, int kHeadDim>
void gemm_ss(float (&s)[kN / 2], uint32_t q, uint32_t k) {
  for (float& x : s) x = std::numeric_limits<float>::quiet_NaN();
  emulation::self().gemms.push_back([&s, q, k] {
    const int thread = threadIdx.x % 128;
    multiply_rows<kElement, kBlockM, kN, kHeadDim>(s, q, k, thread_row(thread));
  });
}

// first_row: the warp's first one in the tile of kBlockM rows.
template <ElementType kElement, int kBlockM, int kN, int kHeadDim>
void recompute_scores(float (&s)[kN / 2], uint32_t q, uint32_t k, int first_row) {
  emulation::meet_warp();
  multiply_rows<kElement, kBlockM, kN, kHeadDim>(s, q >> 4, k >> 4,
                                                 first_row + thread_row(threadIdx.x % 32));
}

// p: the A fragments of a warpgroup; a thread's row needs those of its quad.
template <ElementType kElement, int kN, int kHeadDim>
void gemm_rs(float (&o)[kHeadDim / 2], const Probabilities<kElement, kN>& p, uint32_t v) {
  // A[row][16 * step + column] is in register step, word: columns 2 * lane + {0, 1} of the first
  // or second 8 columns, row or row + 8.
  std::vector<float> rows(2 * kN);  // this thread's two rows, all columns
  const int lane = threadIdx.x % 4;
  for (int source = 0; source < 4; ++source) {
    for (int step = 0; step < kN / 16; ++step) {
      for (int word = 0; word < 4; ++word) {
        const int from = static_cast<int>(threadIdx.x % 32) - lane + source;
        const uint32_t pair = __shfl_sync(~0u, p[step][word], from);
        for (int half = 0; half < 2; ++half) {
          rows[word % 2 * kN + 16 * step + 8 * (word / 2) + 2 * source + half] =
              element_of<kElement>(static_cast<uint16_t>(pair >> 16 * half));
        }
      }
    }
  }
  emulation::self().gemms.push_back([&o, rows = std::move(rows), v] {
    const int atom_stride = static_cast<int>(v >> 16 << 4);
    for (int i = 0; i < kHeadDim / 2; ++i) {
      if (row_of(i) == 1) continue;
      const int column = thread_column(static_cast<int>(threadIdx.x % 128)) + register_column(i);
      float &upper = o[i], &lower = o[i + 2];
      for (int key = 0; key < kN; ++key) {
        const float value = tile_element<kElement>(v, atom_stride, key, column);
        upper += rows[key] * value;
        lower += rows[kN + key] * value;
      }
      upper = with_canonical_nan(upper), lower = with_canonical_nan(lower);
    }
  });
}

template <int kPending>
void warpgroup_wait() {
  auto& gemms = emulation::self().gemms;
  while (gemms.size() > kPending) {
    gemms.front()();
    gemms.erase(gemms.begin());
  }
  emulation::meet_warp();
}

template <ElementType kElement, int kN>
void pack_probabilities(Probabilities<kElement, kN>& p, const float (&s)[kN / 2]) {
  for (int i = 0; i < kN / 4; ++i) p[i / 4][i % 4] = pack<kElement>(s[2 * i], s[2 * i + 1]);
}

}  // namespace flashattn3
