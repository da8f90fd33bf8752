// The roles of a CTA's threads at 192 columns. A 2-CTA cluster computes an n_block of 128 keys, as
// at 256 columns, but each of the two consumer warpgroups of a CTA computes one of S and dP for all
// 64 keys x 64 queries of a step, and all columns of one of dK and dV: 192 columns do not split
// into halves of whole swizzle atoms, and GEMMs of 64 queries are faster than those of 32.
#pragma once

#include "backward/specialized/gradient_consumer.cuh"
#include "backward/specialized/score_consumer.cuh"

namespace flashattn3::backward::specialized {

template <Config kConfig>
__device__ __forceinline__ void consume(const Arguments& args, const WorkTile& tile,
                                        uint8_t* shared, int warpgroup, int rank) {
  if (warpgroup == 0) {
    ScoreConsumer<kConfig>(args, tile, shared, rank).run();
  } else {
    GradientConsumer<kConfig>(args, tile, shared, rank).run();
  }
}

}  // namespace flashattn3::backward::specialized
