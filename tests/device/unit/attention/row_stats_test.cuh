// attention/row_stats.cuh: a sink in the sum of a row.
#pragma once

#include "../unit.cuh"
#include "attention/row_stats.cuh"

namespace unit::row_stats {

using namespace flashattn3;

__global__ void store_with_sink(RowStats stats, float sink, float* found) {
  found[2] = add_sink(stats, sink);
  found[0] = stats.max, found[1] = stats.sum;
}

// The sink counts as one more score, far below, near and far above the others, and alone; one of
// +inf leaves the others nothing.
inline void check_sink(Result& result) {
  for (const RowStats stats : {RowStats{3.f, 2.5f}, RowStats{-INFINITY, 0.f}}) {
    for (const float sink : {-200.f, 2.f, 3.f, 9.f, 200.f, -INFINITY, INFINITY}) {
      const auto at = results_of<float>(3, store_with_sink, 1, 1, 0, stats, sink);
      const double max = std::fmax(stats.max, sink), reference = max == -INFINITY ? 0. : max;
      const double factor = std::exp2(stats.max - reference);
      const double of_sink = std::isinf(max) && max > 0 ? 1 : std::exp2(sink - reference);
      const double sum = stats.sum * factor + of_sink;
      result.equal(max, at[0], "maximum", sink);
      result.compare(sum, at[1], sum * 1e-6, "sum", sink);
      result.compare(factor, at[2], factor * 1e-6 + 1e-30, "factor", sink);
    }
  }
}

static const Tests kTests = {{"attention/row_stats: sink", Where::kGpu, check_sink}};

}  // namespace unit::row_stats
