// attention/softmax_state.cuh: functions of a quad and of a thread's fragment.
#pragma once

#include "../unit.cuh"
#include "attention/score_scale.cuh"
#include "attention/softmax_state.cuh"
#include "tile/fragment.h"

namespace unit::softmax_state {

using namespace flashattn3;

__global__ void store_exp2(const float* x, float* found) {
  found[threadIdx.x] = exp2_approx(x[threadIdx.x]);
}

inline void check_exp2(Result& result) {
  std::vector<float> x = {-INFINITY, -200.f, 0.f, 1.f, -6.f, 10.f, NAN};
  for (float value = -100.f; value < 100.f; value += 0.37f) x.push_back(value);
  const int count = static_cast<int>(x.size());
  Array<float> given(x), found(count);
  launch(store_exp2, 1, count, 0, given.device(), found.device());
  for (int i = 0; i < count; ++i) {
    const double wanted = x[i] < -126 ? 0. : std::exp2(static_cast<double>(x[i]));
    result.compare(wanted, found.download()[i], wanted * 0x1p-21, "exp2", i);
  }
}

__global__ void store_quads(float* found) {
  found[threadIdx.x] = quad_sum(static_cast<float>(1u << threadIdx.x));
}

inline void check_quads(Result& result) {
  Array<float> found(32);
  launch(store_quads, 1, 32, 0, found.device());
  for (int lane = 0; lane < 32; ++lane) {
    result.equal(std::ldexp(15., lane / 4 * 4), found.download()[lane], "quad_sum", lane);
  }
}

constexpr int kN = 80;
using State = SoftmaxState<kN, true>;

// column_of finds the value in the thread that holds it, in the given row alone.
__global__ void store_columns(float value, int* found) {
  float s[kN / 2];
  for (int i = 0; i < kN / 2; ++i) {
    const int row = thread_row(threadIdx.x) + register_row(i);
    s[i] = static_cast<float>(row * kN + thread_column(threadIdx.x) + register_column(i));
  }
  for (int r = 0; r < 2; ++r) found[2 * threadIdx.x + r] = column_of(s, r, value);
}

inline void check_columns(Result& result) {
  for (const int at : {0, 1, 79, 80 * 8 + 5, 80 * 63 + 78, 80 * 20 + 33}) {
    Array<int> found(256);
    launch(store_columns, 1, 128, 0, static_cast<float>(at), found.device());
    const int row = at / kN, column = at % kN;
    for (int thread = 0; thread < 128; ++thread) {
      for (int r = 0; r < 2; ++r) {
        const bool holds =
            thread_row(thread) + 8 * r == row && thread_column(thread) == column % 8 / 2 * 2;
        result.equal(holds ? column : -1, found.download()[2 * thread + r], "column_of", thread, r);
      }
    }
  }
}

// What one thread finds in its fragment. scores: of the thread's registers.
struct Found {
  float exponents[kN / 2];
  int highest[2];
  int needs_rescale, sum_is_below_0;
};

__global__ void store_state(const float* scores, float row_max0, float row_max1, uint32_t unseen,
                            float threshold, Found* found) {
  State state;
  state.reset();
  state.row_max[0] = row_max0, state.row_max[1] = row_max1, state.unseen = unseen;
  float s[kN / 2];
  for (int i = 0; i < kN / 2; ++i) s[i] = scores[i];
  state.subtract_row_max(s, UniformScale{{0.5f}}, found->highest);
  for (int i = 0; i < kN / 2; ++i) found->exponents[i] = s[i];
  found->needs_rescale = state.needs_rescale(found->highest, threshold);
  found->sum_is_below_0 = state.impossible();
}

struct Case {
  const char* name;
  float most[2];  // the largest score of each row; all others are below
  uint32_t unseen;
  bool rescales;
};
constexpr float kRowMax[2] = {3.f, -2.f}, kThreshold = 10.f;

inline void compare_state(Result& result, const Case& c, const std::vector<float>& scores,
                          const Found& found) {
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
  const Case cases[] = {{"no row reaches the threshold", {25.f, 15.f}, 0, false},
                        {"row 0 reaches it", {26.f, 15.f}, 0, true},
                        {"row 1 reaches it", {25.f, 16.f}, 0, true},
                        {"row 1 is NaN", {25.f, NAN}, 0, true},
                        {"row 0 is infinite", {INFINITY, 15.f}, 0, true},
                        {"no score is visible", {-INFINITY, -INFINITY}, 0, false},
                        {"row 1 saw no key", {25.f, 15.f}, 2, true}};
  for (const Case& c : cases) {
    for (const int odd : {0, 1}) {  // each row's largest score is in either register of a pair
      std::vector<float> scores(kN / 2);
      for (int i = 0; i < kN / 2; ++i) scores[i] = c.most[row_of(i)] - (1.f + i);
      scores[4 + odd] = c.most[0], scores[18 + odd] = c.most[1];
      Array<float> given(scores);
      Array<Found> found(1);
      launch(store_state, 1, 1, 0, given.device(), kRowMax[0], kRowMax[1], c.unseen, kThreshold,
             found.device());
      compare_state(result, c, scores, found.download()[0]);
    }
  }
}

static const Tests kTests = {{"attention/softmax_state: exp2", Where::kGpu, check_exp2},
                             {"attention/softmax_state: quads", Where::kGpu, check_quads},
                             {"attention/softmax_state: columns", Where::kGpu, check_columns},
                             {"attention/softmax_state: row_max", Where::kGpu, check_state}};

}  // namespace unit::softmax_state
