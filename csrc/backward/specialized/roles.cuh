// The roles of a CTA's threads at 192 columns. A 2-CTA cluster computes an n_block of 128 keys, as
// at 256 columns, but each of the two consumer warpgroups of a CTA computes one of S and dP for all
// 64 keys x 64 queries of a step, and all columns of one of dK and dV: 192 columns do not split
// into halves of whole swizzle atoms, and GEMMs of 64 queries are faster than those of 32.
#pragma once

#include "backward/specialized/gradient_consumer.cuh"
#include "backward/specialized/score_consumer.cuh"

namespace flashattn3::backward::specialized {

// Zero fill of K and V past the end of the sequence, as of Q and dO (Consumer). Both warpgroups
// call it, at the same instruction: synccheck takes a CTA barrier at two as divergence.
template <Config kConfig>
__device__ __forceinline__ void zero_fill_kv(const Arguments& args, const WorkTile& tile,
                                             uint8_t* shared, int rank) {
  using Traits = KernelTraits<kConfig>;
  if (args.seqlens_k.cu_seqlens == nullptr && args.seqlens_k.seqused == nullptr) return;
  if (tile.num_keys >= tile.first_key + 2 * Traits::kBlockN) return;
  if (tile.m_blocks.empty()) return;  // nothing is loaded
  // Sync: K and V are loaded.
  reinterpret_cast<typename Traits::Storage*>(shared)->keys_full.wait(0);
  constexpr int kThreads = 128 * Traits::kConsumers;
  const auto used = [&](int cta) {
    return max(0, tile.num_keys - tile.first_key - cta * Traits::kBlockN);
  };
  // K, V and K's columns for dQ follow each other.
  zero_fill_rows<Traits::kBlockN, 2 * Traits::kAtoms + 2>(shared + Traits::kKOffset, used(rank),
                                                          threadIdx.x, kThreads);
  zero_fill_rows<Traits::kBlockN, 2>(shared + Traits::kOtherKOffset, used(1 - rank), threadIdx.x,
                                     kThreads);
  fence_async_proxy();
  named_barrier_sync(3, kThreads);  // Sync: both warpgroups have filled.
}

template <Config kConfig>
__device__ __forceinline__ void consume(const Arguments& args, const WorkTile& tile,
                                        uint8_t* shared, int warpgroup, int rank) {
  zero_fill_kv<kConfig>(args, tile, shared, rank);
  if (warpgroup == 0) {
    ScoreConsumer<kConfig>(args, tile, shared, rank).run();
  } else {
    GradientConsumer<kConfig>(args, tile, shared, rank).run();
  }
}

}  // namespace flashattn3::backward::specialized
