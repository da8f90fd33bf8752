// tile/score_accumulator.cuh: registers of integers read and written as floats of the same bits.
#pragma once

#include "../unit.cuh"
#include "tile/score_accumulator.cuh"

namespace unit::score_accumulator {

using namespace flashattn3;

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

__global__ void store_float(float* found) {
  float score = 1.5f;
  found[0] = get(score);
  set(score, -2.5f);
  found[1] = get(score);
}

inline void check_floats(Result& result) {
  Array<float> found(2);
  launch(store_float, 1, 1, 0, found.device());
  result.equal(1.5, found.download()[0], "get");
  result.equal(-2.5, found.download()[1], "set");
}

static const Tests kTests = {{"tile/score_accumulator: integers", Where::kGpu, check_integers},
                             {"tile/score_accumulator: floats", Where::kGpu, check_floats}};

}  // namespace unit::score_accumulator
