// tile/fragment.h: every element of an accumulator is in one register of one thread, and it is the
// one that WGMMA and mma.sync write there.
#pragma once

#include "../unit.cuh"
#include "attention/block_scale.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"

namespace unit::fragment {

using namespace flashattn3;

// Whether the 128 threads of a warpgroup hold each element of 64 x kN exactly once.
template <int kN>
constexpr bool holds_each_element_once() {
  bool seen[64][kN] = {};
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kN / 2; ++i) {
      const int row = thread_row(thread) + register_row(i);
      const int column = thread_column(thread) + register_column(i);
      if (row >= 64 || column >= kN || seen[row][column]) return false;
      seen[row][column] = true;
    }
  }
  return true;  // 128 * kN / 2 elements, all different
}
static_assert(holds_each_element_once<8>() && holds_each_element_once<80>());
static_assert(thread_row(128 + 32 + 4) == 64 + 16 + 1, "warpgroups follow each other");

// The PTX ISA's own formula, of the row of register i of thread t: 16 * warp + lane / 4 + 8 for odd
// i / 2; of the column: 8 * (i / 4) + 2 * (lane % 4) + i % 2.
inline void check_formula(Result& result) {
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 32; ++i) {
      const int warp = thread / 32, lane = thread % 32;
      result.equal(16 * warp + lane / 4 + (i / 2 % 2 == 1 ? 8 : 0),
                   thread_row(thread) + register_row(i), "row", thread, i);
      result.equal(8 * (i / 4) + 2 * (lane % 4) + i % 2, thread_column(thread) + register_column(i),
                   "column", thread, i);
      result.equal(i / 2 % 2, row_of(i), "row_of", thread, i);
      result.equal(i, register_at(row_of(i), register_column(i)), "register_at", thread, i);
    }
  }
}

// S = row + 64 * column, from q = (row, 64, 0, ...) and k = (1, column, 0, ...). Register i of each
// thread goes to found[thread][i].
template <int kN>
__global__ void store_registers(const uint8_t* q, const uint8_t* k, float* found) {
  uint8_t* q_tile = shared_memory();
  uint8_t* k_tile = q_tile + tile_bytes(64, 128);
  fill_tile(q_tile, q, 64, 128);
  fill_tile(k_tile, k, kN, 128);
  __syncthreads();
  float s[kN / 2];
  gemm_ss<ElementType::kBFloat16, 64, kN, 64>(
      s, smem_desc_low(cute::cast_smem_ptr_to_uint(q_tile), 16),
      smem_desc_low(cute::cast_smem_ptr_to_uint(k_tile), 16));
  warpgroup_wait<0>();
  warpgroup_fence_operand(s);
  for (int i = 0; i < kN / 2; ++i) found[threadIdx.x * (kN / 2) + i] = s[i];
}

inline void check_wgmma(Result& result) {
  constexpr int kN = 80;
  Matrix q(64, 64, 0, 0), k(kN, 64, 0, 0);
  for (int row = 0; row < 64; ++row) {
    q.values[row * 64] = row;
    q.values[row * 64 + 1] = 64;
  }
  for (int column = 0; column < kN; ++column) {
    k.values[column * 64] = 1;
    k.values[column * 64 + 1] = column;
  }
  Array<uint8_t> q_bytes(q.bytes(ElementType::kBFloat16));
  Array<uint8_t> k_bytes(k.bytes(ElementType::kBFloat16));
  const auto s = results_of<float>(128 * kN / 2, store_registers<kN>, 1, 128,
                                   tile_bytes(64 + kN, 128), q_bytes.device(), k_bytes.device());
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kN / 2; ++i) {
      const int row = thread_row(thread) + register_row(i);
      const int column = thread_column(thread) + register_column(i);
      result.equal(row + 64 * column, s[thread * (kN / 2) + i], "register", thread, i);
    }
  }
}

static const Tests kTests = {{"tile/fragment: formula", Where::kHost, check_formula},
                             {"tile/fragment: WGMMA", Where::kGpu, check_wgmma}};

}  // namespace unit::fragment
