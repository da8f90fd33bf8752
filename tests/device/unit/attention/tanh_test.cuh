// attention/tanh.cuh: tanh.
#pragma once

#include "../unit.cuh"
#include "attention/tanh.cuh"

namespace unit::tanh {

using namespace flashattn3;

__global__ void store_tanh(const float* x, float* found) {
  found[threadIdx.x] = tanh_of_scaled(x[threadIdx.x]);
}

// tanh of x given as 2 * log2(e) * x, to a relative 2e-6.
inline void check_tanh(Result& result) {
  std::vector<float> x = {0.f, INFINITY, -INFINITY, 0.499f, 0.501f, 1e-6f};
  for (float value = -30.f; value < 30.f; value += 0.0737f) x.push_back(value);
  const int count = static_cast<int>(x.size());
  Array<float> given(x);
  const auto found = results_of<float>(count, store_tanh, 1, count, 0, given.device());
  for (int i = 0; i < count; ++i) {
    const double wanted = std::tanh(static_cast<double>(x[i]) * 0.34657359027997264);
    result.compare(wanted, found[i], std::abs(wanted) * 2e-6, "tanh", i);
  }
}

static const Tests kTests = {{"attention/tanh: tanh", Where::kGpu, check_tanh}};

}  // namespace unit::tanh
