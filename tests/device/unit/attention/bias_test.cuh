// attention/bias.cuh: a register of scores gets the element of its row and column. The emulation of
// the backward has keys as rows.
#pragma once

#include "../unit.cuh"
#include "attention/bias.cuh"

namespace unit::bias {

using namespace flashattn3;

constexpr int kColumns = 128, kRows = 64;
constexpr auto kElement = ElementType::kFloat16;

// An element of the tile, exact in fp16 as are its quarter and its sums below.
__host__ __device__ inline float value(int row, int column) {
  return static_cast<float>(row * 8 + column % 8) - 0.25f * static_cast<float>(column / 8);
}

__device__ inline void fill(uint8_t* tile, int rows, int columns) {
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int row = i / columns, column = i % columns;
    *reinterpret_cast<__half*>(tile + tile_offset(rows, row, 2 * column)) = value(row, column);
  }
  __syncthreads();
}

__global__ void add(float* found) {
  uint8_t* tile = shared_memory();
  fill(tile, kRows, kColumns);
  float s[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) s[i] = i;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t first = cute::cast_smem_ptr_to_uint(tile) + warp * kRowsOfWarp * 128;
  add_bias<kElement, kColumns>(s, 2.f, first + staged_row_of_lane(lane), kRows * 128);
  for (int i = 0; i < kColumns / 2; ++i) found[threadIdx.x * (kColumns / 2) + i] = s[i];
}

inline void check_add(Result& result) {
  const auto found =
      results_of<float>(128 * kColumns / 2, add, 1, 128, tile_bytes(kRows, 2 * kColumns));
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kColumns / 2; ++i) {
      const float bias =
          value(thread_row(thread) + register_row(i), thread_column(thread) + register_column(i));
      result.equal(2. * i + bias, found[thread * (kColumns / 2) + i], "score", thread, i);
    }
  }
}

static const Tests kTests = {{"attention/bias: added to scores", Where::kGpu, check_add}};

}  // namespace unit::bias
