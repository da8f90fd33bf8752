// attention/softmax_e4m3.cuh: the codes of one tile of floats after row_max is set, packed, against
// 2^x. row_sum_columns_test.cuh multiplies packed codes by V.
#pragma once

#include "../unit.cuh"
#include "attention/softmax_e4m3.cuh"
#include "tile/fragment.h"

namespace unit::softmax_e4m3 {

using namespace flashattn3;

constexpr int kN = 64, kRows = 64, kLowest = 1;
using Softmax = SoftmaxE4m3<kN, true, kLowest, false>;

// scores: in log2 units. codes: of the packed probabilities. row_max: log2 of what they are
// relative to; highest: the code of the row's maximum; unseen: bit of the row.
__global__ void store_codes(const float* scores, uint8_t* codes, float* row_max, float* highest,
                            int* unseen, bool full) {
  Softmax softmax;
  softmax.reset();
  float s[kN / 2];
  for (int i = 0; i < kN / 2; ++i) s[i] = kCodesPerOctave * scores[fragment_index<kN>(i)];
  float of_row[2], factor[2];
  const float least[2] = {0.f, 0.f};
  find_highest(of_row, s);
  softmax.rescale(s, of_row, least, factor, full);
  Probabilities<ElementType::kE4m3, kN> p;
  Softmax::pack(p, s);
  for (int i = 0; i < kN / 2; ++i) {
    // Register i of a row is byte i / 4 % 2 * 2 + i % 2 of the operand of its 16 keys.
    const uint32_t word = p[i / 16][i % 16 / 8 * 2 + row_of(i)];
    codes[fragment_index<kN>(i)] = static_cast<uint8_t>(word >> (8 * (i / 4 % 2 * 2 + i % 2)));
  }
  for (int r = 0; r < 2; ++r) {
    const int row = thread_row(threadIdx.x) + 8 * r;
    row_max[row] = softmax.row_max_log2(r);
    highest[row] = of_row[r];
    unseen[row] = softmax.unseen >> r & 1;
  }
}

// full: every row sees every key, so that a maximum far above the tile's others gets the highest
// code.
inline void check_codes(Result& result, bool full) {
  std::mt19937 random(51);
  std::normal_distribution<float> normal;
  std::vector<float> scores(kRows * kN);
  for (int row = 0; row < kRows; ++row) {
    for (int key = 0; key < kN; ++key) {
      scores[row * kN + key] = 2.f * normal(random) + 3.f * (row - 32);
      if (row == 5 || (row == 6 && key != 17)) scores[row * kN + key] = -INFINITY;
      if (row == 7 && key == 40) scores[row * kN + key] += 20.f;
    }
  }
  Array<float> given(scores), row_max(kRows), highest(kRows);
  Array<uint8_t> codes(kRows * kN);
  Array<int> unseen(kRows);
  launch(store_codes, 1, 128, 0, given.device(), codes.device(), row_max.device(), highest.device(),
         unseen.device(), full);
  const std::vector<uint8_t>& packed = codes.download();
  for (int row = 0; row < kRows; ++row) {
    const bool any = row != 5;
    result.equal(!any, unseen.download()[row], "unseen", row);
    if (any) {
      const float code = highest.download()[row];
      result.equal(true, code >= Softmax::kLowestCode - 1.f && code < Softmax::kRescaleThreshold,
                   "code of the maximum is in its range", row);
      if (row == 7 && full) {
        result.compare(Softmax::kHighestCode, code, 0.01, "code of a key far above", row);
      }
    }
    for (int key = 0; key < kN; ++key) {
      __nv_fp8_e4m3 value;
      value.__x = packed[row * kN + key];
      const double p = static_cast<float>(value);
      const double x = std::exp2(static_cast<double>(scores[row * kN + key]) -
                                 (any ? row_max.download()[row] : 0.f));
      // Probabilities below 2^-6 are too small. Others are at most 8 % off, which is the error of
      // rounding 8 (x + 7) - 0.46 to a code, over all x.
      result.compare(x, p, x < 0x1p-6 ? 0x1p-6 : 0.081 * x, "P", row, key);
    }
  }
}

__global__ void store_is_light(const int2* highest, int* found) {
  Softmax softmax;
  softmax.reset();
  softmax.unseen = 0;
  const int both[2] = {highest[threadIdx.x].x, highest[threadIdx.x].y};
  found[threadIdx.x] = softmax.is_light(both) + 2 * softmax.may_rescale(both);
}

// kLight is the code of 2^-1, and the threshold that of the largest finite probability.
inline void check_limits(Result& result) {
  struct Case {
    float first, second;
    bool light, may_rescale;
  };
  const Case cases[] = {{60.f, 100.f, false, false}, {40.f, 100.f, true, true},
                        {100.f, 40.f, true, true},   {126.5f, 60.f, false, true},
                        {60.f, 126.5f, false, true}, {126.f, 126.f, false, false},
                        {60.f, NAN, false, true},    {-INFINITY, 60.f, true, true}};
  std::vector<int2> bits;
  for (const Case& c : cases) {
    int2 both;
    std::memcpy(&both.x, &c.first, 4);
    std::memcpy(&both.y, &c.second, 4);
    bits.push_back(both);
  }
  const int count = static_cast<int>(bits.size());
  Array<int2> given(bits);
  const auto found = results_of<int>(count, store_is_light, 1, count, 0, given.device());
  for (int i = 0; i < count; ++i) {
    result.equal(cases[i].light, found[i] & 1, "is_light", i);
    result.equal(cases[i].may_rescale, found[i] >> 1, "may_rescale", i);
  }
}

static const Tests kTests = {{"attention/softmax_e4m3: codes", Where::kGpu,
                              [](Result& result) { check_codes(result, true); }},
                             {"attention/softmax_e4m3: codes of masked tiles", Where::kGpu,
                              [](Result& result) { check_codes(result, false); }},
                             {"attention/softmax_e4m3: limits", Where::kGpu, check_limits}};

}  // namespace unit::softmax_e4m3
