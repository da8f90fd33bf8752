// Emulation of csrc/ptx/wgmma.cuh for 16-bit elements. An instruction reads its operands in shared
// memory, through the swizzle of the hardware, when its warp waits for its group.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    start<Major::kK, Major::kK>(d, accumulate, a, b);
  }
  static void ss_mn_b(float (&d)[kN / 2], uint64_t a, uint64_t b) {
    start<Major::kK, Major::kMn>(d, true, a, b);
  }
  static void ss_mn_ab(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    start<Major::kMn, Major::kMn>(d, accumulate, a, b);
  }
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
    start<Major::kRegisters, Major::kMn>(d, true, 0, b, std::to_array(a));
  }

 private:
  enum class Major { kK, kMn, kRegisters };

  template <Major kA, Major kB>
  static void start(float (&d)[kN / 2], bool accumulate, uint64_t a, uint64_t b,
                    std::array<uint32_t, 4> words = {}) {
    if (!accumulate) {
      for (float& x : d) x = emulation::kCanonicalNan;
    }
    emulation::Fiber& self = emulation::self();
    self.wgmmas.push_back({run<kA, kB>, self.num_groups, accumulate, d, a, b, words});
  }

  // Element of 16 rows of A, or of kN columns of B.
  template <Major kMajor>
  static float element(uint64_t descriptor, int row, int k) {
    const WgmmaOperand<kElement> operand{descriptor};
    return kMajor == Major::kK ? operand.k_major(row, k) : operand.mn_major(row, k);
  }
  // Word i: row i % 2 of the thread's two, columns 2 * lane + {0, 1} of the first or second 8.
  static float element_of_words(const std::array<uint32_t, 4>& words, int row, int k) {
    const uint32_t pair = words[row / kRowStride + k / 8 * 2];
    return element_of<kElement>(static_cast<uint16_t>(pair >> 16 * (k % 2)));
  }

  // Most of the time of an emulation, which the build optimises less.
  [[gnu::optimize("O3")]] static void multiply(const float (&a)[16][16], const float (&b)[16][kN],
                                               float (&d)[16][kN]) {
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < kN; ++column) d[row][column] += a[row][k] * b[k][column];
      }
    }
  }

  // Computes the 16 rows of a warp.
  template <Major kA, Major kB>
  static void run(emulation::Fiber* lanes, size_t index) {
    const emulation::Wgmma& first = lanes[0].wgmmas[index];
    const int first_row = thread_row(static_cast<int>(threadIdx.x % 128 / 32 * 32));
    float a[16][16], b[16][kN], d[16][kN];
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        if constexpr (kA == Major::kRegisters) {
          const emulation::Fiber& owner = lanes[row % kRowStride * 4 + k % 8 / 2];
          a[row][k] = element_of_words(owner.wgmmas[index].words, row, k);
        } else {
          a[row][k] = element<kA>(first.a, first_row + row, k);
        }
      }
    }
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < kN; ++column) b[k][column] = element<kB>(first.b, column, k);
    }
    const auto for_registers = [&](auto work) {
      for (int lane = 0; lane < 32; ++lane) {
        const emulation::Wgmma& mine = lanes[lane].wgmmas[index];
        if (mine.run != first.run || mine.a != first.a || mine.b != first.b) {
          std::printf("lane %d has other operands of a WGMMA than lane 0\n", lane);
          std::abort();
        }
        for (int i = 0; i < kN / 2; ++i) {
          work(mine.d[i],
               d[thread_row(lane) + register_row(i)][thread_column(lane) + register_column(i)]);
        }
      }
    };
    for_registers([&](float mine, float& sum) { sum = first.accumulates ? mine : 0.f; });
    multiply(a, b, d);
    for_registers(
        [](float& mine, float sum) { mine = std::isnan(sum) ? emulation::kCanonicalNan : sum; });
  }
};

}  // namespace flashattn3
