// attention/bias.cuh: a register gets the element of its row and column, as keys or as queries, and
// what the backward writes is where it was read.
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

// 64 queries x 64 keys; a thread has the keys of its rows. found: log2 of the probabilities, and
// the tile after each has been replaced by its register's number.
__global__ void exponentiate(float* found, uint8_t* staged) {
  uint8_t* tile = shared_memory();
  fill(tile, 64, 64);
  const uint32_t columns =
      cute::cast_smem_ptr_to_uint(tile) + transposed_columns_of_lane(threadIdx.x);
  float s[32], lse[32];
  for (int i = 0; i < 32; ++i) {
    s[i] = 0.f;
    // Near the bias in log2 units, so that no probability underflows.
    lse[i] = 1.44269504f * value(thread_column(threadIdx.x) + register_column(i), 0) - i;
  }
  exponentiate_with_bias<kElement>(s, lse, 1.f, columns);
  uint32_t word[4][4];
  for (int i = 0; i < 16; ++i) word[i / 4][i % 4] = pack<kElement>(2 * i, 2 * i + 1);
  stage_transposed(columns, word);
  __syncthreads();
  for (int i = 0; i < 32; ++i) found[threadIdx.x * 32 + i] = __log2f(s[i]);
  for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) staged[i] = tile[i];
}

inline void check_exponentiate(Result& result) {
  Array<float> found(128 * 32);
  Array<uint8_t> staged(64 * 128);
  launch(exponentiate, 1, 128, tile_bytes(64, 128), found.device(), staged.device());
  const std::vector<float> exponents = found.download();
  const std::vector<uint8_t> bytes = staged.download();
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 32; ++i) {
      const int key = thread_row(thread) + register_row(i);
      const int query = thread_column(thread) + register_column(i);
      const double wanted = 1.44269504 * (value(query, key) - value(query, 0)) + i;
      result.compare(wanted, exponents[thread * 32 + i], 1e-3, "exponent", thread, i);
      __half replaced;
      std::memcpy(&replaced, &bytes[tile_offset(64, query, 2 * key)], 2);
      result.equal(i, __half2float(replaced), "replaced", thread, i);
    }
  }
}

static const Tests kTests = {{"attention/bias: added to scores", Where::kGpu, check_add},
                             {"attention/bias: keys as rows", Where::kGpu, check_exponentiate}};

}  // namespace unit::bias
