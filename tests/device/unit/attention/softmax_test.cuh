// attention/softmax.cuh: online softmax over tiles of keys against softmax in float64: growing,
// falling and huge scores, and rows that see no key of the first tiles or of any; functions of a
// quad and of a thread's fragment.
#pragma once

#include "../unit.cuh"
#include "attention/softmax.cuh"
#include "attention/variant.cuh"
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
  const UniformScale scale{kScale};
  float out[2] = {0.f, 0.f}, largest[2] = {0.f, 0.f};
  for (int tile = 0; tile < kTiles; ++tile) {
    float s[kN / 2];
    const auto load = [&] {
      for (int i = 0; i < kN / 2; ++i) {
        s[i] = scores[fragment_index<kKeys>(i) + tile * kN];
      }
    };
    load();
    const bool exact = tile == 0 || !at_once;
    if (exact || softmax.exponentiate_at_once(s, scale).overflow) {
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
  const auto found = results_of<float4>(kRows, attend<kElement, kRowsMayBeEmpty>, 1, 128, 0,
                                        given.device(), at_once);
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
    const float4 row_found = found[row];
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

__global__ void store_exp2(const float* x, float* found) {
  found[threadIdx.x] = exp2_approx(x[threadIdx.x]);
}

inline void check_exp2(Result& result) {
  std::vector<float> x = {-INFINITY, -200.f, 0.f, 1.f, -6.f, 10.f, NAN};
  for (float value = -100.f; value < 100.f; value += 0.37f) x.push_back(value);
  const int count = static_cast<int>(x.size());
  Array<float> given(x);
  const auto found = results_of<float>(count, store_exp2, 1, count, 0, given.device());
  for (int i = 0; i < count; ++i) {
    const double wanted = x[i] < -126 ? 0. : std::exp2(static_cast<double>(x[i]));
    result.compare(wanted, found[i], wanted * 0x1p-21, "exp2", i);
  }
}

// What one thread finds in its fragment. scores: of the thread's registers.
struct StateFound {
  float exponents[kN / 2];
  int highest[2];
  int needs_rescale, sum_is_below_0;
};

__global__ void store_state(const float* scores, float row_max0, float row_max1, uint32_t unseen,
                            float threshold, StateFound* found) {
  SoftmaxState<kN, true> state;
  state.reset();
  state.row_max[0] = row_max0, state.row_max[1] = row_max1, state.unseen = unseen;
  float s[kN / 2];
  for (int i = 0; i < kN / 2; ++i) s[i] = scores[i];
  state.subtract_row_max(s, UniformScale{0.5f}, found->highest);
  for (int i = 0; i < kN / 2; ++i) found->exponents[i] = s[i];
  found->needs_rescale = state.needs_rescale(found->highest, threshold);
  found->sum_is_below_0 = state.impossible();
}

struct StateCase {
  const char* name;
  float most[2];  // the largest score of each row; all others are below
  uint32_t unseen;
  bool rescales;
};
constexpr float kRowMax[2] = {3.f, -2.f}, kThreshold = 10.f;

inline void compare_state(Result& result, const StateCase& c, const std::vector<float>& scores,
                          const StateFound& found) {
  for (int i = 0; i < kN / 2; ++i) {
    result.equal(scores[i] * 0.5f - kRowMax[row_of(i)], found.exponents[i], c.name, i);
  }
  result.equal(c.rescales, found.needs_rescale, c.name);
  result.equal(0, found.sum_is_below_0, c.name);
  for (int r = 0; r < 2; ++r) {
    // Integer comparison finds the largest float as soon as one is positive.
    float highest;
    std::memcpy(&highest, &found.highest[r], 4);
    const float wanted = c.most[r] * 0.5f - kRowMax[r];
    if (wanted > 0 || std::isnan(wanted)) result.equal(wanted, highest, c.name, r);
  }
}

inline void check_state(Result& result) {
  const StateCase cases[] = {{"no row reaches the threshold", {25.f, 15.f}, 0, false},
                             {"row 0 reaches it", {26.f, 15.f}, 0, true},
                             {"row 1 reaches it", {25.f, 16.f}, 0, true},
                             {"row 1 is NaN", {25.f, NAN}, 0, true},
                             {"row 0 is infinite", {INFINITY, 15.f}, 0, true},
                             {"no score is visible", {-INFINITY, -INFINITY}, 0, false},
                             {"row 1 saw no key", {25.f, 15.f}, 2, true}};
  for (const StateCase& c : cases) {
    for (const int odd : {0, 1}) {  // each row's largest score is in either register of a pair
      std::vector<float> scores(kN / 2);
      for (int i = 0; i < kN / 2; ++i) scores[i] = c.most[row_of(i)] - (1.f + i);
      scores[4 + odd] = c.most[0], scores[18 + odd] = c.most[1];
      Array<float> given(scores);
      const auto found = results_of<StateFound>(1, store_state, 1, 1, 0, given.device(), kRowMax[0],
                                                kRowMax[1], c.unseen, kThreshold);
      compare_state(result, c, scores, found[0]);
    }
  }
}

static const Tests kTests = {
    {"attention/softmax: bf16", Where::kGpu, check_tiles<ElementType::kBFloat16>},
    {"attention/softmax: fp16", Where::kGpu, check_tiles<ElementType::kFloat16>},
    {"attention/softmax: exp2", Where::kGpu, check_exp2},
    {"attention/softmax: row_max", Where::kGpu, check_state}};

}  // namespace unit::softmax
