// tile/gemm_int8.cuh: scores of int8 plus their bias, exact; also with the extreme elements. Their
// registers are read and written as floats of the same bits.
#pragma once

#include "../unit.cuh"
#include "tile/fragment.h"
#include "tile/gemm_int8.cuh"

namespace unit::gemm_int8 {

using namespace flashattn3;

// s: kInt8Bias + Q K^T. again: int8_score of row `row` and key 3 * row % kN, of each row.
template <int kN, int kHeadDim>
__global__ void store_scores(const uint8_t* q, const uint8_t* k, uint32_t* scores, int* again) {
  uint8_t* bias_tile = shared_memory();
  uint8_t* q_tile = bias_tile + 1024;
  uint8_t* k_tile = q_tile + tile_bytes(64, kHeadDim);
  write_bias_tile(bias_tile);
  fill_tile(q_tile, q, 64, kHeadDim);
  fill_tile(k_tile, k, kN, kHeadDim);
  __syncthreads();
  const uint32_t q_address = cute::cast_smem_ptr_to_uint(q_tile);
  const uint32_t k_address = cute::cast_smem_ptr_to_uint(k_tile);
  uint32_t s[kN / 2];
  gemm_ss_int8<64, kN, kHeadDim>(s, smem_desc_low(q_address, 64 * 128),
                                 smem_desc_low(k_address, kN * 128),
                                 cute::cast_smem_ptr_to_uint(bias_tile));
  warpgroup_wait<0>();
  warpgroup_fence_operand(s);
  store_fragment<kN>(s, scores);
  for (int first = 0; first < 64; first += 32) {  // each quad has a row of its own
    const int row = first + static_cast<int>(threadIdx.x) / 4;
    const int score = int8_score<64, kN, kHeadDim>(q_address, k_address, row, 3 * row % kN);
    if (threadIdx.x % 4 == 0) again[row] = score;
  }
}

template <int kN, int kHeadDim>
void check_scores(Result& result) {
  Matrix q(64, kHeadDim, 127, 1), k(kN, kHeadDim, 127, 2);
  for (int i = 0; i < kHeadDim; ++i) {
    q.values[i] = -128, k.values[i] = 127;                         // row 0, key 0: the least sum
    q.values[kHeadDim + i] = -128, k.values[kHeadDim + i] = -128;  // row 1, key 1: the greatest
  }
  Array<uint8_t> q_bytes(q.bytes(ElementType::kInt8)), k_bytes(k.bytes(ElementType::kInt8));
  Array<uint32_t> scores(64 * kN);
  Array<int> again(64);
  launch(store_scores<kN, kHeadDim>, 1, 128, 1024 + tile_bytes(64 + kN, kHeadDim), q_bytes.device(),
         k_bytes.device(), scores.device(), again.device());
  const std::vector<uint32_t>& s = scores.download();
  const std::vector<int>& score = again.download();
  for (int row = 0; row < 64; ++row) {
    for (int key = 0; key < kN; ++key) {
      int product = 0;
      for (int i = 0; i < kHeadDim; ++i) product += q.at(row, i) * k.at(key, i);
      const uint32_t found = s[row * kN + key];
      result.equal(static_cast<double>(kInt8Bias<kHeadDim>) + product, found, "S", row, key);
      result.equal(true, kInt8Bias<kHeadDim> + product >= 0, "S is not negative", row, key);
      if (key == 3 * row % kN) {
        result.equal(product, score[row], "int8_score", row, key);
      }
    }
  }
}

static_assert(kInt8Bias<64> == kInt8Bias<128> && kInt8Bias<256> == 2 * kInt8Bias<128>);
static_assert(kInt8Bias<128> >= 128 * 128 * 127, "no sum of 128 products is below -bias");
static_assert(kInt8Bias<256> + 256 * 128 * 128 < 1 << 23, "sums are denormal floats");

constexpr int kColumns = 80;

// column_of finds the value in the thread that holds it, in the given row alone.
__global__ void store_columns(float value, int* found) {
  float s[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) {
    s[i] = static_cast<float>(fragment_index<kColumns>(i));
  }
  for (int r = 0; r < 2; ++r) found[2 * threadIdx.x + r] = column_of(s, r, value);
}

inline void check_columns(Result& result) {
  for (const int at : {0, 1, 79, 80 * 8 + 5, 80 * 63 + 78, 80 * 20 + 33}) {
    const auto found = results_of<int>(256, store_columns, 1, 128, 0, static_cast<float>(at));
    const int row = at / kColumns, column = at % kColumns;
    for (int thread = 0; thread < 128; ++thread) {
      for (int r = 0; r < 2; ++r) {
        const bool holds =
            thread_row(thread) + 8 * r == row && thread_column(thread) == column % 8 / 2 * 2;
        result.equal(holds ? column : -1, found[2 * thread + r], "column_of", thread, r);
      }
    }
  }
}

static_assert(std::is_same_v<ScoreAccumulator<ElementType::kInt8>, uint32_t>);
static_assert(std::is_same_v<ScoreAccumulator<ElementType::kE4m3>, float>);
static_assert(std::is_same_v<ScoreAccumulator<ElementType::kBFloat16>, float>);

// number: of the denormal whose bits are the integer. written: bits of a register that was set to
// 3 times that denormal.
__global__ void store_numbers(const uint32_t* integers, float* number, uint32_t* written) {
  uint32_t score = integers[threadIdx.x];
  number[threadIdx.x] = from_denormal(get(score));
  set(score, 3.f * get(score));
  written[threadIdx.x] = score;
}

inline void check_integers(Result& result) {
  const std::vector<uint32_t> integers = {0, 1, 2, 1000, 65025, 2080800, 2796202};
  const int count = static_cast<int>(integers.size());
  Array<uint32_t> given(integers), written(count);
  Array<float> number(count);
  launch(store_numbers, 1, count, 0, given.device(), number.device(), written.device());
  for (int i = 0; i < count; ++i) {
    result.equal(integers[i], number.download()[i], "from_denormal", i);
    result.equal(3. * integers[i], written.download()[i], "set", i);
  }
}

static const Tests kTests = {
    {"tile/gemm_int8: integer scores", Where::kGpu, check_integers},
    {"tile/gemm_int8: columns", Where::kGpu, check_columns},
    {"tile/gemm_int8: 128 keys, d64", Where::kGpu, check_scores<128, 64>},
    {"tile/gemm_int8: 96 keys, d128", Where::kGpu, check_scores<96, 128>},
    {"tile/gemm_int8: 128 keys, d256", Where::kGpu, check_scores<128, 256>}};

}  // namespace unit::gemm_int8
