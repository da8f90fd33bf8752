// attention/span_softmax.cuh: the join of a row's sums of two spans.
#pragma once

#include "../unit.cuh"
#include "attention/span_softmax.cuh"

namespace unit::span_softmax {

using namespace flashattn3;

// given: max and sum of the spans before and of one more. found: those of all.
__global__ void join(const float* given, float* found) {
  RowStats all{given[0], given[1]};
  const SpanJoin of_sums = SpanJoin::of(all, {given[2], given[3]});
  found[0] = all.max, found[1] = all.sum, found[2] = of_sums(given[1], given[3]);
}

inline void check_join(Result& result) {
  for (const float other : {-3.f, 0.f, 5.f}) {
    const float first = 1.f, sum = 7.f, added = 3.f;
    Array<float> given(std::vector<float>{first, sum, other, added});
    const auto found = results_of<float>(3, join, 1, 1, 0, given.device());
    const double max = std::max(first, other);
    const double wanted = sum * std::exp2(first - max) + added * std::exp2(other - max);
    result.equal(max, found[0], "the larger maximum", other);
    result.compare(wanted, found[1], wanted * 1e-5, "sum", other);
    result.equal(found[1], found[2], "values are joined alike", other);
  }
}

static const Tests kTests = {
    {"attention/span_softmax: the join of two spans", Where::kGpu, check_join}};

}  // namespace unit::span_softmax
