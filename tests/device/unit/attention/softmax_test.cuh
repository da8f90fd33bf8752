// attention/softmax.cuh: online softmax over tiles of keys against softmax in float64: growing,
// falling and huge scores, and rows that see no key of the first tiles or of any.
#pragma once

#include "../unit.cuh"
#include "attention/score_scale.cuh"
#include "attention/softmax.cuh"
#include "tile/fragment.h"

namespace unit::softmax {

using namespace flashattn3;

constexpr int kN = 64, kTiles = 5, kKeys = kN * kTiles, kRows = 64;
constexpr float kScale = 1.25f;  // log2 units for each unit of a score

__host__ __device__ inline float value_of(int key) { return static_cast<float>(key % 11 - 5); }

// found[row]: out of one column of V, log2 of the sum of 2^(scale * score), and the largest
// probability. at_once: full tiles by exponentiate_at_once.
template <ElementType kElement, bool kRowsMayBeEmpty>
__global__ void attend(const float* scores, bool at_once, float4* found) {
  OnlineSoftmax<kElement, kN, kRowsMayBeEmpty> softmax;
  softmax.reset();
  const UniformScale scale{{kScale}};
  float out[2] = {0.f, 0.f}, largest[2] = {0.f, 0.f};
  for (int tile = 0; tile < kTiles; ++tile) {
    float s[kN / 2];
    const auto load = [&] {
      for (int i = 0; i < kN / 2; ++i) {
        const int row = thread_row(threadIdx.x) + register_row(i);
        const int key = tile * kN + thread_column(threadIdx.x) + register_column(i);
        s[i] = scores[row * kKeys + key];
      }
    };
    load();
    const bool exact = tile == 0 || !at_once;
    if (exact || softmax.exponentiate_at_once(s, scale)) {
      load();
      int highest[2];
      softmax.subtract_row_max(s, scale, highest);
      const bool rescales =
          tile == 0 || !exact || softmax.needs_rescale(highest, softmax.kRescaleThreshold);
      if (__any_sync(~0u, rescales)) {
        float factor[2];
        softmax.rescale(s, factor);
        for (int r = 0; r < 2; ++r) out[r] *= factor[r];
      }
      softmax.exponentiate(s);
    }
    for (int i = 0; i < kN / 2; ++i) {
      const int key = tile * kN + thread_column(threadIdx.x) + register_column(i);
      out[row_of(i)] += s[i] * value_of(key);
      largest[row_of(i)] = fmaxf(largest[row_of(i)], s[i]);
    }
  }
  for (int r = 0; r < 2; ++r) {
    const float sum = softmax.row_sum(r);
    found[thread_row(threadIdx.x) + 8 * r] = make_float4(
        sum == 0.f ? quad_sum(out[r]) : quad_sum(out[r]) / sum,
        sum == 0.f ? -INFINITY : softmax.row_max_log2(r) + __log2f(sum), quad_max(largest[r]), 0.f);
  }
}

enum class Data { kNormal, kGrowing, kFalling, kConstant, kHuge, kEmptyRows };

inline std::vector<float> make_scores(Data data) {
  std::mt19937 random(41);
  std::normal_distribution<float> normal;
  std::vector<float> scores(kRows * kKeys);
  for (int row = 0; row < kRows; ++row) {
    for (int key = 0; key < kKeys; ++key) {
      float x = normal(random);
      if (data == Data::kGrowing) x += 0.3f * key;
      if (data == Data::kFalling) x -= 0.3f * key;
      if (data == Data::kConstant) x = -40.f;
      if (data == Data::kHuge) x *= 1000.f;
      // Row 0 sees no key, row r the keys from 5 * r on, which row 63 has five of.
      if (data == Data::kEmptyRows && (row == 0 || key < 5 * row)) x = -INFINITY;
      scores[row * kKeys + key] = x;
    }
  }
  return scores;
}

template <ElementType kElement, bool kRowsMayBeEmpty>
void check_data(Result& result, Data data, bool at_once, const std::string& name) {
  const std::vector<float> scores = make_scores(data);
  Array<float> given(scores);
  Array<float4> found(kRows);
  launch(attend<kElement, kRowsMayBeEmpty>, 1, 128, 0, given.device(), at_once, found.device());
  for (int row = 0; row < kRows; ++row) {
    double most = -INFINITY, sum = 0, out = 0, weight = 0;
    for (int key = 0; key < kKeys; ++key) {
      most = std::max(most, static_cast<double>(kScale) * scores[row * kKeys + key]);
    }
    const bool any = std::isfinite(most);
    for (int key = 0; key < kKeys && any; ++key) {
      const double p = std::exp2(static_cast<double>(kScale) * scores[row * kKeys + key] - most);
      sum += p, out += p * value_of(key), weight += p * std::abs(value_of(key));
    }
    // row_max and the exponents are rounded in every tile, relative to the largest score.
    const double bound = 1e-5 + (any ? std::abs(most) * 0x1p-22 : 0.);
    const float4 row_found = found.download()[row];
    result.compare(any ? out / sum : 0., row_found.x, any ? bound * (1. + weight / sum) : 0.,
                   name + ", out", row);
    result.compare(any ? most + std::log2(sum) : -INFINITY, row_found.y, bound, name + ", lse",
                   row);
    const double limit = std::exp2(OnlineSoftmax<kElement, kN, kRowsMayBeEmpty>::kRescaleThreshold);
    result.equal(true, row_found.z <= limit, name + ", probabilities below the threshold", row);
  }
}

template <ElementType kElement>
void check_tiles(Result& result) {
  const std::pair<const char*, Data> all[] = {
      {"normal", Data::kNormal},     {"growing", Data::kGrowing}, {"falling", Data::kFalling},
      {"constant", Data::kConstant}, {"huge", Data::kHuge},
  };
  for (const auto& [name, data] : all) {
    check_data<kElement, false>(result, data, false, name);
    check_data<kElement, false>(result, data, true, std::string(name) + ", at once");
    check_data<kElement, true>(result, data, false, std::string(name) + ", rows may be empty");
  }
  check_data<kElement, true>(result, Data::kEmptyRows, false, "empty rows");
}

__global__ void store_tanh(const float* x, float* found) {
  found[threadIdx.x] = tanh_of_scaled(x[threadIdx.x]);
}

// tanh of x given as 2 * log2(e) * x, to a relative 2e-6.
inline void check_tanh(Result& result) {
  std::vector<float> x = {0.f, INFINITY, -INFINITY, 0.499f, 0.501f, 1e-6f};
  for (float value = -30.f; value < 30.f; value += 0.0737f) x.push_back(value);
  const int count = static_cast<int>(x.size());
  Array<float> given(x), found(count);
  launch(store_tanh, 1, count, 0, given.device(), found.device());
  for (int i = 0; i < count; ++i) {
    const double wanted = std::tanh(static_cast<double>(x[i]) * 0.34657359027997264);
    result.compare(wanted, found.download()[i], std::abs(wanted) * 2e-6, "tanh", i);
  }
}

static const Tests kTests = {
    {"attention/softmax: bf16", Where::kGpu, check_tiles<ElementType::kBFloat16>},
    {"attention/softmax: fp16", Where::kGpu, check_tiles<ElementType::kFloat16>},
    {"attention/softmax: tanh", Where::kGpu, check_tanh}};

}  // namespace unit::softmax
