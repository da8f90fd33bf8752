// Emulation of csrc/ptx/wgmma.cuh for 16-bit elements. An instruction reads its operands in shared
// memory, through the swizzle of the hardware, when the thread waits for its group.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulation.h"
#include "ptx/convert_16bit.cuh"
#include "ptx/element.h"
#include "tile/fragment.h"

namespace flashattn3 {

// An operand tile of the 128-byte swizzle, which XORs address bits 4 to 6 with bits 7 to 9.
template <ElementType kElement>
struct WgmmaOperand {
  uint64_t descriptor;

  float at(uint32_t offset) const {
    const uint32_t address = static_cast<uint32_t>(descriptor & 0x3fff) * 16 + offset;
    uint16_t bits;
    std::memcpy(&bits, emulation::shared_memory + (address ^ (address >> 7 & 7) << 4), 2);
    return element_of<kElement>(bits);
  }
  uint32_t atom_stride() const { return static_cast<uint32_t>(descriptor >> 16 & 0x3fff) * 16; }
  uint32_t group_stride() const { return static_cast<uint32_t>(descriptor >> 32 & 0x3fff) * 16; }
  // 16 of these along the depth: row (of A, or column of B) of a K-major operand.
  float k_major(int row, int depth) const {
    return at(row / 8 * group_stride() + row % 8 * 128 + depth * 2);
  }
  float mn_major(int row, int depth) const {
    return at(row / 64 * atom_stride() + row % 64 * 2 + depth / 8 * group_stride() +
              depth % 8 * 128);
  }
};

template <ElementType kElement, int kN>
struct Wgmma {
  using Operand = WgmmaOperand<kElement>;

  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    start(
        d, accumulate, [=](int row, int k) { return Operand{a}.k_major(row, k); },
        [=](int column, int k) { return Operand{b}.k_major(column, k); });
  }
  static void ss_mn_b(float (&d)[kN / 2], uint64_t a, uint64_t b) {
    start(
        d, true, [=](int row, int k) { return Operand{a}.k_major(row, k); },
        [=](int column, int k) { return Operand{b}.mn_major(column, k); });
  }
  static void ss_mn_ab(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    start(
        d, accumulate, [=](int row, int k) { return Operand{a}.mn_major(row, k); },
        [=](int column, int k) { return Operand{b}.mn_major(column, k); });
  }
  // Word i of a: row i % 2 of the thread's two, columns 2 * lane + {0, 1} of the first or second
  // 8 columns.
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
    const auto low = emulation::of_quad(a[0] | uint64_t{a[1]} << 32);
    const auto high = emulation::of_quad(a[2] | uint64_t{a[3]} << 32);
    start(
        d, true,
        [=](int row, int k) {
          const uint64_t words = (k < 8 ? low : high)[k % 8 / 2];
          const int shift = 32 * (row % 16 / kRowStride) + 16 * (k % 2);
          return element_of<kElement>(static_cast<uint16_t>(words >> shift));
        },
        [=](int column, int k) { return Operand{b}.mn_major(column, k); });
  }

 private:
  template <class A, class B>
  static void start(float (&d)[kN / 2], bool accumulate, A a, B b) {
    if (!accumulate) {
      for (float& x : d) x = emulation::kCanonicalNan;
    }
    emulation::self().wgmmas.push_back([&d, accumulate, a, b] {
      const int thread = static_cast<int>(threadIdx.x % 128), row = thread_row(thread);
      float rows[2][16], column[16];
      for (int k = 0; k < 16; ++k) rows[0][k] = a(row, k), rows[1][k] = a(row + kRowStride, k);
      for (int i = 0; i < kN / 2; ++i) {
        if (row_of(i) == 1) continue;
        for (int k = 0; k < 16; ++k) column[k] = b(thread_column(thread) + register_column(i), k);
        for (int r = 0; r < 2; ++r) {
          float& sum = d[i + 2 * r];
          if (!accumulate) sum = 0.f;
          for (int k = 0; k < 16; ++k) sum += rows[r][k] * column[k];
          if (std::isnan(sum)) sum = emulation::kCanonicalNan;
        }
      }
    });
  }
};

}  // namespace flashattn3
