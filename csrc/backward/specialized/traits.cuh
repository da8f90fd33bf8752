// Compile-time constants of a kernel config of 192 columns. A 2-CTA cluster computes an n_block, 64
// keys per CTA, and the two consumer warpgroups of a CTA have roles of their own (roles.cuh).
#pragma once

#include <cstdint>

#include "backward/config.h"
#include "backward/work_tile.cuh"
#include "ptx/mbarrier.cuh"

namespace flashattn3::backward::specialized {

// Barriers, and the arrivals for each phase:
//   keys_full    1: the producer, and the bytes of K, V and of K's columns for dQ; one phase
//   q_full[b], dout_full[b]  1: the producer, and the bytes of the copies
//   q_empty[b]      one for each score warp, dout_empty[b] one for each gradient warp, after its
//                   last read: no other warp reads Q and lse, or dO and delta
//   p_full[b]       one for each score warp: its part of P of a step is written
//   ds_full[b]      one for each gradient warp: its part of dS of a step is written
//   ds_empty[b]     one for each consumer warp of both CTAs: it has read this CTA's dS
//   other_full[b]   1: this CTA's exchange_ds thread, and the bytes of the other CTA's dS
//   dq_added[b]     one for each consumer warp: it has added dQ of a step; unless deterministic, of
//                   all steps, in b = 0
//   dq_ready[b]     1: the warp in poll_dq_semaphore if deterministic, else the one in
//                   zero_dq_accum, if it runs: dQ of a step may be added
//   Deterministic only:
//   dq_released[b]  1: the thread in release_dq_semaphore: the other two may be reused
// Step i uses buffer b = i % 2.
struct SharedStorage {
  float lse[2][kBlockM];
  float minus_delta[2][kBlockM];
  Barrier keys_full;
  Barrier q_full[2], q_empty[2];
  Barrier dout_full[2], dout_empty[2];
  Barrier p_full[2];
  Barrier ds_full[2], ds_empty[2];
  Barrier other_full[2];
  Barrier dq_ready[2], dq_added[2], dq_released[2];
  int32_t tile_index;  // deterministic, in CTA 0 of the cluster: index of the cluster's tile
  WorkTile tile;

  // One thread calls it, before the CTA's first __syncthreads and the cluster's first barrier.
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4;  // of a warpgroup
    keys_full.init(1);
    for (int i = 0; i < 2; ++i) {
      q_full[i].init(1), q_empty[i].init(kWarps);
      dout_full[i].init(1), dout_empty[i].init(kWarps);
      p_full[i].init(kWarps);
      ds_full[i].init(kWarps), ds_empty[i].init(4 * kWarps);
      other_full[i].init(1);
      dq_ready[i].init(1), dq_added[i].init(2 * kWarps), dq_released[i].init(1);
    }
    fence_barrier_init();
  }
};

template <Config kTheConfig>
struct KernelTraits {
  static constexpr Config kConfig = kTheConfig;
  using Arguments = backward::Arguments;
  using Tile = WorkTile;
  using Storage = SharedStorage;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kConsumers = kConfig.num_mma_warpgroups;
  static constexpr int kThreads = num_threads(kConfig);
  static constexpr int kBlockN = block_n(kConfig) / 2;          // of a CTA
  static constexpr int kQuarter = kHeadDim / 4;                 // columns of dQ of a warpgroup
  static constexpr int kAtoms = head_dim_bytes(kConfig) / 128;  // 64 columns each
  static constexpr int kAtomBytes = 64 * 128;                   // all tiles have 64 rows
  static constexpr int kTileBytes = kAtoms * kAtomBytes;
  static constexpr int kDsBytes = kBlockN * kBlockM * 2;
  // Shared memory, in bytes: SharedStorage; K; V; the columns of this CTA's half of dQ, of its own
  // and of the other CTA's K, each quarter in an atom of which 48 columns are used; two tiles each
  // of Q, dO, P, dS and the other CTA's dS.
  static constexpr int kKOffset = kSharedStorageBytes;
  static constexpr int kVOffset = kKOffset + kTileBytes;
  static constexpr int kDqKOffset = kVOffset + kTileBytes;
  static constexpr int kOtherKOffset = kDqKOffset + 2 * kAtomBytes;
  static constexpr int kQOffset = kOtherKOffset + 2 * kAtomBytes;
  static constexpr int kDoutOffset = kQOffset + 2 * kTileBytes;
  static constexpr int kPOffset = kDoutOffset + 2 * kTileBytes;
  static constexpr int kDsOffset = kPOffset + 2 * kDsBytes;
  static constexpr int kOtherDsOffset = kDsOffset + 2 * kDsBytes;

  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static_assert(kConsumers == 2 && kBlockM == 64 && kBlockN == 64);
  static_assert(kQuarter == 48 && kConfig.head_dim_v == kHeadDim, "GEMM widths");
  static_assert(kOtherDsOffset + 2 * kDsBytes == smem_bytes(kConfig));
  static_assert(smem_bytes(kConfig) <= 232448, "227 KB for a CTA");
};

}  // namespace flashattn3::backward::specialized
