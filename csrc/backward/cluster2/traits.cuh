// Compile-time constants of a kernel config of more than 128 columns. A 2-CTA cluster computes an
// n_block, 64 keys per CTA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backward/arguments.h"
#include "backward/config.h"
#include "backward/work_tile.cuh"
#include "ptx/mbarrier.cuh"

namespace flashattn3::backward::cluster2 {

// Barriers, and the arrivals for each phase:
//   keys_full    1: the producer, and the bytes of K, V and the other CTA's K; one phase
//   q_full[b], dout_full    1: the producer, and the bytes of the copies
//   q_empty[b], dout_empty  one for each consumer warp, after its last read
//   ds_full[b]      one for each consumer warp: its part of P and dS of a step is written
//   other_full[b]   1: this CTA's exchange_ds thread, and the bytes of the other CTA's dS
//   other_empty[b]  one for each consumer warp of the other CTA: it has read this CTA's dS
//   dq_added[b]     one for each consumer warp: it has added dQ of a step; unless deterministic, of
//                   all steps, in b = 0
//   dq_ready[b]     1: the warp in poll_dq_semaphore if deterministic, else the one in
//                   zero_dq_accum, if it runs: dQ of a step may be added
//   Deterministic only:
//   dq_released[b]  1: the thread in release_dq_semaphore: the other two may be reused
// Step i uses buffer b = i % 2 of all but dO.
template <class TheTile>
struct SharedStorage {
  using Tile = TheTile;
  float lse[2][kBlockM];
  float minus_delta[kBlockM];
  Barrier keys_full;
  Barrier q_full[2], q_empty[2];
  Barrier dout_full, dout_empty;
  Barrier ds_full[2];
  Barrier other_full[2], other_empty[2];
  Barrier dq_ready[2], dq_added[2], dq_released[2];
  int32_t tile_index;  // deterministic, in CTA 0 of the cluster: index of the cluster's tile
  Tile tile;
  float slopes[2];  // of the query head; written before q_full

  // One thread calls it, before the CTA's first __syncthreads and the cluster's first barrier.
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 8;  // consumer warps
    keys_full.init(1);
    dout_full.init(1), dout_empty.init(kWarps);
    for (int i = 0; i < 2; ++i) {
      q_full[i].init(1), q_empty[i].init(kWarps);
      ds_full[i].init(kWarps);
      other_full[i].init(1), other_empty[i].init(kWarps);
      dq_ready[i].init(1), dq_added[i].init(kWarps), dq_released[i].init(1);
    }
    fence_barrier_init();
  }
};

template <Config kTheConfig>
struct KernelTraits {
  static constexpr Config kConfig = kTheConfig;
  static constexpr bool kListed = kConfig.listed;
  using Arguments = std::conditional_t<kListed, ListedArguments, backward::Arguments>;
  using Tile = std::conditional_t<kListed, ListedWorkTile, WorkTile>;
  using Storage = SharedStorage<Tile>;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kConsumers = kConfig.num_mma_warpgroups;
  static constexpr int kThreads = num_threads(kConfig);
  static constexpr int kBlockN = block_n(kConfig) / 2;  // of a CTA
  static constexpr int kHalf = kHeadDim / 2;  // columns of dK and dV that a warpgroup accumulates
  static constexpr int kQuarter = kHeadDim / 4;                 // and of dQ
  static constexpr int kAtoms = head_dim_bytes(kConfig) / 128;  // 64 columns each
  static constexpr int kNBlockBytes = kBlockN * kAtoms * 128;
  static constexpr int kMBlockBytes = kBlockM * kAtoms * 128;
  static constexpr int kDsBytes = kBlockN * kBlockM * 2;
  // Shared memory, in bytes: SharedStorage, K, V, half of the columns of the other CTA's K, two
  // tiles of Q, one of dO, two each of P, dS and the other CTA's dS.
  static constexpr int kKOffset = kSharedStorageBytes;
  static constexpr int kVOffset = kKOffset + kNBlockBytes;
  static constexpr int kOtherKOffset = kVOffset + kNBlockBytes;
  static constexpr int kQOffset = kOtherKOffset + kNBlockBytes / 2;
  static constexpr int kDoutOffset = kQOffset + 2 * kMBlockBytes;
  static constexpr int kPOffset = kDoutOffset + kMBlockBytes;
  static constexpr int kDsOffset = kPOffset + 2 * kDsBytes;
  static constexpr int kOtherDsOffset = kDsOffset + 2 * kDsBytes;

  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static_assert(kConsumers == 2 && kConfig.num_stages == 2);
  static_assert(kConfig.head_dim_v == kHeadDim);
  static_assert(kHeadDim == 256, "halves and quarters are whole chunks");
  static_assert(kOtherDsOffset + 2 * kDsBytes == smem_bytes(kConfig));
  static_assert(smem_bytes(kConfig) <= 232448, "227 KB for a CTA");
};

}  // namespace flashattn3::backward::cluster2
